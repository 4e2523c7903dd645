"""How much an engine holds: the context of a request, and the pages that its memory pays for."""

from dataclasses import replace

from jaxspec.config import EngineConfig
from jaxspec.drafters import check_drafter
from jaxspec.errors import CapacityError, ConfigError
from jaxspec.host.blocks import Budget, Kept
from jaxspec.kv.formats import get_format
from jaxspec.kv.policies import get_policy
from jaxspec.kv.policy import FIRST, VOTES, Policy
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.spec import ModelSpec
from jaxspec.program import Program
from jaxspec.target import platform
from jaxspec.types import Drafter
from pallas_kernels import XLA, Kernels


def check(config: EngineConfig) -> None:
    """ConfigError for names and sizes that are wrong whatever the model is: so that none is loaded in vain."""
    check_drafter(config.drafter)
    get_format(config.kv_dtype).arrays(1, _page_size(config), 1, 2)
    get_policy(config)


def context_of(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens of a request at most, prompt and output. ConfigError where the model was trained for fewer, and tokens are
    to see more than that."""
    trained, context = spec.max_context, config.max_context or spec.max_context
    policy = get_policy(config)
    if policy.most_seen(context) <= trained:
        return context
    what = f"max_context {context} is more than the {trained} tokens the model was trained for"
    if policy.last is None:
        raise ConfigError(f"{what}: lower it, or take kv_policy sinks")
    raise ConfigError(f"{what}, and of so long a text a token sees {policy.most_seen(context)}: lower kv_window")


def pool_of(config: EngineConfig, spec: ModelSpec, drafter: Drafter, kernels: Kernels = XLA) -> tuple[PoolSpec, int]:
    """The pool that kv_memory pays for, no larger than a full batch and its cache can use, and the page table's width.

    CapacityError where it is not a single page.
    """
    page, policy = _page_size(config), get_policy(config)
    whole = -(-(context_of(config, spec) + drafter.tree.size) // page)
    width = min(whole, _pages_at_once(config, policy, drafter, page) or whole)
    form, draft, drafts = get_format(config.kv_dtype), drafter.model, drafter.tree.size
    one = PoolSpec(form, spec.num_layers, 1, page, spec.num_kv_heads, spec.head_dim, drafts, kernels, policy)
    width += one.round_pages or 0  # as a prompt is there until what stays of it is elsewhere
    one, page_bytes = replace(one, slots=width * page), one.page_bytes
    if draft is not None:
        page_bytes += one.of_draft(draft.num_layers, draft.num_kv_heads, draft.head_dim).page_bytes
    tails = config.max_batch * one.tail_bytes
    most = config.max_batch * width + config.prefix_cache * whole
    pages = min((int(config.kv_memory * 2**30) - tails) // page_bytes, most)
    if pages < 1:
        less = "lower page_size" if not tails else f"lower max_batch, whose tails take {tails / 2**20:.1f} MiB"
        raise CapacityError(
            f"kv_memory {config.kv_memory:g} GiB is less than one page: {page} tokens take "
            f"{page_bytes / 2**20:.1f} MiB; raise kv_memory or {less}"
        )
    return replace(one, num_pages=pages), width


def kept_of(policy: Policy, drafter: Drafter) -> Kept | None:
    """What of a text must stay for the tokens to come, of which a draft model writes some late; None where all must."""
    return None if policy.last is None else Kept(policy.first, policy.last + (drafter.lag if drafter.model else 0))


def budget_of(pool: PoolSpec, drafter: Drafter) -> Budget | None:
    """What of a text stays where scores decide; None where they do not.

    ConfigError where that is less than the tokens that a draft model may be behind.
    """
    tokens, limit, pages = pool.policy.budget, pool.limit, pool.round_pages
    if tokens is None or limit is None or pages is None:
        return None
    if drafter.model is not None and tokens < FIRST + drafter.lag:
        least = FIRST + drafter.lag
        raise ConfigError(f"kv_heavy + kv_window are {tokens} tokens: a draft model needs {least} or more")
    return Budget(tokens, limit, pages, VOTES)


def _pages_at_once(config: EngineConfig, policy: Policy, drafter: Drafter, page: int) -> int | None:
    """Pages that a text has at most: those that stay, and those of what a call writes; None where all stay.

    ConfigError where a draft would not see its own beginning.
    """
    kept, depth = kept_of(policy, drafter), drafter.tree.max_depth
    if kept is None or policy.last is None:
        return None
    if policy.last < depth:
        raise ConfigError(f"kv_window {config.kv_window} is less than a draft: it must be {depth + 1} or more")
    rounds = (Program.max_rounds - 1) * (depth + 1) + 1 + drafter.tree.size
    # Tokens that follow each other are in a page more than they fill.
    return -(-kept.first // page) + -(-(kept.last + max(rounds, config.prefill_chunk) - 1) // page) + 1


def _page_size(config: EngineConfig) -> int:
    if config.page_size is not None:
        return config.page_size
    return 64 if platform() == "cpu" else accelerator_page(config.kv_dtype)


def accelerator_page(kv_dtype: str) -> int:
    """Tokens of a page on accelerators. They fetch a page as a whole: 8-bit ones are as many bytes as those of
    bfloat16."""
    return 256 if kv_dtype in ("int8", "fp8") else 128
