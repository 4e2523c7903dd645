"""How much an engine holds: the context of a request, and the pages that its memory pays for."""

from dataclasses import replace

from jaxspec.config import EngineConfig
from jaxspec.drafters import check_drafter
from jaxspec.errors import CapacityError, ConfigError
from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.spec import ModelSpec
from jaxspec.target import platform
from jaxspec.types import Drafter
from pallas_kernels import XLA, Kernels


def check(config: EngineConfig) -> None:
    """ConfigError for names and sizes that are wrong whatever the model is: so that none is loaded in vain."""
    check_drafter(config.drafter)
    get_format(config.kv_dtype).arrays(1, _page_size(config), 1, 2)


def context_of(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens of a request at most, prompt and output. ConfigError where the model was trained for fewer."""
    trained = spec.max_context
    if config.max_context is not None and config.max_context > trained:
        raise ConfigError(
            f"max_context {config.max_context} is more than the {trained} tokens the model was trained for"
        )
    return config.max_context or trained


def pool_of(config: EngineConfig, spec: ModelSpec, drafter: Drafter, kernels: Kernels = XLA) -> tuple[PoolSpec, int]:
    """The pool that kv_memory pays for, no larger than a full batch and its cache can use, and the page table's width.

    CapacityError where it is not a single page.
    """
    page = _page_size(config)
    width = -(-(context_of(config, spec) + drafter.tree.size) // page)
    form, draft = get_format(config.kv_dtype), drafter.model
    one = PoolSpec(form, spec.num_layers, 1, page, spec.num_kv_heads, spec.head_dim, drafter.tree.size, kernels)
    page_bytes = one.page_bytes
    if draft is not None:
        page_bytes += one.of_draft(draft.num_layers, draft.num_kv_heads, draft.head_dim).page_bytes
    tails = config.max_batch * one.tail_bytes
    most = (config.max_batch + config.prefix_cache) * width
    pages = min((int(config.kv_memory * 2**30) - tails) // page_bytes, most)
    if pages < 1:
        less = "lower page_size" if not tails else f"lower max_batch, whose tails take {tails / 2**20:.1f} MiB"
        raise CapacityError(
            f"kv_memory {config.kv_memory:g} GiB is less than one page: {page} tokens take "
            f"{page_bytes / 2**20:.1f} MiB; raise kv_memory or {less}"
        )
    return replace(one, num_pages=pages), width


def _page_size(config: EngineConfig) -> int:
    if config.page_size is not None:
        return config.page_size
    return 64 if platform() == "cpu" else accelerator_page(config.kv_dtype)


def accelerator_page(kv_dtype: str) -> int:
    """Tokens of a page on accelerators. They fetch a page as a whole: 8-bit ones are as many bytes as those of
    bfloat16."""
    return 256 if kv_dtype in ("int8", "fp8") else 128
