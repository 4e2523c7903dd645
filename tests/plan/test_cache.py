"""Bytes of keys and values: what is published, and what a pool of that shape really takes."""

from typing import Any

import jax
import pytest

from jaxspec.kv.formats import format_names, get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.families import llama
from jaxspec.models.spec import ModelSpec
from jaxspec.plan.cache import Cache, caches_of
from jaxspec.plan.shape import LatentSpec, read_shape

PAGE = 64


def tiny(**changes: Any) -> ModelSpec:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    return llama.spec(sizes | {"num_attention_heads": 4} | changes, 96)


def cache(model: str, kv_dtype: str) -> Cache:
    return caches_of(read_shape(model).spec, 128)[0][kv_dtype]


@pytest.mark.parametrize(
    ("model", "token_bytes"),
    [
        ("llama-3.3-70b", 327_680),
        ("llama-2-70b", 327_680),
        ("llama-3.1-8b", 131_072),
        ("llama-2-7b", 524_288),
        ("tinyllama-1.1b", 22_528),
        ("smollm2-135m", 23_040),
        ("deepseek-v3", 70_272),
    ],
)
def test_published_bytes_a_token(model: str, token_bytes: int) -> None:
    assert cache(model, "bfloat16").token_bytes == token_bytes
    assert cache(model, "float32").token_bytes == 2 * token_bytes


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kv_dtype", format_names())
def test_bytes_are_those_of_a_pool(kv_dtype: str, kv_heads: int) -> None:
    spec = tiny(num_key_value_heads=kv_heads)
    pages, batch = 5, 3
    pool = PoolSpec(get_format(kv_dtype), spec.num_layers, pages, PAGE, spec.num_kv_heads, spec.head_dim)
    taken = sum(array.nbytes for array in jax.tree.leaves(pool.allocate(batch)))
    found = caches_of(spec, PAGE)[0][kv_dtype]
    assert pages * found.page_bytes + batch * found.tail_bytes == taken
    assert found.token_bytes * PAGE == found.page_bytes


def test_what_quantising_saves() -> None:
    caches = caches_of(read_shape("llama-3.3-70b").spec, 128)[0]
    ratio = {name: caches["bfloat16"].token_bytes / one.token_bytes for name, one in caches.items()}
    assert ratio["int8"] == ratio["fp8"] == 256 / 130  # a 16-bit scale for each vector of 128
    assert 3.3 < ratio["int4"] < 4
    assert [name for name, one in caches.items() if one.tail_bytes] == ["int4"]
    assert list(caches) == sorted(caches, key=lambda name: -caches[name].page_bytes)


def test_a_sequence_has_whole_pages_and_a_tail() -> None:
    one = Cache(page_size=16, page_bytes=1000, tail_bytes=7)
    assert [one.pages(context) for context in (1, 16, 17, 32, 33)] == [1, 1, 2, 2, 3]
    assert one.sequence_bytes(17) == 2007
    assert one.token_bytes == 62.5
    assert isinstance(one._replace(page_bytes=1600).token_bytes, int)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_latents_keep_their_rope_keys_in_16_bits(kv_dtype: str) -> None:
    assert cache("deepseek-v3", kv_dtype).token_bytes == 61 * (512 + 2 + 2 * 64)


def test_formats_that_cannot_be_are_named() -> None:
    caches, refused = caches_of(LatentSpec(2, 4, 32, 8, 64), 128)
    assert "latent attention" in refused["int4"]
    assert set(caches) | set(refused) == set(format_names())
    caches, refused = caches_of(tiny(), 16)
    assert "multiple of 64" in refused["int4"]
    assert set(caches) | set(refused) == set(format_names())
