"""What comes back to a sample of a text whose pages had to leave the device."""

import sys

from jaxspec.host.blocks import Pages
from jaxspec.host.offload import Offload
from jaxspec.host.radix import Key, Leaving, page_keys
from jaxspec.host.running import Running


class Tiers:
    """What is kept for all who begin alike, and for samples that gave way what is of use to them alone."""

    def __init__(self, offload: Offload, tables: Pages) -> None:
        self.offload, self.tables = offload, tables

    def restore(self, running: Running, limit: int) -> bool:
        """Fill the pages that a sample has behind its committed tokens, as far as the first `limit` of its text are
        kept; whether all of them are full now, and more is wanted."""
        keys = page_keys(running.tokens, limit, running.sample.namespace, self.tables.page_size)
        return self._fill(running, keys, limit)

    def keep(self, running: Running) -> None:
        """Of a sample that gives way: what the prefix cache does not know, the partial last page included.

        A sample that has given pages back, or whose text the cache has let go of, is computed again.
        """
        if running.published == sys.maxsize or running.table.dropped:
            return
        running.written = running.table.tokens
        keys = self._own_keys(running)
        if pages := running.table.pages[running.published : len(keys)]:
            self.offload.keep([Leaving(keys, pages, lasting=False)])

    def restore_own(self, running: Running) -> None:
        """What `keep` kept, where everything before it is there again; it is of no more use then."""
        self._fill(running, self._own_keys(running), running.written)
        self.discard(running)

    def discard(self, running: Running) -> None:
        """Forget what was kept for a sample alone."""
        self.offload.discard(self._own_keys(running))
        running.written = 0

    def _fill(self, running: Running, keys: list[Key], limit: int) -> bool:
        table, size = running.table, self.tables.page_size
        first = table.tokens // size
        behind = [page for page in self.tables.pages_of_text(table)[first : len(keys)] if page is not None]
        found = self.offload.restore(keys[: first + len(behind)], behind)
        if found:
            self.tables.commit(table, min((first + found) * size, limit))
        return 0 < found == len(behind) < len(keys) - first

    def _own_keys(self, running: Running) -> list[Key]:
        own = running.sample.request_id, running.sample.index
        return page_keys(running.tokens, running.written, own, self.tables.page_size, partial=True)
