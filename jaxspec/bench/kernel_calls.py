"""Calls of kernels to be compiled: jaxspec's own, and the published ones that come with JAX, at the same shapes.

All read SEQUENCES texts of at least CONTEXT tokens, in pages of PAGE slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import PREFILL_ROW
from jaxspec.plan.chips import chip_of_topology
from pallas_kernels import tpu
from pallas_kernels.layout import PLAIN, WORD, Rows

SEQUENCES, CONTEXT, PAGE = 8, 8192, 128
PUBLISHED_BLOCK = 1024
"""Tokens that the published kernels are told to fetch at once."""
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
"""By format of keys and values."""


class Heads(NamedTuple):
    """What attention knows of a model: key/value heads on a device, queries of each, size of a head."""

    heads: int
    group: int
    dim: int


SHAPES = {
    "llama-70b-tp8": Heads(1, 8, 128),  # Llama 2, 3 and 3.3, on each of 8 devices
    "llama-8b": Heads(8, 4, 128),
    "smollm2": Heads(3, 3, 64),  # SmolLM2-135M
    "gemma": Heads(1, 4, 256),  # Gemma 3 270M
}


@dataclass(frozen=True)
class Case:
    """What is compiled: a kernel's name in KERNELS, for a model's shape, a format of keys and values, and rows of so
    many query tokens: 1 is decoding, `prefill` a piece of a prompt, and others are draft trees."""

    kernel: str
    shape: str
    dtype: str
    queries: str
    topology: str

    @property
    def width(self) -> int:
        """Query tokens of a row."""
        return PREFILL_ROW if self.queries == "prefill" else int(self.queries)

    @property
    def token_bytes(self) -> int:
        """What a token's keys and values have in a layer, their scales not counted."""
        return 2 * self.sizes.heads * self.sizes.dim * self.stored.itemsize

    @property
    def sizes(self) -> Heads:
        return SHAPES[self.shape]

    @property
    def stored(self) -> jnp.dtype:
        return jnp.dtype(DTYPES[self.dtype])


class Call(NamedTuple):
    """A function to compile, with abstract arguments."""

    fn: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    block: int = 0
    """Attention: tokens of keys and values that one trip of its loop over them takes."""
    passes: int = 1
    """Times that a row's keys and values are gone through: tiles of queries, or heads if each has its own pass."""


def make_call(case: Case) -> Call:
    """The call of a case. NotImplementedError for what is known to be refused; the rest shows in compiling."""
    return KERNELS[case.kernel](case)


def _attention(case: Case) -> Call:
    heads, group, dim = case.sizes
    q = _struct((SEQUENCES, case.width, heads, group, dim), _computed(case))
    blocks = tpu.blocks_for(chip_of_topology(case.topology), case.stored, PAGE, heads, group, dim, case.width)
    tree = case.queries != "prefill" and case.width > 1
    words = _ints(SEQUENCES, case.width, -(-case.width // WORD)) if tree else None

    def attend(q, arrays, rows, table, ancestors):
        kernel = partial(tpu.paged_attention, scale=dim**-0.5, variant=PLAIN, blocks=blocks)
        return kernel(q, arrays["kv"], arrays.get("scale"), rows, table, ancestors)

    tiles = -(-case.width // blocks.query_tokens)
    arguments = q, _pool(case), _rows(), _table(), words
    return Call(attend, arguments, block=blocks.fetch_pages * PAGE, passes=tiles)


def _append(case: Case) -> Call:
    new = _struct((SEQUENCES, case.width, case.sizes.heads, case.sizes.dim), _computed(case))
    return Call(partial(tpu.append, distinct=True), (_pool(case), _rows(), _table(), new, new), donate=(0,))


def _commit(case: Case) -> Call:
    commit = partial(tpu.commit, num_layers=1, num_pages=_num_pages(case))
    path = _ints(SEQUENCES, case.width)
    return Call(commit, (_pool(case), _table(), _ints(SEQUENCES), path, _ints(SEQUENCES)), donate=(0,))


def _paged_attention(case: Case) -> Call:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
    from jax.experimental.pallas.ops.tpu.paged_attention.quantization_utils import QuantizedTensor

    if case.width > 1:
        raise NotImplementedError("one query token a sequence")
    heads, group, dim = case.sizes
    count, quantised = _num_pages(case), case.stored.itemsize == 1
    if quantised:
        count //= 16  # it spreads every scale over a whole vector, in float32: those of a full pool do not fit
    pages: Any = _struct((heads, count, PAGE, dim), case.stored)
    scales: Any = _struct((heads, count, PAGE, 1), jnp.float32)
    pages = QuantizedTensor(pages, scales) if quantised else pages
    q = _struct((SEQUENCES, heads * group, dim), _computed(case))
    attend = partial(paged_attention, pages_per_compute_block=PUBLISHED_BLOCK // PAGE)
    return Call(attend, (q, pages, pages, _ints(SEQUENCES), _table()), block=PUBLISHED_BLOCK, passes=heads)


def _ragged_paged_attention(case: Case) -> Call:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    heads, group, dim = case.sizes
    scale = 1 / 16 if case.stored.itemsize == 1 else None  # one for all keys, one for all values
    attend = partial(
        ragged_paged_attention,
        sm_scale=dim**-0.5,
        k_scale=scale,
        v_scale=scale,
        num_kv_pages_per_block=PUBLISHED_BLOCK // PAGE,
        num_queries_per_block=case.width,
    )
    q = _struct((SEQUENCES * case.width, heads * group, dim), _computed(case))
    pages = _struct((_num_pages(case), PAGE, 2 * heads, dim), case.stored)
    arguments = q, pages, _ints(SEQUENCES), _table(), _ints(SEQUENCES + 1), _ints(1)
    return Call(attend, arguments, block=PUBLISHED_BLOCK)


KERNELS = {
    "attention": _attention,
    "append": _append,
    "commit": _commit,
    "paged_attention": _paged_attention,
    "ragged_paged_attention": _ragged_paged_attention,
}
"""attention, append and commit are jaxspec's; the others are in jax.experimental.pallas.ops.tpu."""


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return _struct(shape, jnp.int32)


def _rows() -> Rows:
    return Rows(_ints(SEQUENCES), _ints(SEQUENCES), _ints(SEQUENCES))  # pyright: ignore[reportArgumentType]


def _table() -> jax.ShapeDtypeStruct:
    return _ints(SEQUENCES, 2 * CONTEXT // PAGE)


def _num_pages(case: Case) -> int:
    """As many as half the memory holds: what is small XLA moves to VMEM before a kernel, and a pool is not."""
    return chip_of_topology(case.topology).hbm_bytes // 2 // (PAGE * case.token_bytes)


def _computed(case: Case) -> jnp.dtype:
    """What a model computes in beside keys and values of the case's format."""
    return jnp.dtype("float32" if case.dtype == "float32" else "bfloat16")


def _pool(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (_num_pages(case), case.sizes.heads, 2, PAGE)
    pool = {"kv": _struct((*shape, case.sizes.dim), case.stored)}
    return pool | {"scale": _struct(shape, jnp.bfloat16)} if case.stored.itemsize == 1 else pool
