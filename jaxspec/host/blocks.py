"""The pool of fixed pages, as the host keeps its books."""

from jaxspec.errors import CapacityError


class PageAllocator:
    """Hands out page numbers; both operations cost O(pages asked for)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages. CapacityError when there are not so many."""
        if count > self.free:
            raise CapacityError(f"{count} pages wanted, {self.free} of {self.num_pages} free")
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Give pages back. ValueError when one of them is free already."""
        if len(set(pages)) < len(pages) or not set(pages).isdisjoint(self._free):
            raise ValueError(f"pages released twice: {pages}")
        self._free.extend(reversed(pages))
