"""What every storage format must do; each file in `jaxspec/kv/formats` is found by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.kv import formats
from jaxspec.kv.bits import numbers
from jaxspec.kv.format import Format
from jaxspec.kv.formats import format_names, get_format

PAGES, PAGE, HEADS, DIM = 6, 128, 2, 32
LOSS = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 0.5 / 127 * 1.01, "fp8": 2.0**-5 * 1.15, "int4": 0.15}
"""Largest error of a stored number, relative to the largest of its head's vector."""
DROPPED = np.iinfo(np.int32).max

Arrays = dict[str, jax.Array]


@pytest.fixture(params=format_names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def unit(form: Format) -> int:
    """Slots of one write."""
    return form.group or 1


def random_kv(form: Format, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[count, unit, heads, dim]` for so many writes."""
    k, v = np.random.default_rng(seed).normal(size=(2, count, unit(form), HEADS, DIM)).astype(np.float32)
    return k, v


def write(form: Format, arrays: Arrays, pages, offsets, k: np.ndarray, v: np.ndarray) -> Arrays:
    """Write units at places of any shape."""
    shape = (*np.shape(pages), *k.shape[1 if form.group else 2 :])
    return jax.jit(form.write)(
        arrays, jnp.asarray(pages), jnp.asarray(offsets), jnp.asarray(k.reshape(shape)), jnp.asarray(v.reshape(shape))
    )


def filled(form: Format, seed: int = 0) -> tuple[Arrays, np.ndarray]:
    """Arrays with every slot written in one call, and what was written `[pages, heads, 2, page, dim]`."""
    empty = {name: jnp.zeros(a.shape, a.dtype) for name, a in form.arrays(PAGES, PAGE, HEADS, DIM).items()}
    size = unit(form)
    pages, offsets = np.divmod(np.random.default_rng(seed).permutation(PAGES * PAGE // size) * size, PAGE)
    k, v = random_kv(form, len(pages), seed)
    written = np.zeros((PAGES, HEADS, 2, PAGE, DIM), np.float32)
    for step in range(size):
        written[pages, :, 0, offsets + step], written[pages, :, 1, offsets + step] = k[:, step], v[:, step]
    return write(form, empty, pages, offsets, k, v), written


def read(form: Format, arrays: Arrays, pages=tuple(range(PAGES))) -> np.ndarray:
    """Everything stored, as `filled` lays it out."""
    halves = [jax.jit(partial(form.read, which=which))(arrays, jnp.asarray(pages)) for which in (0, 1)]
    assert halves[0].shape == (len(pages), HEADS, PAGE, DIM)
    return np.stack([np.asarray(half, np.float32) for half in halves], axis=2)


def same(first: Arrays, second: Arrays) -> bool:
    return all(np.array_equal(np.asarray(first[n], np.float32), np.asarray(second[n], np.float32)) for n in first)


def test_pages_come_first_and_all_arrays_scale_with_them(name: str) -> None:
    arrays, twice = (get_format(name).arrays(pages, PAGE, HEADS, DIM) for pages in (PAGES, 2 * PAGES))
    assert arrays
    assert arrays.keys() == twice.keys()
    for array, double in zip(arrays.values(), twice.values(), strict=True):
        assert (array.shape[0], double.shape[0]) == (PAGES, 2 * PAGES)
        assert array.shape[1:] == double.shape[1:]


def test_what_was_written_is_read_back(name: str) -> None:
    """Keys as keys and values as values, head by head, within what the format loses."""
    form = get_format(name)
    arrays, written = filled(form)
    scale = np.abs(written).max(-1, keepdims=True)
    error = np.max(np.abs(read(form, arrays) - written) / scale)
    assert 0.5 * LOSS[name] <= error <= LOSS[name]
    np.testing.assert_array_equal(read(form, arrays, (4, 4, 1)), read(form, arrays)[[4, 4, 1]])


def test_writing_keeps_the_arrays_shapes_and_dtypes(name: str) -> None:
    form = get_format(name)
    arrays, _ = filled(form)
    wanted = form.arrays(PAGES, PAGE, HEADS, DIM)
    assert {n: (a.shape, a.dtype) for n, a in arrays.items()} == {n: (a.shape, a.dtype) for n, a in wanted.items()}


def test_a_write_leaves_other_pages_alone_and_drops_what_is_out_of_range(name: str) -> None:
    form = get_format(name)
    arrays, _ = filled(form)
    before = read(form, arrays)
    k, v = random_kv(form, 4, seed=1)
    last = PAGE - unit(form)
    after = read(form, write(form, arrays, [[2, DROPPED], [PAGES, 5]], [[0, 0], [0, last]], k, v))
    for page in (0, 1, 3, 4):
        np.testing.assert_array_equal(after[page], before[page])
    for page, offset, index in ((2, 0, 0), (5, last, 3)):
        slots = slice(offset, offset + unit(form))
        for half, values in enumerate((k[index], v[index])):
            error = np.abs(after[page, :, half, slots].swapaxes(0, 1) - values).max()
            assert error <= LOSS[name] * np.abs(values).max()
            before[page, :, half, slots] = after[page, :, half, slots]
    np.testing.assert_array_equal(after, before)


def test_a_write_of_padding_changes_no_bit(name: str) -> None:
    form = get_format(name)
    arrays, _ = filled(form)
    k, v = random_kv(form, 3, seed=1)
    assert same(arrays, write(form, arrays, [DROPPED] * 3, [0, 0, 64], k, v))


def test_a_move_copies_what_is_stored(name: str) -> None:
    """To the bit, reading all sources before writing any target; out of range is dropped."""
    form = get_format(name)
    if form.move is None:
        assert form.group  # such slots move in their tail
        return
    arrays, _ = filled(form)
    before = read(form, arrays)
    source = jnp.array([0, 0, 3, 1]), jnp.array([1, 2, 31, 9])
    target = jnp.array([0, 0, 5, DROPPED]), jnp.array([0, 1, 4, 0])
    after = read(form, jax.jit(form.move)(arrays, source, target))
    expected = before.copy()
    for to_page, to, page, offset in ((0, 0, 0, 1), (0, 1, 0, 2), (5, 4, 3, 31)):
        expected[to_page, :, :, to] = before[page, :, :, offset]
    np.testing.assert_array_equal(after, expected)


def test_files_are_formats() -> None:
    assert set(format_names()) == LOSS.keys()
    assert not any(name.startswith("_") for name in format_names())
    assert get_format("auto") is get_format("float32" if jax.default_backend() == "cpu" else "bfloat16")


def test_an_unknown_format_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no kv_dtype named 'int3' \(there are: auto, bfloat16, .*float32"):
        formats.get_format("int3")
    with pytest.raises(ConfigError, match="no kv_dtype"):
        get_format("_slots")


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("fp8", 448)])
def test_scaled_numbers_are_multiples_of_the_stored_scale(name: str, largest: int) -> None:
    """Against float64: no number is further from what is read than from the nearest code times the stored scale."""
    form = get_format(name)
    arrays, written = filled(form)
    scale = np.asarray(numbers(arrays["scale"], jnp.bfloat16), np.float64)[..., None]
    peak = np.abs(written).max(-1, keepdims=True)
    assert np.all(np.abs(scale * largest / peak - 1) <= 2.0**-8)
    if name == "int8":
        nearest = np.clip(np.round(written / scale), -largest, largest) * scale
        np.testing.assert_allclose(read(form, arrays), nearest, rtol=0, atol=1e-6 * peak.max())
    else:
        codes = np.asarray(numbers(arrays["kv"], jnp.float8_e4m3fn), np.float64)
        assert np.all(np.abs(codes * scale - written) <= np.maximum(np.abs(written) / 16, scale * 2.0**-10) * 1.01)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_odd_vectors_keep_what_can_be_kept(name: str) -> None:
    """Zeros stay zeros, a single large number stays, tiny and huge ones do, and what is not finite does not hide."""
    form = get_format(name)
    arrays = {n: jnp.zeros(a.shape, a.dtype) for n, a in form.arrays(PAGES, PAGE, HEADS, DIM).items()}
    k, v = np.zeros((2, 4, unit(form), HEADS, DIM), np.float32)
    k[1, ..., 3], v[1, ..., 3] = 1e4, -1e4
    k[2], v[2] = 1e-12, 3e-12
    v[3, 0, 0, 5] = k[3, 0, 0, 5] = np.inf
    found = read(form, write(form, arrays, [0, 1, 2, 3], [0] * 4, k, v))
    slots = slice(0, unit(form))
    assert not found[0].any()
    for half, values in enumerate((k, v)):
        for page in (1, 2):
            near = 0.01 * np.abs(values[page]).max()
            np.testing.assert_allclose(found[page, :, half, slots].swapaxes(0, 1), values[page], rtol=0, atol=near)
        assert not np.isfinite(found[3, 0, half, 0]).all()
    assert np.isfinite(found[3, 1]).all()


def test_int4_says_which_pages_and_heads_it_takes() -> None:
    for page, dim, message in ((96, 32, "multiple of 64 slots, not of 96"), (64, 33, "even dimension, not of 33")):
        with pytest.raises(ConfigError, match=f"int4 needs .*{message}"):
            get_format("int4").arrays(1, page, HEADS, dim)


@pytest.mark.parametrize(("name", "times"), [("int8", 1.85), ("fp8", 1.85), ("int4", 3.3)])
def test_pages_are_so_many_times_smaller_than_bfloat16(name: str, times: float) -> None:
    """Scales included, for heads of 64."""
    size, plain = (
        sum(a.size * a.dtype.itemsize for a in get_format(n).arrays(1, 64, 3, 64).values()) for n in (name, "bfloat16")
    )
    assert plain / size >= times
