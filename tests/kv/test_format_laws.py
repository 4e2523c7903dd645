"""The laws with every format that loses something, under every drafter: a text is that of plain decoding in the same
format, whatever its company, its pages and what free ones hold; and rounds copy no pool."""

import re
import tempfile
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig
from jaxspec.drafters import drafter_names, get_drafter
from jaxspec.drafters._model import model_drafter
from jaxspec.kv.format import Format
from jaxspec.kv.formats import format_names, get_format
from jaxspec.kv.formats.int4 import grouped
from jaxspec.models.loading import LoadedModel
from jaxspec.models.transformer import forward, logits_of
from jaxspec.program import Program
from jaxspec.tree import Tree
from jaxspec.types import Models, Sequences
from pallas_kernels import Rows
from tests.driver import PAGE, SPEC, VOCAB, decode_all, make_program, page_lists, random_params, write_heads
from tests.oracles.serving import spoil
from tests.test_decode import MIX, compiled_run, random_tree, script_of, scripted

PARAMS = random_params()
LOSSY = [name for name in format_names() if name not in ("float32", "bfloat16")]
CHUNK = PAGE
"""Prompts are written in rows that no group's end cuts."""
JOBS = {row: job._replace(prompt=[*job.prompt, *job.prompt, *job.prompt][:26]) for row, job in MIX.items()}
"""Texts that repeat themselves give n-grams something to find."""


def form_of(name: str) -> Format:
    """A format whose groups fit the driver's pages."""
    return grouped(PAGE) if name == "int4" else get_format(name)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "fp8")) for name in LOSSY]
)
def form(request: pytest.FixtureRequest) -> Format:
    return form_of(request.param)


@pytest.fixture(scope="module")
def plain(form: Format):
    return decode_all(PARAMS, make_program(kv=form, pages=160), JOBS, chunk=CHUNK)


@pytest.fixture(scope="module")
def full():
    """In full precision."""
    return decode_all(PARAMS, make_program(pages=160), JOBS, chunk=CHUNK)


@cache
def heads() -> str:
    """A folder of random heads."""
    return str(write_heads(Path(tempfile.mkdtemp()), SPEC, conditioned=16))


def program_of(name: str, form: Format, plain) -> tuple[Program, Models]:
    """Drafts by script, or a drafter by its name; a draft model is the target with its weights disturbed."""
    config = EngineConfig(
        drafter=name,
        draft_tokens=5,
        draft_adaptive=False,
        draft_layers=1,
        ngram_min=1,
        verify="coupled",
        medusa_heads=heads(),
    )
    draft = {}
    if name == "chain":
        drafter = scripted(Tree.chain(5), script_of(plain), 0.3)
    elif name == "tree":
        drafter = scripted(random_tree(9, 1), script_of(plain), 0.3)
    elif name == "draft_model":
        rng = np.random.default_rng(0)
        draft = jax.tree.map(lambda a: a * (1 + 0.01 * rng.standard_normal(a.shape, np.float32)), PARAMS.target)
        drafter = model_drafter(SPEC, SPEC, config)
    else:
        drafter, draft = get_drafter(config, LoadedModel(SPEC, PARAMS.target, None, "tiny"))  # pyright: ignore
    return make_program(drafter, kv=form, pages=160), Models(PARAMS.target, draft)


def free_pages(program: Program, jobs, pages: list[list[int]]) -> np.ndarray:
    """Pages that hold nothing of any prompt."""
    used = [page for row, job in jobs.items() for page in pages[row][: -(-len(job.prompt) // PAGE)]]
    return ~np.isin(np.arange(program.pool.num_pages), used)


SCRIPTED = ["chain", "tree"]
DRAFTERS = [name for name in drafter_names() if name != "none"]
PAIRS = [
    *((form, name) for form in ("int8", "int4") for name in SCRIPTED),
    *(("int4", name) for name in DRAFTERS),
    *(pytest.param("int8", name, marks=pytest.mark.slow) for name in DRAFTERS),
    *(pytest.param("fp8", name, marks=pytest.mark.slow) for name in [*SCRIPTED, *DRAFTERS]),
]


@pytest.mark.parametrize(("form", "name"), PAIRS, indirect=["form"])
def test_laws_1_3a_and_5(unoptimised, form: Format, plain, name: str) -> None:
    program, models = program_of(name, form, plain)
    together = decode_all(models, program, JOBS, chunk=CHUNK)
    for row, expected in plain.items():
        assert together[row].tokens == expected.tokens
        np.testing.assert_allclose(together[row].logprobs, expected.logprobs, atol=0.05)
    assert sum(r.drafted for r in together.values()) > 0
    if name in ("chain", "tree", "draft_model"):  # the others are right by chance only
        assert sum(r.accepted for r in together.values()) > 0
    some, pages = {1: JOBS[1], 2: JOBS[2]}, page_lists(program, 4, seed=9)

    def spoilt(state):
        free = free_pages(program, some, pages)
        return state._replace(pool=spoil(state.pool, free), draft_pool=spoil(state.draft_pool, free))

    apart, clean = (
        decode_all(models, program, some, pages=pages, chunk=CHUNK, edit=edit) for edit in (spoilt, lambda state: state)
    )
    for row, result in apart.items():
        assert result.tokens == clean[row].tokens == together[row].tokens
        assert result.logprobs.tobytes() == clean[row].logprobs.tobytes()
        np.testing.assert_allclose(result.logprobs, together[row].logprobs, atol=0.05)
        if len(program.drafter.widths) == 1:  # else a round is as wide as its widest row
            assert result.logprobs.tobytes() == together[row].logprobs.tobytes()


def test_the_format_is_in_use(full, plain) -> None:
    assert any(full[row].logprobs[0] != result.logprobs[0] for row, result in plain.items())


@pytest.mark.parametrize("name", SCRIPTED)
def test_law_6_rounds_copy_no_pool(form: Format, plain, name: str) -> None:
    program, _ = program_of(name, form, plain)
    compiled = compiled_run(program, 4)
    text = compiled.as_text()
    for array in program.pool.shapes().values():
        shape = re.escape(f"[{','.join(map(str, array.shape))}]")
        assert re.search(shape, text)
        assert not re.findall(rf"= \w+{shape}\S* (copy|convert)\(", text)
    assert compiled.memory_analysis().alias_size_in_bytes >= program.pool.page_bytes * program.pool.num_pages


def test_law_3a_a_row_that_moves_takes_its_tail(plain, form: Format) -> None:
    moved = {3 - row: job for row, job in JOBS.items()}
    got = decode_all(PARAMS, make_program(kv=form, pages=160), moved, chunk=CHUNK)
    for row, expected in plain.items():
        assert got[3 - row].logprobs.tobytes() == expected.logprobs.tobytes()


def test_law_3b_another_page_size(unoptimised, form: Format, plain) -> None:
    got = decode_all(PARAMS, make_program(kv=form, page=16, pages=36), JOBS, chunk=CHUNK)
    for row, expected in plain.items():
        assert got[row].tokens == expected.tokens
        np.testing.assert_allclose(got[row].logprobs, expected.logprobs, atol=0.05)


def test_law_3b_one_step_from_the_same_pages(form: Format) -> None:
    """A row of one token and the first of a longer row see the same, but for rounding before it is stored."""
    program = make_program(kv=form, pages=40)
    prompt = np.arange(3, 3 + 2 * PAGE + 1, dtype=np.int32)[None]
    table = jnp.arange(12, dtype=jnp.int32).reshape(1, 1, 12)
    sequences = Sequences(table, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))

    @partial(jax.jit, static_argnames="width")
    def run(pool, tokens, start, count, width):
        rows = Rows(jnp.zeros(1, jnp.int32), start, count)
        positions = start[:, None] + jnp.arange(width)
        hidden, pool = forward(PARAMS.target, SPEC, program.pool, rows, tokens, positions, None, pool, sequences)
        return logits_of(PARAMS.target, SPEC, hidden)[0, 0, :VOCAB], pool

    pool = program.pool.allocate(1)
    for start in range(0, 2 * PAGE, PAGE):
        _, pool = run(pool, prompt[:, start : start + PAGE], jnp.array([start]), jnp.array([PAGE]), PAGE)
    at = jnp.array([2 * PAGE])
    alone, _ = run(pool, prompt[:, -1:], at, jnp.array([1]), 1)
    for width in (2, 3, 4):
        tokens = np.pad(prompt[:, -1:], ((0, 0), (0, width - 1)), constant_values=9)
        first, _ = run(pool, tokens, at, jnp.array([width]), width)
        np.testing.assert_allclose(first, alone, rtol=0, atol=1e-3)
