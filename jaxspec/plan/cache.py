"""What keys and values take in memory: bytes are those of the arrays that a format declares."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.kv.formats import format_names, get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.spec import ModelSpec
from jaxspec.plan.shape import LatentSpec
from jaxspec.sizes import accelerator_page


class Cache(NamedTuple):
    """What keys and values take in one format, in bytes over all layers."""

    page_size: int
    """Tokens of a page."""
    page_bytes: int
    """Of one page, scales included."""
    tail_bytes: int
    """What a sequence has besides its pages, with no room for drafts: see `jaxspec.kv.tail`."""

    @property
    def token_bytes(self) -> int | float:
        """Of one token in a full page."""
        whole, rest = divmod(self.page_bytes, self.page_size)
        return self.page_bytes / self.page_size if rest else whole

    def pages(self, context: int) -> int:
        """Pages of a sequence of so many tokens."""
        return -(-context // self.page_size)

    def sequence_bytes(self, context: int) -> int:
        """Of a sequence of so many tokens; its pages are its own as a whole."""
        return self.pages(context) * self.page_bytes + self.tail_bytes


def caches_of(spec: ModelSpec | LatentSpec, page_size: int | None) -> tuple[dict[str, Cache], dict[str, str]]:
    """What each format takes, the largest first; and of formats that cannot be, why. `page_size` None is what
    accelerators take for each."""
    caches, refused = {}, {}
    for name in reversed(format_names()):  # int8 before fp8, which takes as much and is slow on many chips
        try:
            caches[name] = _cache(spec, name, accelerator_page(name) if page_size is None else page_size)
        except ConfigError as error:
            refused[name] = str(error)
    return dict(sorted(caches.items(), key=lambda item: -item[1].token_bytes)), refused


def _cache(spec: ModelSpec | LatentSpec, kv_dtype: str, page_size: int) -> Cache:
    if isinstance(spec, LatentSpec):
        return Cache(page_size, _latent_page_bytes(spec, kv_dtype, page_size), 0)
    pool = PoolSpec(get_format(kv_dtype), spec.num_layers, 1, page_size, spec.num_kv_heads, spec.head_dim)
    return Cache(page_size, pool.page_bytes, pool.tail_bytes)


def _latent_page_bytes(spec: LatentSpec, kv_dtype: str, page_size: int) -> int:
    """Bytes of a page of latents and RoPE keys. Of a latent a format stores one vector, where a head has two; RoPE keys
    stay in 16 bits where latents have fewer."""
    form = get_format(kv_dtype)
    if form.group:
        raise ConfigError(
            f"kv_dtype {kv_dtype} stores a key by its channels, and latent attention has no keys to store"
        )
    latents = PoolSpec(form, spec.num_layers, 1, page_size, 1, spec.latent_dim)
    stored = latents.shapes()["kv"].dtype
    rope_bytes = max(stored.itemsize, jnp.dtype(jnp.bfloat16).itemsize)
    return latents.page_bytes // 2 + spec.num_layers * page_size * spec.rope_dim * rope_bytes
