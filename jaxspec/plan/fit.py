"""Whether a setup fits into its devices, and what would."""

from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.kv.formats import format_names
from jaxspec.models.quantization import scheme_names
from jaxspec.plan.held import held
from jaxspec.plan.memory import Change
from jaxspec.plan.setup import Setup
from jaxspec.plan.slices import Slice, slices_of
from jaxspec.plan.weights import PLAIN

MOST = 2**16
"""Sequences that nobody runs at once."""


def fits(setup: Setup) -> bool:
    """Whether all that each device holds is no more than it has."""
    return held(setup).total <= setup.slice.usable_bytes


def largest_batch(setup: Setup) -> int:
    """Sequences that fit, in all; a multiple of the replicas. 0 where none does."""
    replicas = setup.replicas
    return replicas * _most(lambda rows: fits(setup.changed(batch=rows * replicas)), MOST)


def longest_context(setup: Setup) -> int:
    """Tokens of each sequence that fit with this batch, in whole pages or the model's own; 0 where none do."""
    page, trained = setup.page_size, setup.shape.spec.max_context

    def context(pages: int) -> int:
        return min(pages * page - setup.drafts, trained)

    def fit(pages: int) -> bool:
        tokens = context(pages)
        return tokens < 2 or fits(setup.changed(context=tokens, prompt=max(tokens // 2, 1)))

    found = context(_most(fit, -(-(trained + setup.drafts) // page)))
    return max(found, 0)


def smallest_slice(setup: Setup) -> Slice:
    """The smallest slice of the same chip that the setup fits into. ConfigError where none is known."""
    for other in slices_of(setup.slice.chip.name):
        if _fits_with(setup, slice=other):
            return other
    largest = slices_of(setup.slice.chip.name)[-1].topology
    raise ConfigError(
        f"no slice up to {largest} holds {setup.batch} sequences of {setup.context} tokens of {setup.shape.name}: "
        "lower batch or context, take narrower weights or kv_dtype, or data_parallel that divides the devices"
    )


def remedies(setup: Setup) -> list[Change]:
    """Changes each of which makes a setup fit: the largest batch, context and formats, and the smallest slice. Empty
    where it fits, and where none of these would do."""
    if fits(setup):
        return []
    changes: list[Change] = []
    if batch := largest_batch(setup):
        changes.append({"batch": batch})
    if (context := longest_context(setup)) >= 2:
        changes.append({"context": context})
    changes += _formats(setup)
    try:
        changes.append({"topology": smallest_slice(setup).topology})
    except ConfigError:
        return changes
    return changes


def _formats(setup: Setup) -> list[Change]:
    """The largest other format of the cache, and of the weights, that makes it fit; if neither does, of both."""
    caches = [{"kv_dtype": name} for name in format_names()]
    weights = [{"weights": name} for name in (*PLAIN, *scheme_names())]
    found = _fitting(setup, caches)[:1] + _fitting(setup, weights)[:1]
    return found or _fitting(setup, [one | other for one, other in product(caches, weights)])[:1]


def _fitting(setup: Setup, changes: list[Change]) -> list[Change]:
    """Those with which it fits, the largest first; of int8 and fp8, which take as much, int8: fp8 is slow on many
    chips."""
    sizes = []
    for change in changes:
        with suppress(ConfigError):  # a format that this model cannot have
            sizes.append((held(setup.changed(**change)).total, change))
    fitting = [one for one in sizes if one[0] <= setup.slice.usable_bytes]
    fitting.sort(key=lambda one: (-one[0], "fp8" in "".join(one[1].values())))
    return [change for _, change in fitting]


def _fits_with(setup: Setup, **changes: Any) -> bool:
    try:
        return fits(setup.changed(**changes))
    except ConfigError:
        return False


def _most(fit: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits; whatever is less than one that fits does so too."""
    low, high = 0, 1
    while high <= limit and fit(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low
