"""What kernels cannot do runs in XLA, with the same result, and the log says so once."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv.formats import get_format
from pallas_kernels import Kernels, Rows, paged_attention, writes_pages
from pallas_kernels.kernels import tell_fallback

PAGE, HEADS, DIM = 8, 2, 16
INTERPRETED = Kernels("tpu", None, interpret=True)


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    tell_fallback.cache_clear()


def test_attention_falls_back(caplog) -> None:
    rng = np.random.default_rng(0)
    kv = jnp.asarray(rng.normal(size=(6, HEADS, 2, PAGE, DIM)), jnp.bfloat16)
    q = jnp.asarray(rng.normal(size=(2, 1, HEADS, 3, DIM)), jnp.float32)
    rows = Rows(*(jnp.int32(part) for part in ([0, 1], [11, 3], [1, 1])))
    table = jnp.int32([[4, 1], [2, 0]])

    def run(kernels: dict):
        read = get_format("bfloat16").read
        return paged_attention(q, {"kv": kv}, read, rows, table, None, page=PAGE, scale=0.25, **kernels)

    with caplog.at_level(logging.WARNING):
        found = [run({"kernels": INTERPRETED}) for _ in range(2)]
    np.testing.assert_array_equal(found[0], run({}))
    assert len(caplog.records) == 1
    assert "paged attention runs in XLA and not in a Pallas kernel: pages of 8 slots" in caplog.text


@pytest.mark.parametrize(
    ("kv_dtype", "page", "why"),
    [
        ("bfloat16", 16, None),
        ("bfloat16", 24, "kv of bfloat16"),
        ("int8", 48, "kv of int8"),
        ("int4", 64, "key_scale"),
    ],
)
def test_pages_that_kernels_do_not_write(caplog, kv_dtype: str, page: int, why: str | None) -> None:
    arrays = get_format(kv_dtype).arrays(4, page, HEADS, 128)
    with caplog.at_level(logging.WARNING):
        assert [writes_pages(arrays, INTERPRETED) for _ in range(2)] == [why is None] * 2
    assert len(caplog.records) == (why is not None)
    assert (why or "") in caplog.text
