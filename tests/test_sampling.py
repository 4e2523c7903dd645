"""Sampling piece by piece: adjusted logits and kept sets against a float64 sampler, and what must never happen."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import noise, sampling
from jaxspec.config import SamplingParams
from tests.oracles import numpy_sampler as oracle
from tests.oracles.requests import BATTERY, Request, draw, draw_rows, history_of, random_requests, sampling_of

VOCAB, WIDTH = 11, 512
REQUESTS = random_requests(BATTERY, VOCAB, seed=7)
LOGITS = np.random.default_rng(8).normal(0, 2, (len(REQUESTS), VOCAB)).astype(np.float32)
DRAW = jax.jit(draw)
NAN, INF = np.float32(np.nan), np.float32(np.inf)


def adjusted(logits: np.ndarray, requests: list[Request]) -> np.ndarray:
    rows = zip(logits, requests, strict=True)
    return np.stack([oracle.adjusted(z, r.params, r.prompt, r.output, r.stop_ids, ordinal=0) for z, r in rows])


def drawn(logits: np.ndarray, requests: list[Request]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens at many ordinals and usability, in one program for all tests: what is missing is padded and cut again."""
    count, mates = len(requests), len(REQUESTS) - len(requests)
    padded = np.pad(logits, ((0, mates), (0, VOCAB - logits.shape[1])), constant_values=-INF)
    tokens, usable = draw_rows(DRAW, padded, [*requests, *[Request(SamplingParams())] * mates], WIDTH)
    return tokens[:count], usable[:count]


def tokens_of(logits: np.ndarray, requests: list[Request]) -> np.ndarray:
    return drawn(logits, requests)[0]


def one(logits: list[float], **options) -> np.ndarray:
    """The tokens that a single request draws from these logits at many ordinals."""
    return tokens_of(np.array([logits], np.float32), [Request(SamplingParams(**options), seed=5)])[0]


@pytest.mark.parametrize("vocab", [VOCAB, 300])
def test_adjusted_logits_equal_the_float64_ones(vocab: int) -> None:
    requests = random_requests(BATTERY, vocab, seed=vocab)
    logits = np.random.default_rng(5).normal(0, 3, (len(requests), vocab)).astype(np.float32)
    ordinal = jnp.zeros((len(requests), 1), jnp.int32)
    found = jax.jit(sampling.adjust)(
        jnp.asarray(logits[:, None]), sampling_of(requests), history_of(requests, vocab), None, ordinal
    )
    np.testing.assert_allclose(np.asarray(found)[:, 0], adjusted(logits, requests), rtol=2e-6, atol=2e-6)


def _spotlight(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A draw whose noise at ordinal j lifts token j above all others: it is drawn exactly where the filters keep it."""
    monkeypatch.setattr(sampling, "gumbel", lambda keys, ids: jnp.where(ids == keys[..., 1:], 1e6, 0.0))
    monkeypatch.setattr(noise, "noise_keys", lambda s, n, at, p: jnp.stack([at, at], -1).astype(jnp.uint32))
    return jax.jit(partial(draw))


@pytest.mark.parametrize("vocab", [VOCAB, 300])
def test_the_kept_set_is_the_float64_one(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded logits are full of ties; those at a cut-off are all kept."""
    run = _spotlight(monkeypatch)
    for seed, step in ((0, 0), (1, 0), (2, 1.0), (3, 0.5), (4, 0)):
        requests = random_requests(BATTERY, vocab, seed)
        logits = np.random.default_rng(seed).normal(0, 2, (len(requests), vocab)).astype(np.float32)
        logits = np.round(logits / step) * np.float32(step) if step else logits
        tokens, _ = draw_rows(run, logits, requests, vocab)
        for row, z in enumerate(adjusted(logits, requests)):
            params = requests[row].params
            if params.temperature > 0:
                scaled = z / params.temperature
                unsure = oracle.doubtful(scaled, params)
                assert unsure.sum() <= (8 if step else 1)
                kept = tokens[row] == np.arange(vocab)
                np.testing.assert_array_equal(kept | unsure, oracle.kept(scaled, params) | unsure, str(params))


@pytest.mark.parametrize(
    ("logits", "options", "kept"),
    [
        ([1, 0, 1, 1, -1], {"top_k": 1}, {0, 2, 3}),
        ([1, 0, 2, 0, -1], {"top_k": 3}, {0, 1, 2, 3}),
        ([3, 0.5, 3, 3, -1], {"top_p": 0.5}, {0, 2, 3}),
        ([3, 0, 3, 3, -9], {"top_k": 2, "top_p": 0.99}, {0, 2, 3}),
        ([2, 2, 1, 1, 0], {"min_p": 1.0}, {0, 1}),
        ([0.0, -0.0, -1, -2, -3], {"top_k": 1}, {0, 1}),
    ],
)
def test_ties_at_a_cut_off_are_all_kept(logits: list[float], options: dict, kept: set[int]) -> None:
    assert set(one(logits, temperature=1.0, **options)) == kept


def test_the_threshold_is_an_exact_logit() -> None:
    scaled = np.random.default_rng(0).normal(-3, 4, (3, 5, 64)).astype(np.float32)
    requests = [Request(SamplingParams(temperature=1, top_k=k)) for k in (1, 7, 64)]
    found = np.asarray(sampling.keep_threshold(jnp.asarray(scaled), sampling_of(requests)))
    descending = -np.sort(-scaled, axis=-1)
    np.testing.assert_array_equal(found, np.stack([descending[i, :, k - 1] for i, k in enumerate((1, 7, 64))]))


@pytest.mark.parametrize("options", [{}, {"logit_bias": {9: 0.5}}, {"presence_penalty": 0.5}])
def test_greedy_ties_take_the_lowest_id(options: dict) -> None:
    assert set(one([0, 2, -1, 2, 1, 2], **options)) == {1}
    assert set(one([-3, -3, -3, -3], **options)) == {0}


def test_a_greedy_row_is_exact_to_the_last_bit_beside_hot_ones() -> None:
    """The best logit is one float above a lower id's: an approximation by a tiny temperature would lose that."""
    requests, logits = list(REQUESTS), LOGITS.copy()
    best = np.float32(17.3)
    logits[0], logits[0, 9], logits[0, 2] = 0, best, np.nextafter(best, np.float32(0))
    assert requests[0].params == SamplingParams()
    assert set(tokens_of(logits, requests)[0]) == {9}
    assert set(tokens_of(logits[:1], requests[:1])[0]) == {9}


def test_the_smallest_temperature_is_greedy() -> None:
    """1e-6 neither overflows nor draws anything but the best token, with and without filters."""
    options: list[dict] = [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}]
    for scale in (1.0, 1e33):
        logits = (LOGITS[:4] * scale).astype(np.float32)
        requests = [Request(SamplingParams(temperature=1e-6, **o)) for o in options]
        np.testing.assert_array_equal(tokens_of(logits, requests), np.argmax(logits, -1)[:, None].repeat(WIDTH, 1))


# Company


def test_a_row_draws_the_same_wherever_it_stands() -> None:
    tokens = tokens_of(LOGITS, REQUESTS)
    order = np.random.default_rng(0).permutation(len(REQUESTS))
    np.testing.assert_array_equal(tokens_of(LOGITS[order], [REQUESTS[i] for i in order]), tokens[order])


@pytest.mark.parametrize(
    "mate", [SamplingParams(), BATTERY[-1], SamplingParams(temperature=1, top_p=0.5)], ids=range(3)
)
@pytest.mark.parametrize("fill", [0.0, NAN, -INF])
def test_a_row_draws_the_same_beside_any_mates(mate: SamplingParams, fill: float) -> None:
    """Every third row stays; the others become other requests with other logits, unusable ones among them."""
    tokens = tokens_of(LOGITS, REQUESTS)
    for kept in (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3), slice(0, 1), slice(20, 21)):
        logits, requests = np.full_like(LOGITS, fill), [Request(mate, (1, 2), (3, 3), (0,), 1)] * len(REQUESTS)
        logits[kept], requests[kept] = LOGITS[kept], REQUESTS[kept]
        np.testing.assert_array_equal(tokens_of(logits, requests)[kept], tokens[kept])


def test_nothing_but_seed_sample_and_ordinal_moves_a_draw() -> None:
    base = Request(SamplingParams(temperature=1.0), seed=5)
    others = [Request(base.params, (7,), (8,), (9,), 5), Request(base.params, seed=5, sample=1)]
    others += [Request(base.params, seed=5 ^ 1 << bit) for bit in (0, 31, 32, 63)]
    first, same, *different = tokens_of(np.zeros((7, VOCAB), np.float32), [base, *others])
    np.testing.assert_array_equal(first, same)
    for tokens in different:
        assert np.mean(tokens == first) < 0.25


# Unusable logits and extreme options


@pytest.mark.parametrize("bad", [[NAN], [NAN, NAN], [INF], [INF, INF], [INF, NAN, -INF], [-INF] * VOCAB, [NAN] * VOCAB])
def test_bad_logits_are_told_and_never_give_an_id_outside_the_vocabulary(bad: list[float]) -> None:
    logits = LOGITS.copy()
    logits[:, VOCAB - len(bad) :] = bad
    logits[::2] = LOGITS[::2]
    tokens, usable = drawn(logits, REQUESTS)
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB
    assert usable[::2].all()
    assert not usable[1::2].any()
    np.testing.assert_array_equal(tokens[::2], tokens_of(LOGITS, REQUESTS)[::2])


def test_a_real_vocabulary_keeps_the_rules_of_a_small_one() -> None:
    """One NaN anywhere is told, and the lower of two best ids wins wherever they are; vector code differs by length."""
    vocab, places = 49_152, np.array([0, 1, 4_097, 24_576, 49_150, 49_151])
    logits = np.random.default_rng(0).uniform(-1, 1, size=(2 * len(places), vocab)).astype(np.float32)
    bad, good = np.arange(len(places)), np.arange(len(places), 2 * len(places))
    logits[bad, places] = NAN
    logits[good, places] = logits[good, np.roll(places, 1)] = 3
    tokens, usable = draw_rows(DRAW, logits, [Request(SamplingParams())] * len(logits), 1)
    np.testing.assert_array_equal(usable[:, 0], [False] * len(bad) + [True] * len(good))
    np.testing.assert_array_equal(tokens[good, 0], np.minimum(places, np.roll(places, 1)))


def test_padding_ids_are_never_drawn() -> None:
    """Minus infinity marks them; no temperature, penalty or bias of another token brings them back."""
    logits = LOGITS.copy()
    logits[:, 8:] = -INF
    assert tokens_of(logits, REQUESTS).max() < 8
    extreme = [
        {"temperature": 1e39},
        {"temperature": 1e30, "top_p": 0.999},
        {"temperature": 1.0, "logit_bias": {1: 1e39, 2: -1e39}},
        {"temperature": 1.0, "repetition_penalty": 1e39},
        {"temperature": 1.0, "repetition_penalty": 1e-50},
        {"temperature": 1e-6, "repetition_penalty": 1e-30, "top_k": 3},
    ]
    requests = [Request(SamplingParams(**options), (1, 2, 3), (4,)) for options in extreme]
    tokens, usable = drawn(logits[: len(requests)], requests)
    assert usable.all()
    assert tokens.max() < 8
    assert set(tokens[0]) == set(range(8))
    assert set(tokens[2]) == {1}


def test_a_row_holds_what_was_asked_for() -> None:
    row = sampling.sampling_row(
        SamplingParams(top_k=-1, stop_token_ids=[7, 9], logit_bias={3: 1.5}),
        seed=2**63 + 5,
        sample=2,
        max_tokens=30,
        eos_ids=(2,),
    )
    assert (row.temperature, row.top_k, row.sample, row.max_tokens, row.logprobs) == (0, 0, 2, 30, -1)
    assert row.seed.tolist() == [5, 2**31]
    assert row.stop_ids[:4].tolist() == [2, 7, 9, -1]
    assert (row.bias_ids[:2].tolist(), row.bias_values[:2].tolist()) == ([3, -1], [1.5, 0])
    ignoring = sampling.sampling_row(SamplingParams(ignore_eos=True, stop_token_ids=[7], logprobs=0), eos_ids=(2,))
    assert (ignoring.stop_ids[:2].tolist(), ignoring.logprobs) == ([7, -1], 0)
    assert sampling.sampling_row(SamplingParams(), seed=-1).seed.tolist() == [2**32 - 1] * 2


def test_more_than_32_bits_of_an_option_do_not_overflow() -> None:
    row = sampling.sampling_row(SamplingParams(top_k=2**40, min_tokens=2**40, max_tokens=2**40), max_tokens=2**40)
    assert row.top_k == row.min_tokens == row.max_tokens == 2**31 - 1


# Log probabilities


@pytest.mark.parametrize("asked", [(0, 5), (-1, 3), (20, 20)])
def test_log_probabilities_are_those_of_the_raw_logits(asked: tuple[int, int]) -> None:
    """Whatever the temperature and filters of the request are; one row that asks is enough."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 6, (2, 3, 40)).astype(np.float32)
    logits[..., 37:] = -INF
    tokens, path = rng.integers(37, size=(2, 2)), np.array([[0, 2], [0, 1]])
    params = [SamplingParams(temperature=0.3, top_k=2, logprobs=None if a < 0 else a) for a in asked]
    found = sampling.log_probabilities(
        jnp.asarray(logits),
        jnp.asarray(path),
        jnp.asarray(tokens),
        sampling_of([Request(p, (1,), (2,)) for p in params]),
        top=20,
    )
    wide = np.take_along_axis(logits, path[..., None], 1).astype(np.float64)
    wanted = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    ids = np.argsort(-wanted, axis=-1, kind="stable")[..., :20]
    np.testing.assert_array_equal(np.asarray(found.top_ids), ids)
    np.testing.assert_allclose(np.asarray(found.top), np.take_along_axis(wanted, ids, -1), atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(found.chosen), np.take_along_axis(wanted, tokens[..., None], -1)[..., 0], atol=1e-5
    )


def test_nobody_asking_for_log_probabilities_gives_zeros() -> None:
    logits = jnp.ones((2, 3, 40))
    path = jnp.zeros((2, 3), jnp.int32)
    found = sampling.log_probabilities(logits, path, path + 1, sampling_of(REQUESTS[:2]), top=20)
    assert all(not np.asarray(part).any() for part in found)
    assert found.top_ids.shape == found.top.shape == (2, 3, 20)
