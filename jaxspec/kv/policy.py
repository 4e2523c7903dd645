"""What an eviction policy of the key/value cache must say."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.layout import PLAIN, Variant


@dataclass(frozen=True)
class Policy:
    """What a token sees of those before it.

    That is a function of its position alone, never of when pages went back: so chunks, drafts, preemption and prefixes
    that were found change nothing. Keys stay as they were written, in positions of the text.
    """

    variant: Variant = PLAIN
    """What attention looks at. Its window is in slots, which are as far apart as positions are: what goes back is
    whole pages that no token to come sees."""
    by_cache: bool = False
    """Whether tokens see the sinks as if what lies between sinks and window had never been (StreamingLLM, Xiao et al.,
    2024); else from where they are in the text. Later keys keep their distances either way."""

    @property
    def first(self) -> int:
        """Tokens at the beginning of a text that stay."""
        return self.variant.sinks

    @property
    def last(self) -> int | None:
        """Tokens before the next one that it sees; None where it sees all."""
        return None if self.variant.window is None else self.variant.window - 1

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
