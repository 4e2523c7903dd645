"""The decode loop on a tiny model: laws 1, 3a and 6, ends, and what speculation must not change."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import decode
from jaxspec.config import SamplingParams
from jaxspec.kv.policy import Policy
from jaxspec.program import Finish
from jaxspec.sampling import sampling_row
from jaxspec.tree import Tree
from jaxspec.types import Drafter, Proposal
from pallas_kernels.layout import Variant
from tests.driver import PAGE, SPEC, VOCAB, Job, decode_all, make_program, page_lists, random_params, table_width

PARAMS = random_params()
SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    logit_bias={7: 2.0, 9: -3.0},
    max_tokens=20,
    logprobs=0,
)
MIX = {
    0: Job([5, 6, 7, 8, 9, 10, 11], SamplingParams(max_tokens=20, logprobs=0)),
    1: Job([1, 2, 3], SamplingParams(temperature=0.7, max_tokens=20, logprobs=0), seed=3),
    2: Job([4], SamplingParams(temperature=1.0, max_tokens=20, logprobs=0), seed=2**40 + 1),
    3: Job(list(range(20, 33)), SAMPLED, seed=5),
}


def scripted(tree: Tree, script: np.ndarray, wrong: float, widths: tuple[int, ...] = (), seed: int = 0) -> Drafter:
    """Drafts what the script says comes next, and rubbish with the given probability; some nodes say nothing."""
    rng = np.random.default_rng(seed)
    table = jnp.asarray(np.pad(script, ((0, 0), (0, 64))))
    fail = jnp.asarray(rng.random((97, tree.size)) < wrong)
    noise = jnp.asarray(rng.integers(0, VOCAB, (97, tree.size)))
    silent = jnp.asarray(rng.random((97, tree.size)) < 0.1)
    depth = jnp.asarray(tree.depths[1:], jnp.int32)

    def propose(params, state, pool, view, pool_spec):
        progress = view.progress
        ahead = progress.ordinal[:, None] + depth - 1
        right = jnp.take_along_axis(table, ahead, axis=1)
        which = (progress.ordinal * 7 + jnp.arange(progress.ordinal.shape[0])) % 97
        tokens = jnp.where(fail[which], noise[which], right).astype(jnp.int32)
        return Proposal(tokens, ~silent[which]), state, pool

    return Drafter(
        tree,
        widths or (tree.width,),
        init=lambda batch, context: (),
        admit=lambda state, row, prompt, length: state,
        propose=propose,
        observe=lambda state, proposal, verdict, emitted, hidden: state,
    )


def random_tree(nodes: int, seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    return Tree(tuple(int(rng.integers(max(0, i - 4), i + 1)) for i in range(nodes)))


def script_of(results, batch: int = 4) -> np.ndarray:
    length = max(len(r.tokens) for r in results.values())
    script = np.zeros((batch, length), np.int32)
    for row, result in results.items():
        script[row, : len(result.tokens)] = result.tokens
    return script


PLAIN = make_program(pages=160)


@pytest.fixture(scope="module")
def plain():
    return decode_all(PARAMS, PLAIN, MIX)


@pytest.fixture(scope="module")
def chain(plain):
    """A program that drafts a chain of four, nearly always right: blocks of up to five tokens are accepted."""
    return make_program(scripted(Tree.chain(4), script_of(plain), 0.0), pages=160)


@pytest.fixture(scope="module")
def tree(plain):
    """A program that drafts a tree of six nodes, some of them wrong, in rows as wide as need be."""
    return make_program(scripted(random_tree(6, 4), script_of(plain), 0.4, widths=(1, 3, 7)), pages=160)


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [(Tree.chain(5), 0.4), (random_tree(9, 1), 0.3), (random_tree(40, 2), 0.8), (Tree((0, 0, 0, 1, 1, 2, 4)), 0.5)],
)
def test_law_1_drafts_change_speed_and_nothing_else(plain, shape: Tree, wrong: float):
    got = decode_all(PARAMS, make_program(scripted(shape, script_of(plain), wrong), pages=160), MIX)
    for row, expected in plain.items():
        assert got[row].tokens == expected.tokens
        assert got[row].finish == expected.finish
        np.testing.assert_allclose(got[row].logprobs, expected.logprobs, atol=1e-4)
    steps = sum(r.steps for r in got.values())
    accepted, drafted = sum(r.accepted for r in got.values()), sum(r.drafted for r in got.values())
    emitted = sum(len(r.tokens) for r in got.values())
    assert emitted - steps <= accepted <= drafted
    assert steps < emitted  # something was accepted, or this shows nothing


def test_right_drafts_are_accepted(plain, chain):
    got = decode_all(PARAMS, chain, {0: MIX[0]})
    assert got[0].tokens == plain[0].tokens
    # A node in ten is silent: with none silent 20 tokens take 4 rounds.
    assert got[0].steps <= 8


def test_the_model_tells_contexts_apart(plain):
    assert len(set(plain[0].tokens)) > 5
    assert len({tuple(r.tokens) for r in plain.values()}) == 4


@pytest.mark.parametrize("drafts", [False, True])
def test_law_3a_company_and_pages_change_no_bit(tree, drafts: bool):
    program = tree if drafts else PLAIN
    together = decode_all(PARAMS, program, MIX)
    for row, job in MIX.items():
        alone = decode_all(PARAMS, program, {row: job}, pages=page_lists(program, 4, seed=9))[row]
        assert alone.tokens == together[row].tokens
        assert alone.logprobs.tobytes() == together[row].logprobs.tobytes()


def test_law_3a_any_row_of_the_batch(plain):
    moved = {3 - row: job for row, job in MIX.items()}
    got = decode_all(PARAMS, PLAIN, moved)
    for row in MIX:
        assert got[3 - row].tokens == plain[row].tokens
        assert got[3 - row].logprobs.tobytes() == plain[row].logprobs.tobytes()


@pytest.mark.parametrize(("page", "chunk", "batch"), [(1, 8, 4), (7, 3, 4), (16, 32, 5), (4, 1, 9)])
def test_law_3b_shapes_change_rounding_only(plain, page: int, chunk: int, batch: int):
    program = make_program(page=page, pages=9 * 48 // page + 9)
    got = decode_all(PARAMS, program, MIX, batch=batch, chunk=chunk)
    for row, expected in plain.items():
        assert got[row].tokens == expected.tokens
        np.testing.assert_allclose(got[row].logprobs, expected.logprobs, atol=1e-3)


def poison(program, jobs, pages):
    """NaN in keys and a large value in values of every slot that no prompt has filled."""

    def edit(state):
        filled = np.zeros((program.pool.num_pages, program.pool.page_size), bool)
        for row, job in jobs.items():
            for slot in range(len(job.prompt) - 1):
                filled[pages[row][slot // program.pool.page_size], slot % program.pool.page_size] = True
        kv = np.array(state.pool["kv"]).reshape(SPEC.num_layers, program.pool.num_pages, *state.pool["kv"].shape[1:])
        free = np.broadcast_to(~filled[None, :, None, :, None], kv[:, :, :, 0].shape)
        kv[:, :, :, 0][free] = np.nan
        kv[:, :, :, 1][free] = 1e30
        return state._replace(pool={"kv": jnp.asarray(kv.reshape(state.pool["kv"].shape))})

    return edit


def test_law_5_nothing_but_own_committed_slots_is_seen(plain, tree):
    pages = page_lists(tree, 4)
    got = decode_all(PARAMS, tree, MIX, pages=pages, edit=poison(tree, MIX, pages))
    for row, expected in plain.items():
        assert got[row].tokens == expected.tokens
        assert np.isfinite(got[row].logprobs).all()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_max_tokens_is_met_exactly_whatever_is_accepted(plain, chain, max_tokens: int):
    job = MIX[0]._replace(params=SamplingParams(max_tokens=max_tokens))
    got = decode_all(PARAMS, chain, {0: job})[0]
    assert got.tokens == plain[0].tokens[:max_tokens]
    assert got.finish == Finish.LENGTH


@pytest.mark.parametrize("at", [0, 1, 4, 6, 11])
def test_end_of_sequence_inside_an_accepted_span_ends_the_text(plain, chain, at: int):
    eos = plain[0].tokens[at]
    first = plain[0].tokens.index(eos)
    job = MIX[0]._replace(eos_ids=(60, eos))
    for program in (PLAIN, chain):
        got = decode_all(PARAMS, program, {0: job})[0]
        assert got.tokens == plain[0].tokens[: first + 1]
        assert got.finish == Finish.STOP


def test_min_tokens_bans_the_end_until_then(plain, chain):
    eos = plain[0].tokens[2]
    for program in (PLAIN, chain):
        job = MIX[0]._replace(params=SamplingParams(max_tokens=12, min_tokens=6), eos_ids=(eos,))
        got = decode_all(PARAMS, program, {0: job})[0]
        assert eos not in got.tokens[:6]
        assert len(got.tokens) >= 6


def test_the_context_is_filled_to_its_last_slot():
    job = Job([1, 2, 3], SamplingParams(max_tokens=SPEC.max_context - 3))
    plain = decode_all(PARAMS, PLAIN, {0: job})
    drafter = scripted(Tree.chain(4), script_of(plain, 4), 0.2)
    got = decode_all(PARAMS, make_program(drafter, pages=160), {0: job})[0]
    assert len(got.tokens) == SPEC.max_context - 3
    assert got.tokens == plain[0].tokens


def test_seeds_samples_and_mates_have_streams_of_their_own():
    hot = SamplingParams(temperature=1.5, max_tokens=16)
    jobs = {row: Job([1, 2, 3], hot, seed=seed) for row, seed in enumerate([0, 1, 2**32, 0])}
    got = decode_all(PARAMS, PLAIN, jobs)
    assert got[0].tokens == got[3].tokens
    assert len({tuple(r.tokens) for r in got.values()}) == 3


def test_logits_that_are_not_finite_end_their_row_only(plain):
    params = random_params()
    broken = np.array(params.target["embed"]["weight"])
    broken[50] = np.nan
    params.target["embed"]["weight"] = jnp.asarray(broken)
    jobs = {0: MIX[0], 1: Job([50, 1], SamplingParams(max_tokens=9))}
    got = decode_all(params, PLAIN, jobs)
    assert got[1].finish == Finish.NOT_FINITE
    assert got[1].tokens == []
    assert got[0].tokens == plain[0].tokens


def compiled_run(program, batch: int):
    state = decode.init_state(program, batch, table_width(program))
    return decode.run.lower(PARAMS, state, np.int32(1), np.int32(1), program=program).compile()


@pytest.mark.parametrize("drafts", [False, True])
def test_law_6_rounds_copy_no_pool_and_call_no_host(tree, drafts: bool):
    program = tree if drafts else PLAIN
    text = compiled_run(program, 4).as_text()
    shape = re.escape(f"f32[{SPEC.num_layers * program.pool.num_pages},{SPEC.num_kv_heads},2,{PAGE},{SPEC.head_dim}]")
    assert re.search(shape, text)  # the pattern does name the pool
    assert not re.findall(rf"= {shape}\S* copy\(", text)
    assert set(re.findall(r'custom_call_target="([^"]*)"', text)) <= {"TopK"}
    assert not re.findall(r" (outfeed|infeed|send|recv)\(", text)


def test_law_6_votes_and_condensing_copy_no_pool():
    pool = replace(PLAIN.pool, policy=Policy(Variant(mass=True), heavy=3, recent=4), slots=table_width(PLAIN) * PAGE)
    program = replace(PLAIN, pool=pool)
    state, line = decode.init_state(program, 4, table_width(program)), np.zeros(table_width(program), np.int32)
    condense = decode.condense_row.lower(state, np.int32(0), line, line, program=program).compile()
    size = program.pool.page_bytes * program.pool.num_pages
    for compiled in (compiled_run(program, 4), condense):
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < size
        assert memory.alias_size_in_bytes >= size


def test_law_6_the_pool_is_updated_where_it_lies():
    program = PLAIN
    memory = compiled_run(program, 4).memory_analysis()
    pool = program.pool.page_bytes * program.pool.num_pages
    assert memory.temp_size_in_bytes < pool
    assert memory.alias_size_in_bytes >= pool


def test_selecting_rows_keeps_requests_whole():
    program = PLAIN
    state = decode.init_state(program, 4, table_width(program))
    state = state._replace(progress=state.progress._replace(token=jnp.arange(4, dtype=jnp.int32)))
    state = decode.select_rows(state, jnp.int32([2, 0]))
    assert state.progress.token.tolist() == [2, 0]
    assert state.sequences.page_table.shape == (1, 2, table_width(program))
    assert jax.tree.leaves(state.sampling)[0].shape[0] == 2


def test_law_6_one_program_serves_all_drafts_acceptances_and_mixes():
    """200 rounds of random drafts in every width, of rows that come and go with options of all kinds."""
    options = [job.params for job in MIX.values()]
    tree, rng = Tree.chain(7), np.random.default_rng(0)

    def propose(params, state, pool, view, pool_spec):
        key = jax.random.fold_in(jax.random.key(0), view.progress.steps.sum())
        tokens = jax.random.bernoulli(key, 0.1, (4, 7)).astype(jnp.int32)
        return Proposal(tokens, jnp.arange(7) < jax.random.randint(key, (4, 1), 0, 8)), state, pool

    drafter = scripted(tree, np.zeros((4, 1), np.int32), 0.0, widths=(1, 4, 8))._replace(propose=propose)
    program = make_program(drafter, pages=160)
    state = decode.init_state(program, 4, table_width(program))
    state = decode.set_pages(state, np.int32(page_lists(program, 4)), np.zeros(4, np.int32))
    prompt = np.zeros(SPEC.max_context, np.int32)
    prompt[:3] = 0, 1, 2
    counts, compiled = set(), set()
    for call in range(200):
        if call % 10 == 0:
            # Half of them ask for the token that is mostly drafted.
            bias = {0: 30.0} if call % 20 else {}
            params = options[rng.integers(len(options))]
            params = SamplingParams(temperature=params.temperature, top_k=params.top_k, logit_bias=bias, max_tokens=40)
            row, sampling = int(rng.integers(4)), sampling_row(params, seed=call, max_tokens=40)
            state = decode.admit(state, np.int32(row), prompt, np.int32(3), sampling, program=program)
            state = decode.set_active(state, np.arange(4) <= row)
        state, out = decode.run(PARAMS, state, np.int32(1), np.int32(1), program=program)
        counts |= set(np.asarray(out.count).tolist())
        compiled.add(decode.run._cache_size())
    assert counts == set(range(9))  # of a row that stands still, and after none to all of the drafts
    assert len(compiled) == 1
