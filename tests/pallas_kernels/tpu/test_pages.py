"""Pages written in place by the TPU kernels, in interpret mode with race detection, against XLA's scatter."""

import inspect
import itertools
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from jaxspec.kv.bits import keep, numbers
from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec, compact
from jaxspec.kv.pool import append as scatter
from jaxspec.plan.topology import compile_for
from jaxspec.types import Sequences
from pallas_kernels import Rows
from pallas_kernels.tpu import _append_tokens, _commit, pages

TYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
MODES = ["eager", "on_wait"]
"""When the interpreter copies: a missing wait is a race in the one, and gives wrong numbers in the other."""
SEQUENCES, TABLE_WIDTH = 4, 4


@dataclass
class Pool:
    """Random numbers and some NaN in pages of every layer, and the pages of some sequences, in no order."""

    kv_dtype: str
    heads: int = 2
    dim: int = 16
    page: int = 32
    layers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        form = get_format(self.kv_dtype)
        self.spec = PoolSpec(form, self.layers, SEQUENCES * TABLE_WIDTH + 1, self.page, self.heads, self.dim)
        self.table = jnp.asarray(rng.permutation(self.spec.num_pages)[:-1].reshape(SEQUENCES, TABLE_WIDTH))
        self.types = {"kv": TYPES[self.kv_dtype], "scale": jnp.bfloat16}
        self.arrays = {}
        for name, array in self.spec.shapes().items():
            values = rng.integers(-99, 99, array.shape).astype(np.float32)
            if self.types[name] != jnp.int8:
                values[rng.random(array.shape) < 0.1] = np.nan
            self.arrays[name] = jnp.asarray(values).astype(self.types[name])

    @property
    def kept(self) -> dict[str, jax.Array]:
        """The same as pools are kept on the CPU."""
        kept = self.spec.shapes()
        return {name: keep(array, array.dtype, kept[name].dtype) for name, array in self.arrays.items()}

    def same(self, found: dict[str, jax.Array], kept: dict[str, jax.Array]) -> bool:
        """Whether two results are equal to the bit, a NaN being one of many."""
        wanted = {name: numbers(array, self.types[name]) for name, array in kept.items()}
        return found.keys() == wanted.keys() and all(
            np.array_equal(
                *(np.asarray(a[name].astype(jnp.float32)) for a in (found, wanted)), equal_nan=name != "int8"
            )
            and found[name].dtype == self.types[name]
            for name in found
        )


def rows_of(rows: list[tuple[int, int, int]]) -> Rows:
    return Rows(*(jnp.array(part) for part in zip(*rows, strict=True)))


def interpreted(run, mode: str):
    """The result of a kernel, and whether there were races; newer versions of jax stop at the first."""
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    try:
        found = jax.block_until_ready(jax.jit(lambda: run(interpret))())
        assert interpret_pallas_call.races is not None
        return found, interpret_pallas_call.races.races_found
    except jax.errors.JaxRuntimeError as error:
        if "RACE DETECTED" not in str(error):
            raise
        return None, True
    finally:
        interpret_pallas_call.reset_tpu_interpret_mode_state()


def appended_well(
    pool: Pool, rows: list[tuple[int, int, int]], width: int, mode: str, distinct: bool = True, module=pages
) -> bool:
    """Whether the kernel writes just what XLA writes, without races."""
    rng = np.random.default_rng(pool.seed + 1)
    shape = (len(rows), width, pool.heads, pool.dim)
    k, v = (jnp.asarray(rng.normal(size=shape) * rng.uniform(0, 9, (*shape[:-1], 1)), jnp.bfloat16) for _ in range(2))
    k = k.at[0, 0, 0].set(0)  # its scale is the least
    wanted = jax.jit(lambda kept: scatter(pool.spec, kept, 0, rows_of(rows), pool.table, k, v))(pool.kept)

    def run(interpret):
        return module.append(pool.arrays, rows_of(rows), pool.table, k, v, distinct=distinct, interpret=interpret)

    found, races = interpreted(run, mode)
    return not races and pool.same(found, wanted)


def committed_well(
    pool: Pool, lengths: list[int], paths: list[list[int]], counts: list[int], mode: str, module=_commit
) -> bool:
    """Whether the kernel moves just what XLA moves, without races."""
    table, length, path, count = pool.table, *(jnp.asarray(a, jnp.int32) for a in (lengths, paths, counts))
    table = table[: len(lengths)]
    sequences = Sequences(table[None], length[None], length[None] * 0, length)
    wanted = jax.jit(lambda kept: compact(pool.spec, kept, sequences, path, count))(pool.kept)
    layers = {"num_layers": pool.spec.num_layers, "num_pages": pool.spec.num_pages}

    def run(interpret):
        return module.commit(pool.arrays, table, length, path, count, interpret=interpret, **layers)

    found, races = interpreted(run, mode)
    return not races and pool.same(found, wanted)


RAGGED = [(2, 27, 9), (0, 0, 1), (3, 50, 0), (1, 125, 9)]
"""Sequence, start and count: over the ends of windows and pages, one token, none, and past the page table."""
CHUNKS = [(1, 9, 9), (0, 3, 9), (1, 0, 9), (3, 7, 0), (0, 12, 2), (1, 18, 4), (2, 28, 9)]
"""Chunks of prompts in no order, neighbours in the same windows; the last runs into a page that is none."""
TREES = [30, 63, 0, 12], [[0, 2, 5, 8, 9], [0, 1, 4, 6, 9], [0, 1, 2, 3, 4], [0, 3, 9, 9, 9]], [5, 4, 5, 1]
"""Lengths, paths and counts: over the ends of windows and pages, and a chain and a root, neither of which moves."""
IN_ROWS, IN_LANES = 128, 16
"""Dimensions of heads: slots lie in rows, and in lanes."""


def cases(*fast: tuple[str, int, str]) -> list:
    """All formats, dimensions and modes; `slow` but for these."""
    every = itertools.product(TYPES, (IN_ROWS, IN_LANES), MODES)
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in every]


@pytest.mark.parametrize(
    ("kv_dtype", "dim", "mode"),
    cases(
        ("float32", IN_ROWS, "eager"),
        ("bfloat16", IN_ROWS, "on_wait"),
        ("int8", IN_ROWS, "eager"),
        ("fp8", IN_LANES, "on_wait"),
    ),
)
def test_tokens_are_written_as_xla_writes_them(kv_dtype: str, dim: int, mode: str) -> None:
    assert appended_well(Pool(kv_dtype, dim=dim), RAGGED, 9, mode)


@pytest.mark.parametrize(
    ("kv_dtype", "dim", "mode"), cases(("bfloat16", IN_ROWS, "on_wait"), ("int8", IN_LANES, "eager"))
)
def test_rows_of_one_sequence_may_share_windows(kv_dtype: str, dim: int, mode: str) -> None:
    pool = Pool(kv_dtype, 1, dim)
    pool.table = pool.table.at[2, 1].set(2**31 - 1)
    assert appended_well(pool, CHUNKS, 9, mode, distinct=False)


def test_rows_are_divided_among_grid_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "BLOCK_BYTES", 1)
    rows = [(0, 5, 8), (1, 30, 8), (2, 0, 3)]
    assert appended_well(Pool("bfloat16", 1, IN_ROWS), rows, 8, "on_wait")


@pytest.mark.parametrize(("kv_dtype", "dim", "mode"), cases(("int8", IN_ROWS, "eager")))
def test_paths_are_moved_as_xla_moves_them(kv_dtype: str, dim: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "eager":  # one layer after the other
        monkeypatch.setattr(_commit, "ITEM_BYTES", 1)
    assert committed_well(Pool(kv_dtype, 1, dim, layers=2), *TREES, mode)


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    source = inspect.getsource(module)
    assert old in source
    made = ModuleType("mutant")
    exec(compile(source.replace(old, new), "mutant", "exec"), made.__dict__)  # noqa: S102
    return made


READ_WAIT, WRITE_WAIT = "_wait(reads[name], ", "_wait(numbers[name], "


@pytest.mark.parametrize(
    ("kv_dtype", "mode", "old", "new"),
    [
        ("bfloat16", "eager", READ_WAIT, "_wait(0, "),
        pytest.param("bfloat16", "on_wait", READ_WAIT, "_wait(0, ", marks=pytest.mark.slow),
        ("bfloat16", "on_wait", WRITE_WAIT, "_wait(0, "),
        ("bfloat16", "eager", "count if distinct else 1", "count"),
        pytest.param("int8", "eager", "count if distinct else 1", "count", marks=pytest.mark.slow),
        ("bfloat16", "on_wait", "divided(slot, kind.page)]", "0]"),
    ],
)
def test_a_broken_append_is_caught(kv_dtype: str, mode: str, old: str, new: str) -> None:
    assert not appended_well(Pool(kv_dtype, 1, IN_ROWS), CHUNKS, 9, mode, False, mutant(pages, old, new))


@pytest.mark.parametrize(
    ("kv_dtype", "dim", "merge"),
    [
        ("bfloat16", IN_ROWS, "merge_in_rows"),
        pytest.param("bfloat16", IN_LANES, "merge_in_lanes", marks=pytest.mark.slow),
        pytest.param("int8", IN_ROWS, "merge_scales", marks=pytest.mark.slow),
    ],
)
def test_windows_that_lose_what_they_held_are_caught(
    kv_dtype: str, dim: int, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, merge, getattr(mutant(_append_tokens, "widen(buffer[", "0 * widen(buffer["), merge))
    assert not appended_well(Pool(kv_dtype, 1, dim), CHUNKS, 9, "on_wait", distinct=False)


@pytest.mark.parametrize(
    ("mode", "old", "new"),
    [
        ("eager", "read(index, _wait)", "pass"),
        ("on_wait", "write(index - 1, _wait)", "None"),
        pytest.param("eager", "index // item.parts, index % 2", "index // item.parts, 0", marks=pytest.mark.slow),
        pytest.param("on_wait", "slot // kind.page, m", "0, m", marks=pytest.mark.slow),
        pytest.param("on_wait", "base + i, 1), :] = ", "base, 1), :] = ", marks=pytest.mark.slow),
    ],
)
def test_a_broken_commit_is_caught(mode: str, old: str, new: str) -> None:
    module = mutant(_commit, old, new)
    assert not committed_well(Pool("bfloat16", 1, IN_ROWS, layers=2), *TREES, mode, module=module)


def arrays_of(kv_dtype: str, page: int, dim: int) -> dict[str, jax.ShapeDtypeStruct]:
    return get_format(kv_dtype).arrays(4, page, 1, dim)


def test_what_cannot_be_written_in_place_is_refused() -> None:
    for supported in [("float32", 8, 128), ("bfloat16", 16, 256), ("int8", 128, 128), ("bfloat16", 128, 64)]:
        assert pages.unsupported(arrays_of(*supported)) is None
    for kv_dtype, page, dim, size in [("bfloat16", 8, 128, 16), ("int8", 16, 128, 32), ("bfloat16", 64, 64, 128)]:
        reason = str(pages.unsupported(arrays_of(kv_dtype, page, dim)))
        assert f"by {size} slots; {page} is no multiple" in reason
    assert "(scale of bfloat16, heads of 128)" in str(pages.unsupported(arrays_of("int8", 64, 128)))
    assert pages.unsupported(arrays_of("int8", 64, 128), interpret=True) is None
    assert "not key_scale, value_scale" in str(pages.unsupported(arrays_of("int4", 64, 64)))
    arrays, one = {"kv": jnp.zeros((4, 1, 2, 16, 128), jnp.int8)}, jnp.zeros((1, 1), jnp.int32)
    k = jnp.zeros((1, 1, 1, 128))
    with pytest.raises(NotImplementedError, match="32 slots"):
        pages.append(arrays, rows_of([(0, 0, 1)]), one, k, k, distinct=True)
    with pytest.raises(NotImplementedError, match="32 slots"):
        pages.commit(arrays, one, one[0], one, one[0], num_layers=1, num_pages=4)


MODELS = {"Llama-70B, an eighth": (80, 1, 128), "Llama-8B": (32, 8, 128), "SmolLM2": (30, 3, 64), "Gemma": (26, 4, 256)}
"""Layers, heads and dimension of heads."""
CHIPS = ["v5e:2x4", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"]
COMPILED = {
    ("v5e:2x4", "int8", "Llama-70B, an eighth"),
    ("v6e:2x4", "bfloat16", "SmolLM2"),
    ("v5p:2x2x2", "float32", "Gemma"),
    ("tpu7x:2x2x1", "fp8", "Llama-8B"),
}


@pytest.mark.parametrize(
    ("topology", "kv_dtype", "model"),
    [
        pytest.param(*case, marks=() if case in COMPILED else pytest.mark.slow)
        for case in itertools.product(CHIPS, TYPES, MODELS)
        if case[1] != "fp8" or case[0].startswith("tpu7x")
    ],
)
def test_compiled_for_a_tpu_the_pool_is_not_copied(topology: str, kv_dtype: str, model: str) -> None:
    pytest.importorskip("libtpu")
    layers, heads, dim = MODELS[model]
    num_pages = 2**28 // (layers * heads * 128 * dim)  # of all layers: 2 GiB of float32
    page = 256 if kv_dtype in {"int8", "fp8"} else 128
    spec = PoolSpec(get_format(kv_dtype), layers, num_pages, page, heads, dim)
    arrays = spec.format.arrays(layers * num_pages, page, heads, dim)
    batch, width, table, path = 8, 8, jax.ShapeDtypeStruct((8, 32), jnp.int32), jax.ShapeDtypeStruct((8, 5), jnp.int32)
    whole = jax.ShapeDtypeStruct((batch,), jnp.int32)
    k = jax.ShapeDtypeStruct((batch, width, heads, dim), jnp.bfloat16)

    def step(arrays, rows, table, k, v, path):
        arrays = pages.append(arrays, rows, table, k, v, distinct=True)
        arrays = pages.append(arrays, rows, table, k, v, distinct=False)
        sizes = {"num_layers": layers, "num_pages": num_pages}
        return pages.commit(arrays, table, rows.start, path, rows.count, **sizes)

    program = compile_for(topology, step, arrays, Rows(whole, whole, whole), table, k, k, path, donate=[0]).program
    memory, size = program.memory_analysis(), sum(a.size * a.dtype.itemsize for a in arrays.values())
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 100
    copies = [line for line in program.as_text().splitlines() if " copy(" in line or " copy-start(" in line]
    assert not [line for line in copies if f"[{layers * num_pages}," in line or f"[{layers},{num_pages}," in line]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_dtype", TYPES)
def test_random_rows(kv_dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = int(rng.choice([1, 2, 7, 16, 64, 100, 256]))
    pool = Pool(kv_dtype, int(rng.integers(1, 4)), [64, 80, 96, 128, 256][seed % 5], [32, 64, 96][seed % 3], seed=seed)
    slots = TABLE_WIDTH * pool.page
    rows = [(s, int(rng.integers(0, slots)), int(rng.integers(0, width + 1))) for s in rng.permutation(SEQUENCES)]
    for mode in MODES:
        assert appended_well(pool, rows, width, mode)
        cut = [(s, start + t, min(13, n - t)) for s, start, n in rows for t in range(0, n, 13)] or [(0, 0, 0)]
        assert appended_well(pool, [cut[i] for i in rng.permutation(len(cut))], 13, mode, distinct=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_dtype", TYPES)
def test_random_paths(kv_dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, depth = int(rng.choice([6, 20, 64])), 6
    pool = Pool(
        kv_dtype, int(rng.integers(1, 4)), [64, 80, 96, 128, 256][seed % 5], [32, 64, 96][seed % 3], 3, seed=seed
    )
    paths = np.arange(depth) + rng.integers(0, width - depth + 1, (SEQUENCES, depth)) * rng.integers(
        0, 2, (SEQUENCES, depth)
    )
    paths[0] = np.arange(depth)
    lengths = rng.integers(0, TABLE_WIDTH * pool.page - width, SEQUENCES)
    for mode in MODES:
        assert committed_well(pool, lengths, paths, rng.integers(0, depth + 1, SEQUENCES), mode)
