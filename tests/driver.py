"""A tiny random model and a driver of the decode loop without engine or text, for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode
from jaxspec.config import SamplingParams
from jaxspec.drafters.none import NONE
from jaxspec.kv.format import Format
from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.heads import HeadsSpec, init_heads
from jaxspec.models.saving.heads import save_heads
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import init_params
from jaxspec.program import Program
from jaxspec.sampling import sampling_row
from jaxspec.types import Drafter, Models, Params
from pallas_kernels import Rows

VOCAB, PAGE, TABLE = 61, 4, 12
FLOAT32 = get_format("float32")
SPEC = ModelSpec(
    vocab_size=64,
    valid_vocab=VOCAB,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    norm_eps=1e-5,
    inv_freq=tuple(10000.0 ** (-i / 4) for i in range(4)),
    max_context=PAGE * TABLE,
    tied_embeddings=False,
)


class Job(NamedTuple):
    """A prompt and how to sample from it."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0
    eos_ids: tuple[int, ...] = ()


class Result(NamedTuple):
    tokens: list[int]
    logprobs: np.ndarray
    finish: int
    steps: int
    drafted: int
    accepted: int


def random_params(seed: int = 0):
    """Parameters whose output varies with the context (freshly initialised models repeat themselves)."""
    params = init_params(SPEC, jax.random.key(seed))
    return Models(jax.tree.map(lambda a: a * 3 if a.ndim > 1 else a, params), {})


def stack_layers(params: Params) -> Params:
    """The same parameters with all layers in one tree of arrays `[layers, ..]`, as accelerators scan them."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def write_heads(
    folder: Path,
    spec: ModelSpec,
    *,
    conditioned: int = 0,
    own_output: bool = False,
    tokens: Sequence[int] | None = None,
    heads: int = 3,
) -> Path:
    """A folder of random heads; with `tokens` they guess these only, and of few tokens some are right."""
    token_map = None if tokens is None else np.sort(np.int32(tokens))
    vocab = spec.vocab_size if token_map is None else len(token_map)
    shape = HeadsSpec(heads, spec.embed_dim, vocab, 1, own_output, conditioned)
    params = init_heads(shape, jax.random.key(3), jnp.zeros((shape.vocab, shape.embed_dim)))
    rng = np.random.default_rng(4)
    # New heads all say what the model says.
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 1.0, a.shape), jnp.float32), params)
    if token_map is not None:
        params["token_map"] = jnp.asarray(token_map)
    save_heads(shape, params, folder, "vllm", {})
    return folder


def make_program(
    drafter: Drafter = NONE, *, kv: Format = FLOAT32, pages: int = 128, page: int = PAGE, max_rounds: int = 8
) -> Program:
    pool = PoolSpec(kv, SPEC.num_layers, pages, page, SPEC.num_kv_heads, SPEC.head_dim, drafter.tree.size)
    return Program(SPEC, pool, drafter, max_rounds)


def page_lists(program: Program, count: int, seed: int = 0) -> list[list[int]]:
    """Disjoint random physical pages for `count` rows, each as many as the page table is wide."""
    width = table_width(program)
    order = np.random.default_rng(seed).permutation(program.pool.num_pages)
    return [order[i * width : (i + 1) * width].tolist() for i in range(count)]


def table_width(program: Program) -> int:
    return -(-(SPEC.max_context + program.drafter.tree.size) // program.pool.page_size)


def decode_all(
    params,
    program: Program,
    jobs: dict[int, Job],
    *,
    batch: int = 4,
    pages: list[list[int]] | None = None,
    chunk: int = 8,
    edit=lambda state: state,
    rounds: int = 3,
) -> dict[int, Result]:
    """Run each job in its row until all have ended; `edit` may change the state once the prompts are in."""
    pages = pages or page_lists(program, batch)
    state = decode.init_state(program, batch, table_width(program))
    state = decode.set_pages(state, np.int32(pages), np.zeros(batch, np.int32))
    for row, job in jobs.items():
        state = _admit(params, program, state, row, job, chunk)
    state = edit(decode.set_active(state, np.isin(np.arange(batch), list(jobs))))
    tokens = {row: [] for row in jobs}
    logprobs = {row: [] for row in jobs}
    while bool(jnp.any(state.progress.active)):
        state, out = decode.run(params, state, np.int32(rounds), np.int32(1), program=program)
        for row in jobs:
            count = int(out.count[row])
            tokens[row] += np.asarray(out.tokens[row, :count]).tolist()
            logprobs[row] += np.asarray(out.logprob[row, :count]).tolist()
    progress = jax.tree.map(np.asarray, state.progress)
    return {
        row: Result(
            tokens[row],
            np.float32(logprobs[row]),
            int(progress.finish[row]),
            *(int(a[row]) for a in (progress.steps, progress.drafted, progress.accepted)),
        )
        for row in jobs
    }


def _admit(params, program: Program, state, row: int, job: Job, chunk: int):
    prompt = np.zeros(SPEC.max_context, np.int32)
    prompt[: len(job.prompt)] = job.prompt
    sampling = sampling_row(job.params, seed=job.seed, max_tokens=job.params.max_tokens, eos_ids=job.eos_ids)
    state = decode.admit(state, np.int32(row), prompt, np.int32(len(job.prompt)), sampling, program=program)
    for start in range(0, len(job.prompt) - 1, chunk):
        part = np.int32(job.prompt[start : min(start + chunk, len(job.prompt) - 1)])
        rows = Rows(np.int32([row]), np.int32([start]), np.int32([len(part)]))
        tokens = np.pad(part, (0, chunk - len(part)))
        state = decode.prefill(params, state, rows, tokens, program=program, width=chunk)
    return state
