"""Prompts that stay in the prefix cache for a time, as prompt caching services have it.

Pins leave room for the largest request that may come, so nobody in line ever waits for one to end.
"""

from collections.abc import Sequence

from jaxspec.errors import RequestError
from jaxspec.host.radix import RadixCache
from jaxspec.host.request import Sample, namespace


class Pins:
    """Keeps prompts that ask for it in `cache`, with at most `most` pages in all. None is a cache that is off."""

    def __init__(self, cache: RadixCache | None, most: int) -> None:
        self.cache, self.most = cache, max(most, 0)
        self.now = 0.0
        """Seconds, as `tick` last said."""

    @property
    def room(self) -> int:
        """Pages that may be pinned besides those that are."""
        return max(self.most - self.cache.pinned, 0) if self.cache else 0

    def tick(self, now: float) -> None:
        """Let the clock run on: pins whose time is over are lifted. `now` is in seconds, by any one clock."""
        self.now = now
        if self.cache is not None:
            self.cache.expire(now)

    def check(self, sample: Sample, now: float) -> None:
        """Raises RequestError where a prompt asks to be kept and there is no room for it now."""
        self.tick(now)
        if sample.params.cache_ttl is None:
            return
        if self.cache is None:
            raise RequestError("cache_ttl keeps a prompt in the prefix cache, which is off: leave one of the two out")
        more, room = self.cache.unpinned(sample.prompt_ids, sample.namespace), self.room
        if more > room:
            raise RequestError(
                f"cache_ttl would pin {more} more pages of {self.cache.page_size} tokens, and {room} more may be "
                f"({self.most} in all, the rest is for the largest request): raise kv_memory or max_batch, lower "
                "max_context, or unpin"
            )

    def keep(self, sample: Sample, tokens: int) -> None:
        """Pin the whole pages of a prompt's first `tokens`, as far as there is room by now; the cache has them all."""
        ttl = sample.params.cache_ttl
        if self.cache is not None and ttl is not None and not sample.pinned_tokens:
            prompt = sample.prompt_ids[:tokens]
            sample.pinned_tokens = self.cache.pin(prompt, sample.namespace, self.now + ttl, self.room)

    def lift(self, tokens: Sequence[int], cache_salt: str) -> int:
        """Lift the longest pin that lies on these tokens; returns how many it kept, 0 where there is none."""
        return self.cache.unpin(tokens, namespace(cache_salt)) if self.cache else 0
