"""Bytes of arrays in tiles: by hand, and as the TPU compiler lays arguments out."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from jaxspec.plan.tiles import held_bytes
from jaxspec.plan.topology import compile_for

SHAPES = [
    ((4, 1, 10, 128, 512), "int8"),
    ((4, 2, 96, 512), "bfloat16"),
    ((512,), "bfloat16"),
    ((30, 576, 576), "int8"),
    ((30, 576), "bfloat16"),
    ((80, 1, 2, 128, 64), "bfloat16"),
    ((80, 3, 2, 256, 64), "int8"),
    ((8, 8192, 32), "uint8"),
    ((80, 1, 256, 2, 2), "bfloat16"),
    ((32, 16128), "int32"),
    ((1, 16128), "bool"),
    ((32, 2), "uint32"),
]


def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((16, 256), "float32", 16 * 256 * 4),  # whole tiles
        ((3, 100), "float32", 4 * 128 * 4),  # a tile of 4 rows
        ((33, 128), "int8", 64 * 128),  # tiles of 32 rows
        ((100,), "float32", 128 * 4),
        ((100,), "int8", 512),  # four to a word
        ((2, 576), "bfloat16", 2 * 640 * 2),
        ((), "int32", 512),
        ((0, 128), "int32", 0),
    ],
)
def test_by_hand(shape: tuple[int, ...], dtype: str, size: int) -> None:
    assert held_bytes(array(shape, dtype), tiled=True) == size


def test_without_tiles() -> None:
    tree = {"a": array((3, 100), "float32"), "b": (array((7,), "int8"), None)}
    assert held_bytes(tree, tiled=False) == 1207


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_the_compiler_takes_as_much(shape: tuple[int, ...], dtype: str) -> None:
    many = 4  # arguments are counted in units of 512 bytes
    arguments = [array(shape, dtype) for _ in range(many)]
    compiled = compile_for("v5e:2x4", lambda *arrays: [a[(0,) * a.ndim] for a in arrays], *arguments)
    size = compiled.memory.argument_size_in_bytes
    assert held_bytes(arguments, tiled=True) == pytest.approx(size, rel=0.02, abs=many * 512)
