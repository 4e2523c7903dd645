"""Prefixes kept for whoever comes next: a compressed radix tree over exact tokens (RadixAttention, Zheng et al. 2024).

An edge is a run of whole pages. A page's key is its token ids themselves, so a hit is never a guess; the first key of a
text also holds the namespace, so other weights, adapters or salts never meet. The tree holds one reference on each of
its pages and every sequence that uses one holds another: that reference is the lock, and a page with only one reference
is one that nobody uses now.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxspec.host.blocks import PageAllocator

Key = tuple[Hashable, ...]


class Leaving(NamedTuple):
    """Pages of a text that are about to be free."""

    keys: list[Key]
    """One a page, from the beginning of the text on."""
    pages: list[int]
    """Those of the last keys."""
    lasting: bool = True
    """Whether the text is of use to others than one request."""


def page_keys(
    tokens: Sequence[int], limit: int, namespace: Hashable, page_size: int, partial: bool = False
) -> list[Key]:
    """One key a whole page of the first `limit` tokens, and with `partial` one of the rest."""
    end = limit if partial else limit - page_size + 1
    keys: list[Key] = [tuple(tokens[at : min(at + page_size, limit)]) for at in range(0, end, page_size)]
    return [(namespace, *keys[0]), *keys[1:]] if keys else []


@dataclass(eq=False)
class _Node:
    """The edge that leads here, one key and one page a step, and the edges that go on."""

    parent: "_Node | None" = None
    keys: list[Key] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    children: dict[Key, "_Node"] = field(default_factory=dict)
    """By the first key of their edges."""


class RadixCache:
    """Which pages hold which prefixes. `page_size` is in tokens. `keep` is told of pages before they make room."""

    def __init__(
        self, allocator: PageAllocator, page_size: int, keep: Callable[[list[Leaving]], None] | None = None
    ) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self._keep = keep
        self._root = _Node()
        self._pages: set[int] = set()
        self._pins: dict[_Node, float] = {}
        """The whole way from the root to such a node stays until that time."""
        self._order: OrderedDict[_Node, None] = OrderedDict()
        """All nodes but the root, least recently used first; a node always comes after everything below it."""

    @property
    def cached(self) -> int:
        """Pages the tree holds, whoever else does."""
        return len(self._pages)

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free now. Costs O(pages in the tree)."""
        return sum(len(node.pages) - keep for node, keep in self._surplus())

    @property
    def pinned(self) -> int:
        """Pages that pins keep. Costs O(nodes on the way to a pin)."""
        return sum(len(node.pages) for node in self._kept())

    def match(self, tokens: Sequence[int], namespace: Hashable) -> list[int]:
        """Pages of the longest cached prefix; the caller holds a reference on each and releases it like any other.

        One token at least is left to compute, so of a text that is cached to its end the last page does not count.
        """
        node, _, pages = self._find(self._keys(tokens, len(tokens) - 1, namespace))
        self.allocator.share(pages)
        self._touch(node)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int | None], namespace: Hashable) -> int | None:
        """Keep the whole pages of a text; returns how many were new to the tree, which takes a reference on each.

        The tokens must be final and their pages written. What the tree has already stays as it is, and the caller's
        own pages for it stay the caller's; tokens past the last whole page are left out. Pages that the caller has
        given back are None: where the tree has not got them either, nothing is kept and None returned. ValueError, and
        nothing changed, when there are fewer pages than that, or when a new one is free or has another place in the
        tree.
        """
        keys = self._keys(tokens, len(tokens), namespace)
        if len(pages) < len(keys):
            raise ValueError(f"{len(keys)} pages of tokens to keep, {len(pages)} pages given")
        node, inside, found = self._find(keys)
        new = [page for page in pages[len(found) : len(keys)] if page is not None]
        if len(new) < len(keys) - len(found):
            return None
        if len(set(new) - self._pages) < len(new):
            raise ValueError(f"pages cannot be kept in two places: {new}")
        self.allocator.share(new)
        self._pages.update(new)
        if new:
            node = self._grow(self._split(node, inside), keys[len(found) :], new)
        self._touch(node)
        return len(new)

    def evict(self, count: int) -> int:
        """Free `count` pages, or as many as can be: least recently used first, from the ends of the tree inwards.

        Pages that a sequence holds, pinned ones, and those on the way to either stay. Returns how many were freed.
        """
        freed, cuts = 0, []
        for node, keep in self._surplus():
            if freed >= count:
                break
            going = min(len(node.pages) - keep, count - freed)
            freed += going
            cuts.append((node, len(node.pages) - going))
        self._let_go(cuts)
        return freed

    def forget(self, count: int) -> int:
        """Free `count` pages that nobody holds, or as many as can be, where somebody holds later ones of the same text:
        the tree lets go of those, too. Pinned pages and those on the way to them stay. Returns how many were freed.
        """
        kept, freed = self._kept(), 0
        for node in [node for node in self._order if node not in kept]:
            alone = [step for step, page in enumerate(node.pages) if self.allocator.references(page) == 1]
            going = alone[-(count - freed) :] if freed < count else []
            if going:
                below = [(one, 0) for one in _below(node.children.values())]
                self._let_go([*reversed(below), (node, going[0])])
                freed += len(going)
        return freed

    def pin(self, tokens: Sequence[int], namespace: Hashable, until: float, room: int = sys.maxsize) -> int:
        """Keep what is cached of these tokens until `expire` hears of that time; returns how many tokens that is.

        At most `room` pages that no pin keeps yet, from the beginning on. A pin belongs to the prefix, not to who set
        it: a second one can only prolong it.
        """
        keys = self._keys(tokens, len(tokens), namespace)
        node, inside, found = self._find(keys[: self._pinned_of(keys) + room])
        if found:
            node = self._split(node, inside)
            self._pins[node] = max(self._pins.get(node, until), until)
        self._touch(node)
        return len(found) * self.page_size

    def unpinned(self, tokens: Sequence[int], namespace: Hashable) -> int:
        """How many whole pages of a text no pin keeps, be they cached or not."""
        keys = self._keys(tokens, len(tokens), namespace)
        return len(keys) - self._pinned_of(keys)

    def unpin(self, tokens: Sequence[int], namespace: Hashable) -> int:
        """Lift the longest pin that lies on these tokens; returns how many it kept, 0 where there is none."""
        node, inside, found = self._find(self._keys(tokens, len(tokens), namespace))
        length = len(found)
        if inside < len(node.keys) and node.parent:
            length, node = length - inside, node.parent
        while node.parent and node not in self._pins:
            length, node = length - len(node.keys), node.parent
        self._pins.pop(node, None)
        return length * self.page_size

    def expire(self, now: float) -> None:
        """Lift the pins whose time is over, by the clock of their `until`."""
        self._pins = {node: until for node, until in self._pins.items() if now < until}

    def clear(self, namespace: Hashable = None) -> None:
        """Forget a namespace (None: all of them), pins included. Sequences keep the pages that they hold."""
        for node in _below(
            node for key, node in self._root.children.items() if namespace is None or key[0] == namespace
        ):
            self._cut(node, 0)

    def _keys(self, tokens: Sequence[int], limit: int, namespace: Hashable) -> list[Key]:
        return page_keys(tokens, limit, namespace, self.page_size)

    def _way(self, node: _Node | None) -> list[Key]:
        """All keys from the root to the end of this edge."""
        edges = []
        while node is not None:
            edges.append(node.keys)
            node = node.parent
        return [key for keys in reversed(edges) for key in keys]

    def _find(self, keys: list[Key]) -> tuple[_Node, int, list[int]]:
        """The last node on the way of these keys, how many steps of its edge they go, and all pages on the way."""
        node, inside, pages = self._root, 0, []
        while inside == len(node.keys) and len(pages) < len(keys) and keys[len(pages)] in node.children:
            node = node.children[keys[len(pages)]]
            ours = keys[len(pages) : len(pages) + len(node.keys)]
            pairs = zip(node.keys, ours, strict=False)
            inside = next((step for step, (theirs, our) in enumerate(pairs) if theirs != our), len(ours))
            pages += node.pages[:inside]
        return node, inside, pages

    def _split(self, node: _Node, at: int) -> _Node:
        """See that a node ends after `at` steps of this edge; returns it. The caller touches it."""
        if at == len(node.keys) or node.parent is None:
            return node
        upper = _Node(node.parent, node.keys[:at], node.pages[:at], {node.keys[at]: node})
        node.parent.children[node.keys[0]] = upper
        node.parent, node.keys, node.pages = upper, node.keys[at:], node.pages[at:]
        self._order[upper] = None
        return upper

    def _grow(self, node: _Node, keys: list[Key], pages: list[int]) -> _Node:
        """Lengthen the edge of a leaf, or hang a new leaf on the node; returns the leaf. The caller touches it."""
        if node.parent and not node.children and node not in self._pins:
            node.keys += keys
            node.pages += pages
            return node
        leaf = _Node(node, keys, pages)
        node.children[keys[0]] = leaf
        self._order[leaf] = None
        return leaf

    def _touch(self, node: _Node) -> None:
        """The way to this node is the most recently used, its beginning most of all."""
        while node.parent:
            self._order.move_to_end(node)
            node = node.parent

    def _kept(self) -> set[_Node]:
        """The root and all nodes on the way to a pin."""
        kept = {self._root}
        for pinned in self._pins:
            node = pinned
            while node.parent and node not in kept:
                kept.add(node)
                node = node.parent
        return kept

    def _pinned_of(self, keys: list[Key]) -> int:
        """How many of the pages of these keys a pin keeps: a beginning of them."""
        kept, (node, inside, found) = self._kept(), self._find(keys)
        length = len(found)
        while node.parent and node not in kept:
            length, node = length - inside, node.parent
            inside = len(node.keys)
        return length

    def _surplus(self) -> Iterator[tuple[_Node, int]]:
        """The nodes whose last pages can go, and how many must stay: least recently used first, ends before beginnings.

        Each counts on those before it being cut as far as they can be.
        """
        needed: set[_Node | None] = set()
        for node in self._order:
            keep = len(node.pages)
            if node not in needed and node not in self._pins:
                while keep and self.allocator.references(node.pages[keep - 1]) == 1:
                    keep -= 1
            if keep:
                needed.add(node.parent)
            if keep < len(node.pages):
                yield node, keep

    def _let_go(self, cuts: list[tuple[_Node, int]]) -> None:
        """Cut edges down to so many pages, and tell `keep` before."""
        if self._keep is not None:
            self._keep([Leaving(self._way(node), node.pages[keep:]) for node, keep in cuts])
        for node, keep in cuts:
            self._cut(node, keep)

    def _cut(self, node: _Node, keep: int) -> None:
        """Let go of all but the first `keep` pages of an edge, and of the node when nothing is left."""
        dropped = node.pages[keep:]
        self._pages.difference_update(dropped)
        if keep == 0 and node.parent:
            del node.parent.children[node.keys[0]]
            del self._order[node]
            self._pins.pop(node, None)
        del node.keys[keep:], node.pages[keep:]
        self.allocator.release(dropped[::-1])


def _below(nodes: Iterable[_Node]) -> list[_Node]:
    """These nodes and all that hang on them."""
    found = list(nodes)
    for node in found:
        found += node.children.values()
    return found
