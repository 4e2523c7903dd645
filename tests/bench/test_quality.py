"""Perplexity, agreement and divergence against a dense forward in float64, and faults that they must see."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.quality import Marks, Subject, _table, compare, figures, read_window
from jaxspec.errors import LoadError
from jaxspec.kv.format import Format
from jaxspec.kv.formats import format_names, get_format
from jaxspec.kv.policy import FULL, Policy
from jaxspec.kv.pool import PoolSpec
from jaxspec.types import Params
from pallas_kernels.layout import Variant
from tests.driver import SPEC, VOCAB, random_params
from tests.oracles import dense, heavy

PARAMS, OTHER = random_params().target, random_params(1).target


def subject(form: str | Format = "float32", params: Params = PARAMS, policy: Policy = FULL) -> Subject:
    form = get_format(form) if isinstance(form, str) else form
    shape = SPEC.num_layers, 1, 64, SPEC.num_kv_heads, SPEC.head_dim
    return Subject(params, SPEC, PoolSpec(form, *shape, policy=policy))


def dense_log_probs(params: Params, tokens: np.ndarray) -> np.ndarray:
    """Log probabilities `[N, VOCAB]` after every token, without a cache and in float64."""
    return dense.logprobs(params, SPEC, tokens.tolist())


@cache
def own_text() -> list[int]:
    """A window that the model itself has written, sampled: to it the text is likely."""
    rng = np.random.default_rng(0)
    tokens = [7]
    while len(tokens) < 128:
        chances = np.exp(dense_log_probs(PARAMS, np.array(tokens))[-1])
        tokens.append(int(rng.choice(VOCAB, p=chances / chances.sum())))
    return tokens


def test_marks_are_those_of_a_dense_forward() -> None:
    """Over calls, rows and pieces of logits, whose borders are all inside the window."""
    window = np.random.default_rng(0).integers(0, VOCAB, 320)
    told: list[int] = []
    same, other = compare([subject(), subject(params=OTHER)], window.tolist(), told.append)
    p, q = (dense_log_probs(params, window)[:-1] for params in (PARAMS, OTHER))
    for marks, log_probs in ((same, p), (other, q)):
        np.testing.assert_allclose(marks.surprise, -log_probs[np.arange(319), window[1:]], atol=1e-4)
    np.testing.assert_allclose(other.divergence, np.sum(np.exp(p) * (p - q), axis=1), atol=1e-4)
    np.testing.assert_array_equal(other.agrees, p.argmax(1) == q.argmax(1))
    assert 0 < other.agrees.mean() < 0.5
    assert told == [320, 320]


def test_where_tokens_have_votes_each_is_read_for_itself() -> None:
    """Pages of 64 slots: of 144 tokens that are there 80 stay, twice."""
    text = np.random.default_rng(2).integers(0, VOCAB, 256).tolist()
    [marks] = compare([subject(policy=Policy(Variant(mass=True), heavy=30, recent=50))], text)
    rounds = [[token] for token in text[1:]]
    expected = heavy.logprobs(PARAMS, SPEC, text[:1], rounds, heavy.Rule(30, 50, 144))
    np.testing.assert_allclose(-marks.surprise, expected[np.arange(255), text[1:]], atol=1e-3)


@pytest.mark.parametrize(("window", "sinks", "by_cache"), [(70, 0, False), (64, 4, True)])
def test_long_texts_are_written_over_what_no_token_sees(window: int, sinks: int, by_cache: bool) -> None:
    """In a pool that the text does not fit in, as the pages between sinks and window are used again and again."""
    text = np.random.default_rng(1).integers(0, VOCAB, 1280)
    policy = Policy(Variant(window=window, sinks=sinks), by_cache)
    assert _table(subject(policy=policy).pool, len(text)).max() < 8
    [marks] = compare([subject(policy=policy)], text.tolist())
    expected = dense.logprobs(PARAMS, SPEC, text.tolist(), window, sinks, by_cache)[:-1]
    np.testing.assert_allclose(-marks.surprise, expected[np.arange(1279), text[1:]], atol=1e-4)


def test_a_subject_has_no_distance_to_itself() -> None:
    first, second = compare([subject(), subject()], own_text())
    assert np.all(first.divergence == 0)
    assert np.all(second.divergence == 0)
    assert figures([second], [first])["agreement"] == 1.0
    assert figures([second], [first])["perplexity_change"] == 0.0


@pytest.mark.parametrize("name", [name for name in format_names() if name != "float32"])
def test_every_format_is_near_the_reference_and_not_equal(name: str) -> None:
    reference, own = compare([subject(), subject(name)], own_text())
    found = figures([own], [reference])
    assert 1e-7 < found["kl"] < 0.3
    assert found["agreement"] > 0.7
    assert 0 < abs(found["perplexity_change"]) < 0.3


def test_a_format_that_loses_values_is_seen() -> None:
    plain = get_format("float32")
    faulty = plain._replace(write=lambda arrays, pages, offsets, k, v: plain.write(arrays, pages, offsets, k, 0 * v))
    reference, own = compare([subject(), subject(faulty)], own_text())
    found = figures([own], [reference])
    assert found["kl"] > 0.3
    assert found["perplexity_change"] > 0.3
    assert found["agreement"] < 0.8


def test_what_is_attended_to_is_what_is_stored() -> None:
    """Values doubled when they are read show as those doubled when they are written."""
    plain = get_format("float32")
    written = plain._replace(write=lambda arrays, pages, offsets, k, v: plain.write(arrays, pages, offsets, k, 2 * v))
    read = plain._replace(read=lambda arrays, pages, which: plain.read(arrays, pages, which) * (1 + which))
    states = [read_window(subject(form), own_text()) for form in (plain, written, read)]
    np.testing.assert_array_equal(states[1], states[2])
    assert np.abs(states[0] - states[1]).max() > 0.1


def test_windows_are_weighed_by_their_tokens() -> None:
    def marks(*surprise: float) -> Marks:
        nats = np.float32(surprise)
        return Marks(nats, nats > 1.5, nats / 10)

    found = figures([marks(1.0, 2.0), marks(3.0)], [marks(1.0, 1.0), marks(2.5)])
    assert found["perplexity"] == pytest.approx(np.exp(2.0))
    assert found["perplexity_change"] == pytest.approx(np.exp(0.5) - 1)
    assert found["agreement"] == pytest.approx(2 / 3)
    assert found["kl"] == pytest.approx(0.2)


def test_logits_that_are_not_finite_are_refused() -> None:
    broken = PARAMS | {"norm": {"weight": jnp.full(SPEC.embed_dim, jnp.nan)}}
    with pytest.raises(LoadError, match="not finite"):
        compare([subject(), subject(params=broken)], own_text())
