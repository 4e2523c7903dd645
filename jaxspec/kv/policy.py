"""What an eviction policy of the key/value cache must say."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.layout import PLAIN, Variant

VOTES = 64
"""Last tokens of a prompt, before the root, that score what comes before them where scores decide what stays."""
FIRST = 4
"""Tokens at the beginning that stay in the cache of a draft model, which scores nothing: the others are the last."""


@dataclass(frozen=True)
class Policy:
    """What a token sees of those before it.

    Without `heavy` that is a function of its position alone, never of when pages went back: so chunks, drafts,
    preemption and prefixes that were found change nothing. With it, it is one of the request's own history: of its
    text, and of which of its tokens were roots. Keys stay as they were written, in positions of the text.
    """

    variant: Variant = PLAIN
    """What attention looks at. Its window is in slots, which are as far apart as positions are: what goes back is
    whole pages that no token to come sees."""
    by_cache: bool = False
    """Whether tokens see the sinks as if what lies between sinks and window had never been (StreamingLLM, Xiao et al.,
    2024); else from where they are in the text. Later keys keep their distances either way."""
    heavy: int = 0
    """Where it is not 0, so many tokens that others looked at most, and the last `recent` ones, are all that stays of a
    text that has become a page longer, in each key/value head of each layer its own (H2O, Zhang et al.,
    2023). It is roots that look, and the last tokens of a prompt: `variant.mass` tells how much."""
    recent: int = 0

    @property
    def first(self) -> int:
        """Tokens at the beginning of a text that stay."""
        return self.variant.sinks

    @property
    def last(self) -> int | None:
        """Tokens before the next one that it sees; None where it sees all."""
        return None if self.variant.window is None else self.variant.window - 1

    @property
    def budget(self) -> int | None:
        """Tokens that stay of a longer text where scores decide which; None where positions do."""
        return self.heavy + self.recent if self.heavy else None

    @property
    def forgets(self) -> bool:
        """Whether anything goes before the end."""
        return self.last is not None or self.budget is not None

    @property
    def silent(self) -> "Policy":
        """The same for tokens that score nothing."""
        return replace(self, variant=replace(self.variant, mass=False))

    def most_seen(self, context: int) -> int:
        """Tokens that one sees at most, itself included, in a text of so many."""
        window = self.variant.window
        return context if window is None else min(context, window + self.variant.sinks)

    def left_out(self, positions: Int[Array, "*shape"]) -> Int[Array, "*shape"] | None:
        """How far before its own position a token at these positions sees the sinks from; None where never."""
        window = self.variant.window
        if not self.by_cache or window is None:
            return None
        return jnp.maximum(positions + 1 - window - self.variant.sinks, 0)


FULL = Policy()
"""Every token sees all before it, and no page goes back before the end."""
