"""What every storage format must do; each file in `jaxspec/kv/formats` is found by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.kv import formats
from jaxspec.kv.format import Format
from jaxspec.kv.formats import format_names, get_format

PAGES, PAGE, HEADS, DIM = 6, 32, 2, 32
LOSS = {"float32": 0.0, "bfloat16": 2.0**-8}
"""Largest error of a stored number, relative to the largest of its head's vector; unlisted formats may lose more."""
DROPPED = np.iinfo(np.int32).max

Arrays = dict[str, jax.Array]


@pytest.fixture(params=format_names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def random_kv(count: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, count, HEADS, DIM))
    return jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)


def filled(form: Format, seed: int = 0) -> tuple[Arrays, np.ndarray]:
    """Arrays with every slot written in one call, and what was written `[pages, heads, 2, page, dim]`."""
    empty = {name: jnp.zeros(a.shape, a.dtype) for name, a in form.arrays(PAGES, PAGE, HEADS, DIM).items()}
    pages, offsets = np.divmod(np.random.default_rng(seed).permutation(PAGES * PAGE), PAGE)
    k, v = random_kv(PAGES * PAGE, seed)
    written = np.zeros((PAGES, HEADS, 2, PAGE, DIM), np.float32)
    written[pages, :, 0, offsets], written[pages, :, 1, offsets] = k, v
    return jax.jit(form.write)(empty, jnp.asarray(pages), jnp.asarray(offsets), k, v), written


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
    assert np.max(np.abs(read(form, arrays) - written) / scale) <= LOSS.get(name, 0.15)
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
    k, v = random_kv(4, seed=1)
    pages, offsets = jnp.array([[2, DROPPED], [PAGES, 5]]), jnp.array([[7, 0], [0, 31]])
    shape = (2, 2, HEADS, DIM)
    after = read(form, form.write(arrays, pages, offsets, k.reshape(shape), v.reshape(shape)))
    for page in (0, 1, 3, 4):
        np.testing.assert_array_equal(after[page], before[page])
    for page, offset, index in ((2, 7, 0), (5, 31, 3)):
        for half, values in enumerate((k, v)):
            error = np.abs(after[page, :, half, offset] - np.asarray(values[index])).max()
            assert error <= LOSS.get(name, 0.15) * np.abs(values[index]).max()


def test_a_write_of_padding_changes_no_bit(name: str) -> None:
    form = get_format(name)
    arrays, _ = filled(form)
    k, v = random_kv(3, seed=1)
    after = form.write(arrays, jnp.full(3, DROPPED), jnp.array([0, 1, 2]), k, v)
    assert same(arrays, after)


def test_a_move_copies_what_is_stored(name: str) -> None:
    """To the bit, reading all sources before writing any target; out of range is dropped."""
    form = get_format(name)
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
    assert {"float32", "bfloat16"} <= set(format_names())
    assert not any(name.startswith("_") for name in format_names())
    assert get_format("auto") is get_format("float32" if jax.default_backend() == "cpu" else "bfloat16")


def test_an_unknown_format_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no kv_dtype named 'int3' \(there are: auto, bfloat16, .*float32"):
        formats.get_format("int3")
    with pytest.raises(ConfigError, match="no kv_dtype"):
        get_format("_plain")
