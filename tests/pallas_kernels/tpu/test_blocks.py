"""Blocks are whole, and no larger than what they lie in."""

from dataclasses import fields
from itertools import product

import jax.numpy as jnp
import pytest

from pallas_kernels.chip import Chip
from pallas_kernels.tpu import blocks_for

SHAPES = {"70B/8": (1, 8, 128), "8B": (8, 4, 128), "SmolLM2": (3, 3, 64), "Gemma": (4, 2, 256), "MHA": (32, 1, 80)}
"""Heads, group and head size."""
VALUES = {str: "any", int: 1}
CHIP = Chip(**{field.name: VALUES.get(field.type, 1.0) for field in fields(Chip)})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_blocks_are_whole_pages_and_registers(shape: str, dtype) -> None:
    heads, group, dim = SHAPES[shape]
    for page, width in product([16, 128, 256], [1, 4, 8, 64, 512]):
        blocks = blocks_for(None, jnp.dtype(dtype), page, heads, group, dim, width)
        fetch = blocks.fetch_pages * page
        assert blocks.compute_tokens % max(page, 128) == 0
        assert fetch % blocks.compute_tokens == 0
        assert 1 <= blocks.query_tokens <= width
        rows = blocks.query_tokens * group
        assert rows <= 512
        if rows <= 128:  # else it is a prompt's
            assert min(8, -(-rows // 8)) * blocks.compute_tokens // 128 <= 32
        assert blocks.buffers >= 2
        assert blocks.buffers * fetch * 2 * heads * dim * jnp.dtype(dtype).itemsize <= 2**24


@pytest.mark.parametrize(
    ("dtype", "width", "expected"), [("int8", 1, True), ("int8", 8, False), ("bfloat16", 1, False)]
)
def test_keys_stay_in_int8_for_few_queries_where_the_chip_multiplies_it(dtype: str, width: int, expected: bool) -> None:
    assert blocks_for(CHIP, jnp.dtype(dtype), 256, 1, 8, 128, width).int8_keys is expected
    assert not blocks_for(None, jnp.dtype(dtype), 256, 1, 8, 128, width).int8_keys
