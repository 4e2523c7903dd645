"""The TPU kernel in interpret mode against the XLA implementation, with race detection; and against its own mutants,
which the same checks must tell from it."""

from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from inspect import getsource
from itertools import product
from types import ModuleType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from jaxspec.tree import Tree
from pallas_kernels import Rows, Variant
from pallas_kernels.tpu import Blocks, unsupported
from pallas_kernels.xla.paged_attention import paged_attention as xla_paged_attention

KERNEL = import_module("pallas_kernels.tpu.paged_attention")
FETCH = import_module("pallas_kernels.tpu._attention_fetch")

SLOTS, BLOCK, PART = 384, 256, 128
"""Slots a sequence may have, those fetched together and those computed together."""
SEQUENCES = 5
FAST = {"xla_backend_optimization_level": 0}
"""To compile, not to run."""
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}
LARGEST = {"int8": 127, "fp8": 448}
PLAIN = Variant()
TREE = Tree((0, 0, 1, 1, 2, 5, 5))
WIDE_TREE = Tree(tuple(i // 3 for i in range(44)))


@dataclass(frozen=True)
class Kind:
    """What is asked: one shape of rows and one variant."""

    width: int = 1
    tree: Tree | None = None
    variant: Variant = PLAIN
    shifted: bool = False
    """With second queries for the sinks."""
    tile: int = 64
    heads: int = 1
    group: int = 3
    dim: int = 16
    page: int = 64


KINDS = {
    "decode": Kind(),
    "chain": Kind(width=5, group=8, dim=80),
    "tree": Kind(width=TREE.width, tree=TREE),
    "causal": Kind(width=11, tile=8),
    "window": Kind(width=11, tile=8, variant=Variant(window=70, soft_cap=2.0)),
    "sinks": Kind(width=TREE.width, tree=TREE, shifted=True, variant=Variant(window=40, sinks=4)),
    "turned": Kind(width=3, heads=2, page=128, variant=Variant(mass=True)),
    "wide tree": Kind(width=WIDE_TREE.width, tree=WIDE_TREE, variant=Variant(window=60, mass=True), group=2, dim=256),
    "mass, sinks": Kind(width=11, tile=8, shifted=True, variant=Variant(window=50, sinks=66, mass=True, soft_cap=3.0)),
    "sinks, no window": Kind(width=5, shifted=True, variant=Variant(sinks=5)),
}


def rows_for(width: int, page: int) -> list[tuple[int, int, int]]:
    """Sequence, start and count: the first is short; then an empty one, a page crossed by a row, a full page, a full
    block and the next row of its sequence, a padded row of a long one."""
    return [
        (0, 0, 1),
        (1, BLOCK + 70, 0),
        (1, page - (width + 1) // 2, width),
        (2, 2 * page - width, width),
        (3, BLOCK - width, width),
        (3, BLOCK, width),
        (4, SLOTS - width, max(1, width - 1)),
    ]


class Case:
    """Random queries, keys and values; every slot that no row has is poison, and so are all free pages.

    A poison value is finite: 0 times NaN is NaN in right code too. Scales of poison are like it.
    """

    def __init__(self, kind: Kind, dtype: str, queries: str = "float32", seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.dtype = kind, dtype
        self.rows = rows_for(kind.width, kind.page)
        pages = SLOTS // kind.page
        self.table = rng.permutation(SEQUENCES * pages + 5)[: SEQUENCES * pages].reshape(SEQUENCES, -1)
        used = np.zeros((SEQUENCES * pages + 5, kind.page), bool)
        for seq, start, count in self.rows:
            slots = np.arange(start + count if count else 0)
            used[self.table[seq, slots // kind.page], slots % kind.page] = True
        self.arrays = self._stored(rng, ~used[:, None])
        q_shape = (2, len(self.rows), kind.width, kind.heads, kind.group, kind.dim)
        self.q, self.second = jnp.asarray(rng.normal(size=q_shape), jnp.dtype(queries))

    def _stored(self, rng: np.random.Generator, free: np.ndarray) -> dict[str, np.ndarray]:
        numbers = rng.normal(size=(len(free), self.kind.heads, 2, self.kind.page, self.kind.dim)).astype(np.float32)
        free = np.broadcast_to(free, (len(free), *numbers.shape[1:2], *free.shape[2:]))
        largest = LARGEST.get(self.dtype)
        if largest is None:
            spoiled, arrays = "kv", {"kv": numbers.astype(DTYPES[self.dtype])}
        else:
            scale = (np.abs(numbers).max(-1) / largest).astype(ml_dtypes.bfloat16)
            codes = np.clip(numbers / scale[..., None].astype(np.float32), -largest, largest)
            codes = np.round(codes) if self.dtype == "int8" else codes
            spoiled, arrays = "scale", {"kv": codes.astype(DTYPES[self.dtype]), "scale": scale}
        arrays[spoiled][:, :, 0][free] = np.nan
        arrays[spoiled][:, :, 1][free] = 1e30
        return arrays

    @property
    def asked(self) -> tuple:
        ancestors = None
        if self.kind.tree is not None:
            words = self.kind.tree.ancestor_words
            ancestors = jnp.broadcast_to(words, (len(self.rows), *words.shape))
        return Rows(*jnp.array(self.rows, jnp.int32).T), jnp.asarray(self.table, jnp.int32), ancestors

    def run(
        self, interpret: pltpu.InterpretParams, *, int8_keys: bool = False, part: int = PART, buffers: int = 2
    ) -> list:
        """The kernel's result, and mass."""
        kind = self.kind
        call = partial(
            KERNEL.paged_attention,
            scale=kind.dim**-0.5,
            variant=kind.variant,
            blocks=Blocks(BLOCK // kind.page, part, min(kind.tile, kind.width), buffers, int8_keys),
            interpret=interpret,
        )
        arrays = {name: jnp.asarray(array) for name, array in self.arrays.items()}
        second = self.second if kind.shifted else None
        rows, table, ancestors = self.asked
        found = jax.jit(call, compiler_options=FAST)(
            self.q, arrays["kv"], arrays.get("scale"), rows, table, ancestors, second
        )
        return list(found) if kind.variant.mass else [found]

    @cached_property
    def expected(self) -> list:
        """The XLA implementation's result, in float32 throughout."""
        kind = self.kind

        def read(arrays, pages, which):
            found = arrays["kv"][pages, :, which].astype(jnp.float32)
            return (
                found * arrays["scale"][pages, :, which].astype(jnp.float32)[..., None] if "scale" in arrays else found
            )

        call = partial(xla_paged_attention, read=read, page=kind.page, scale=kind.dim**-0.5, variant=kind.variant)
        rows, table, ancestors = self.asked
        found = jax.jit(call, compiler_options=FAST)(
            self.q.astype(jnp.float32),
            {name: jnp.asarray(array) for name, array in self.arrays.items()},
            rows=rows,
            page_table=table,
            ancestors=ancestors,
            sink_queries=self.second.astype(jnp.float32) if kind.shifted else None,
        )
        return list(found) if kind.variant.mass else [found]

    def check(self, found: list, tolerance: float) -> None:
        """Real tokens have the expected result, padding has a finite one."""
        expected = self.expected
        for row, (_, _, count) in enumerate(self.rows):
            np.testing.assert_allclose(
                np.asarray(found[0][row, :count], np.float32),
                np.asarray(expected[0][row, :count]),
                atol=tolerance,
                rtol=tolerance,
                err_msg=f"row {row}",
            )
            assert np.isfinite(np.asarray(found[0][row], np.float32)).all()
            if self.kind.variant.mass and count:
                np.testing.assert_allclose(found[1][row], expected[1][row], atol=tolerance, err_msg=f"mass of {row}")


def mode(execution: str) -> pltpu.InterpretParams:
    """A missing wait is a race only in "eager" mode, and a wrong result only in "on_wait".

    Copies are told apart by an entry of the vector clock drawn for each; with the default size they all have the same.
    """
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode=execution, vector_clock_size=256)


def raced(error: Exception | None = None) -> bool:
    """Whether the last run had a race: jax 0.12 stops there with an error."""
    races = interpret_pallas_call.races
    return "RACE DETECTED" in str(error) or (races is not None and races.races_found)


EXACT = 2e-5
"""Queries in float32: numbers are widened to it, and only the order of sums differs."""
ROUNDED = 1.5e-2
"""Queries in bfloat16: so are the weights of values, at 2^-9 each, the queries once scaled, and the results."""

SUBSET = [
    ("f32", "decode", "on_wait"),
    ("int8", "chain", "eager"),
    ("fp8", "window", "on_wait"),
    ("int8", "turned", "on_wait"),
]
ALL = [
    pytest.param(*case, marks=[] if case in SUBSET else pytest.mark.slow)
    for case in product(DTYPES, KINDS, ["eager", "on_wait"])
]


@cache
def case_of(kind: str, dtype: str, queries: str = "float32") -> Case:
    return Case(KINDS[kind], dtype, queries)


@pytest.mark.parametrize(("dtype", "kind", "execution"), ALL)
def test_it_is_the_xla_implementation(dtype: str, kind: str, execution: str) -> None:
    case = case_of(kind, dtype)
    case.check(case.run(mode(execution)), EXACT)
    assert not raced()


@pytest.mark.parametrize(
    ("dtype", "kind", "int8_keys"),
    [
        ("bf16", "causal", False),
        ("int8", "sinks", True),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in [
                ("bf16", "tree", False),
                ("int8", "turned", True),
                ("int8", "tree", False),
                ("fp8", "tree", False),
            ]
        ),
    ],
)
def test_in_the_arithmetic_of_a_tpu(dtype: str, kind: str, int8_keys: bool) -> None:
    """bfloat16 products, or int8 ones of queries in two parts."""
    case = case_of(kind, dtype, queries="bfloat16")
    case.check(case.run(mode("eager"), int8_keys=int8_keys, buffers=3), ROUNDED)
    assert not raced()


@pytest.mark.slow
def test_int8_products_lose_nothing_to_speak_of() -> None:
    """Queries hold 16 bits of their largest number's, so the logits are those of float32 but for 2^-16."""
    case = case_of("tree", "int8")
    case.check(case.run(mode("eager"), int8_keys=True, part=BLOCK), 2e-4)


def test_a_bad_row_spoils_no_other() -> None:
    """Law 5: rows share buffers, and a short one finds in them what a longer one has left."""
    case = Case(KINDS["decode"], "f32")
    case.rows = [(4, SLOTS - 1, 1), *case.rows[1:]]
    case.arrays["kv"][case.table[4]] = np.nan
    found = case.run(mode("on_wait"))
    assert np.isnan(np.asarray(found[0][0])).all()
    case.rows = [(0, 0, 0), *case.rows[1:-1], (0, 0, 0)]
    case.check([found[0].at[jnp.array([0, -1])].set(0)], EXACT)


def mutant(of: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """The module with pieces of its source replaced wherever they occur."""
    source = getsource(of)
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    module = ModuleType(f"{of.__name__}_mutant")
    exec(compile(source, module.__name__, "exec"), module.__dict__)  # noqa: S102 - our own source
    return module


MUTANTS = {
    "no wait": ([(".wait()", "")], {"eager": "race", "on_wait": "wrong"}),
    "one buffer": ([("buffer.at[slot, j]", "buffer.at[0, j]")], {"eager": "race"}),
    "wrong page": ([("plan.table_width + logical", "plan.table_width + (logical ^ 1)")], {"on_wait": "wrong"}),
}
"""What is replaced, by what, and what each mode must show."""


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_told_from_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, signs = MUTANTS[name]
    changed = mutant(FETCH, *changes)
    for function in ("start", "fetch_next", "wait", "wait_whole"):
        monkeypatch.setattr(KERNEL, function, getattr(changed, function))
    case = case_of("decode", "f32")
    for execution, sign in signs.items():
        try:
            found, error = case.run(mode(execution)), None
        except jax.errors.JaxRuntimeError as stopped:
            found, error = [], stopped
        if sign == "race":
            assert raced(error)
        else:
            with pytest.raises(AssertionError, match="row"):
                case.check(found, ROUNDED)


def test_what_it_cannot_do_is_told() -> None:
    rows, table, _ = case_of("decode", "f32").asked
    q = jnp.zeros((rows.start.shape[0], 1, 1, 3, 16))
    for kv, why in (
        (jnp.zeros((5, 1, 2, 12, 16)), "multiple of 8"),
        (jnp.zeros((5, 1, 2, 32, 16), jnp.uint16), "uint16"),
    ):
        assert why in (unsupported(q, {"kv": kv}) or "")
        with pytest.raises(NotImplementedError, match=why):
            KERNEL.paged_attention(
                q, kv, None, rows, table, None, scale=1.0, variant=Variant(), blocks=Blocks(8, 128, 1)
            )
