"""The prefix cache: what it finds, what it keeps, and what goes first when pages run short."""

import math

import pytest

from jaxspec.host.blocks import PageAllocator, Pages, PageTable
from jaxspec.host.radix import Leaving, RadixCache, page_keys

PAGE = 4
MODEL = ("model", "salt")


class Cache(RadixCache):
    """A cache over 32 pages, and sequences that come and go."""

    def __init__(self) -> None:
        super().__init__(PageAllocator(32), PAGE)

    def keep(self, tokens: list[int], namespace=MODEL) -> list[int]:
        """A sequence computes these tokens, publishes them and ends; returns the pages it had."""
        pages = self.allocator.allocate(-(-len(tokens) // PAGE))
        self.insert(tokens, pages, namespace)
        self.allocator.release(pages)
        return pages

    def look(self, tokens: list[int], namespace=MODEL) -> list[int]:
        """What a match finds, given back at once."""
        pages = self.match(tokens, namespace)
        self.allocator.release(pages)
        return pages


@pytest.fixture
def cache() -> Cache:
    return Cache()


def text(*pages: str, tail: int = 1) -> list[int]:
    """One page of tokens a letter, and `tail` tokens more that no text shares with a page."""
    return [ord(letter) * 10 + slot for letter in "".join(pages) for slot in range(PAGE)] + [-1] * tail


def test_an_empty_cache_finds_nothing(cache: Cache) -> None:
    assert cache.match(text("abc"), MODEL) == []
    assert (cache.cached, cache.evictable, cache.evict(3)) == (0, 0, 0)


def test_the_longest_whole_page_prefix_is_found(cache: Cache) -> None:
    pages = cache.keep(text("abc", tail=3))
    assert cache.cached == 3
    assert cache.look(text("abc")) == pages[:3]
    assert cache.look(text("abcd")) == pages[:3]
    assert cache.look(text("abx")) == pages[:2]
    assert cache.look(text("ab", tail=2)) == pages[:2]
    assert cache.look(text("xbc")) == []
    assert cache.look(text("a")[:-2]) == []


def test_of_a_full_hit_the_last_token_is_left_to_compute(cache: Cache) -> None:
    pages = cache.keep(text("abc", tail=0))
    assert cache.look(text("abc", tail=0)) == pages[:2]
    assert cache.look(text("abc", tail=1)) == pages


@pytest.mark.parametrize("length", range(PAGE))
def test_texts_shorter_than_a_page_pass_through(cache: Cache, length: int) -> None:
    """Nothing to keep, nothing to find, nothing to pin (sglang 26450)."""
    short = text("a")[:length]
    cache.keep(short)
    assert cache.cached == 0
    assert cache.match(short, MODEL) == []
    assert cache.pin(short, MODEL, math.inf) == 0
    cache.unpin(short, MODEL)
    assert cache.allocator.free == 32


def test_a_match_takes_a_reference_for_the_caller(cache: Cache) -> None:
    cache.keep(text("abc"))
    held = cache.match(text("ab"), MODEL)
    assert [cache.allocator.references(page) for page in held] == [2, 2]
    assert cache.evictable == 1
    assert cache.evict(5) == 1
    assert cache.look(text("abc")) == held
    cache.allocator.release(held)
    assert cache.evictable == 2


def test_insert_splits_an_edge_where_texts_part(cache: Cache) -> None:
    first = cache.keep(text("abcd"))
    second = cache.keep(text("abxy"))
    assert cache.cached == 6
    assert cache.look(text("abcd")) == first[:4]
    assert cache.look(text("abxy")) == first[:2] + second[2:4]
    third = cache.keep(text("z"))
    assert cache.look(text("z")) == third[:1]


def test_a_duplicate_keeps_the_pages_of_the_tree(cache: Cache) -> None:
    """The caller's own pages stay the caller's; no table ever points at freed ones (mini-sglang 142)."""
    first = cache.keep(text("ab", tail=0))
    table = PageTable(cache.allocator.allocate(3), 12)
    assert cache.insert(text("abc"), table.pages, MODEL) == 1
    assert [cache.allocator.references(page) for page in table.pages] == [1, 1, 2]
    assert cache.insert(text("abc"), table.pages, MODEL) == 0
    assert cache.look(text("abc")) == [*first, table.pages[2]]
    freed = Pages(cache.allocator, PAGE).release(table)
    assert len(freed) == 2
    assert cache.cached == 3


def test_a_running_request_publishes_as_it_grows(cache: Cache) -> None:
    """Its pages serve others while it runs, and its own end takes nothing from them."""
    pages = cache.allocator.allocate(5)
    grown = [cache.insert(text("abcde")[:end], pages, MODEL) for end in (3, 4, 11, 12, 20)]
    assert grown == [0, 1, 1, 1, 2]
    guest = cache.match(text("abcx"), MODEL)
    assert guest == pages[:3]
    cache.allocator.release(pages[::-1])
    assert [cache.allocator.references(page) for page in pages] == [2, 2, 2, 1, 1]


def test_a_text_that_only_grows_stays_one_edge(cache: Cache) -> None:
    pages = cache.allocator.allocate(5)
    for end in range(4, 21, 4):
        cache.insert(text("abcde")[:end], pages, MODEL)
    assert len(cache._order) == 1


def test_insert_refuses_what_cannot_be(cache: Cache) -> None:
    (page,) = cache.keep(text("a", tail=0))
    other, spare = cache.allocator.allocate(2)
    with pytest.raises(ValueError, match="2 pages of tokens to keep, 1 pages given"):
        cache.insert(text("bc"), [other], MODEL)
    with pytest.raises(ValueError, match="two places"):
        cache.insert(text("b"), [page], MODEL)
    with pytest.raises(ValueError, match="two places"):
        cache.insert(text("bc"), [other, other], MODEL)
    cache.allocator.release([spare])
    with pytest.raises(ValueError, match="is free"):
        cache.insert(text("bc"), [other, spare], MODEL)
    assert (cache.cached, cache.look(text("b")), cache.allocator.references(other)) == (1, [], 1)


def test_namespaces_never_meet(cache: Cache) -> None:
    """New weights, another adapter, or names that only read alike (vllm 42125, 44701)."""
    names = [("m1", ""), ("m2", ""), ("m1", "salt"), ("ab", "c"), ("a", "bc"), "ab", None]
    kept = {name: cache.keep(text("ab"), name)[:2] for name in names}
    for name in names:
        assert cache.look(text("ab"), name) == kept[name]
    assert cache.look(text("ab"), "m1") == []


@pytest.mark.parametrize("change", range(3 * PAGE))
def test_one_other_token_anywhere_is_no_hit(cache: Cache, change: int) -> None:
    """Keys are the tokens, however large or small: -1 and -2 share a hash in Python (vllm-mlx 444)."""
    tokens = [-1] * (3 * PAGE) + [7]
    pages = cache.keep(tokens)
    other = [*tokens[:change], -2, *tokens[change + 1 :]]
    assert hash(-1) == hash(-2)
    assert cache.look(other) == pages[: change // PAGE]


def test_the_least_recently_used_goes_first(cache: Cache) -> None:
    for name in "abc":
        cache.keep(text(name * 2))
    cache.look(text("aa"))
    assert cache.evict(2) == 2
    assert [len(cache.look(text(name * 2))) for name in "abc"] == [2, 0, 2]


def test_eviction_takes_the_tail_first_and_only_what_is_wanted(cache: Cache) -> None:
    pages = cache.keep(text("abcde"))
    assert cache.evict(2) == 2
    assert cache.look(text("abcde")) == pages[:3]
    assert cache.allocator.free == 32 - 3


def test_eviction_goes_on_to_the_parent_and_keeps_a_prefix(cache: Cache) -> None:
    first = cache.keep(text("abcd"))
    cache.keep(text("abxy"))
    assert cache.evictable == 6
    assert cache.evict(5) == 5
    assert cache.look(text("abcd")) == cache.look(text("abxy")) == first[:1]
    assert cache.evict(5) == 1
    assert (cache.cached, cache.allocator.free) == (0, 32)


def test_a_held_page_keeps_everything_before_it(cache: Cache) -> None:
    """Also where its holder has its own copies of what comes before."""
    cache.keep(text("ab"))
    pages = cache.allocator.allocate(3)
    cache.insert(text("abc"), pages, MODEL)
    cache.keep(text("abcd"))
    assert (cache.cached, cache.evictable) == (4, 1)
    assert cache.evict(9) == 1
    assert len(cache.look(text("abcd"))) == 3
    cache.allocator.release(pages)
    assert cache.evict(9) == 3


def test_a_pin_lasts_until_its_time(cache: Cache) -> None:
    cache.keep(text("abcd"))
    assert cache.pin(text("ab"), MODEL, until=10.0) == 2 * PAGE
    cache.keep(text("xy"))
    assert (cache.evictable, cache.evict(9)) == (4, 4)
    cache.expire(9.9)
    assert (cache.evictable, cache.evict(9)) == (0, 0)
    assert len(cache.look(text("abcd"))) == 2
    cache.expire(10.0)
    assert (cache.evictable, cache.evict(9)) == (2, 2)


def test_a_pin_holds_what_is_cached_of_its_tokens(cache: Cache) -> None:
    assert cache.pin(text("abc"), MODEL, math.inf) == 0
    cache.keep(text("ab"))
    assert cache.pin(text("abc"), MODEL, math.inf) == 2 * PAGE
    cache.keep(text("abc"))
    assert cache.evict(9) == 1


def test_a_pin_outlives_a_split_and_can_only_be_prolonged(cache: Cache) -> None:
    cache.keep(text("abcd"))
    cache.pin(text("abcd"), MODEL, until=10.0)
    cache.pin(text("abcd"), MODEL, until=5.0)
    cache.keep(text("abxy"))
    cache.expire(7.0)
    assert cache.evict(9) == 2
    assert len(cache.look(text("abcd"))) == 4


def test_unpin_lifts_the_longest_pin_on_the_way(cache: Cache) -> None:
    cache.keep(text("abcd"))
    cache.pin(text("ab"), MODEL, math.inf)
    cache.pin(text("abcd"), MODEL, math.inf)
    assert cache.evictable == 0
    cache.unpin(text("zz"), MODEL)
    assert cache.evictable == 0
    cache.unpin(text("abcde"), MODEL)
    assert cache.evict(9) == 2
    cache.unpin(text("abcde"), MODEL)
    assert cache.evict(9) == 2


def test_unpin_of_the_inner_pin_leaves_the_longer_one(cache: Cache) -> None:
    cache.keep(text("abcd"))
    cache.pin(text("ab"), MODEL, math.inf)
    cache.pin(text("abcd"), MODEL, math.inf)
    cache.unpin(text("abc"), MODEL)
    assert cache.evictable == 0
    cache.unpin(text("abcd"), MODEL)
    assert cache.evictable == 4


def test_unpin_says_how_many_tokens_are_let_go(cache: Cache) -> None:
    cache.keep(text("abcd"))
    cache.pin(text("ab"), MODEL, math.inf)
    cache.pin(text("abcd"), MODEL, math.inf)
    assert cache.unpin(text("abx"), MODEL) == 2 * PAGE
    assert cache.unpin(text("abx"), MODEL) == 0
    assert cache.unpin(text("abcde"), MODEL) == 4 * PAGE


def test_a_pin_takes_only_the_room_there_is(cache: Cache) -> None:
    """Pages that another pin keeps need none."""
    cache.keep(text("abcdef"))
    cache.keep(text("abxyz"))
    assert cache.pin(text("abc"), MODEL, until=5.0) == 3 * PAGE
    assert (cache.pinned, cache.unpinned(text("abxyz"), MODEL), cache.unpinned(text("abcdefg"), MODEL)) == (3, 3, 4)
    assert cache.pin(text("abxyz"), MODEL, until=9.0, room=2) == 4 * PAGE
    assert cache.pinned == 5
    assert cache.pin(text("abcdef"), MODEL, until=9.0, room=0) == 3 * PAGE
    assert cache.evict(32) == 4
    cache.expire(5.0)  # the second one on the same way holds on
    assert (cache.pinned, cache.evict(32)) == (5, 0)
    cache.expire(9.0)
    assert (cache.pinned, cache.evict(32), cache.allocator.free) == (0, 5, 32)


def test_a_text_that_grows_past_a_pin_is_not_pinned(cache: Cache) -> None:
    pages = cache.allocator.allocate(4)
    cache.insert(text("ab", tail=0), pages, MODEL)
    cache.pin(text("ab"), MODEL, math.inf)
    cache.insert(text("abcd"), pages, MODEL)
    cache.allocator.release(pages)
    assert (cache.pinned, cache.evict(32)) == (2, 2)


def test_clear_forgets_pins(cache: Cache) -> None:
    cache.keep(text("ab"))
    cache.pin(text("ab"), MODEL, math.inf)
    cache.clear()
    assert (cache.pinned, cache.allocator.free) == (0, 32)
    cache.keep(text("ab"))
    assert cache.evict(2) == 2


def test_clear_forgets_a_namespace_and_leaves_its_readers_alone(cache: Cache) -> None:
    cache.keep(text("ab"))
    cache.keep(text("ax"))
    other = cache.keep(text("ab"), "other")
    cache.pin(text("ab"), MODEL, math.inf)
    held = cache.match(text("ab"), MODEL)
    cache.clear(MODEL)
    assert cache.cached == 2
    assert cache.look(text("ab")) == []
    assert cache.look(text("ab"), "other") == other[:2]
    assert [cache.allocator.references(page) for page in held] == [1, 1]
    cache.clear()
    cache.allocator.release(held)
    assert (cache.cached, cache.allocator.free) == (0, 32)


def test_eviction_does_not_walk_the_whole_tree_for_each_page(cache: Cache) -> None:
    """It asks who holds them of as many pages as it frees, and of one more each time."""
    for token in range(30):
        cache.keep([token] * PAGE)
    looks, references = [], cache.allocator.references
    cache.allocator.references = lambda page: looks.append(page) or references(page)
    assert [cache.evict(1) for _ in range(30)] == [1] * 30
    assert len(looks) <= 60


def test_pages_that_were_given_back_are_found_in_the_tree_or_the_text_ends_there(cache: Cache) -> None:
    pages = cache.allocator.allocate(4)
    cache.insert(text("abc"), pages[:3], MODEL)
    cache.allocator.release(pages[1:3])
    assert cache.insert(text("abcd"), [pages[0], None, None, pages[3]], MODEL) == 1
    assert cache.look(text("abcd")) == pages
    assert cache.evict(9) == 0  # for somebody holds the last one
    assert cache.forget(1) == 1
    assert cache.look(text("abcd")) == pages[:2]
    assert cache.insert(text("abcd"), [pages[0], None, None, pages[3]], MODEL) is None
    assert (cache.cached, cache.allocator.references(pages[3])) == (2, 1)
    cache.allocator.release([pages[0], pages[3]])
    assert (cache.evict(9), cache.allocator.free) == (2, 32)


def test_what_is_forgotten_is_no_more_than_need_be_and_never_pinned(cache: Cache) -> None:
    for ends in ("ab", "abcd", "abxy", "pq"):
        cache.keep(text(ends))
    held = [cache.match(text(ends), MODEL) for ends in ("abcd", "abxy", "pq")]
    for pages in held:
        cache.allocator.release(pages[:-1])
    cache.pin(text("pq"), MODEL, math.inf)
    assert (cache.evict(9), cache.forget(0), cache.cached) == (0, 0, 8)
    assert cache.forget(1) == 1
    assert [len(cache.look(text(ends))) for ends in ("abcd", "abxy", "pq")] == [2, 4, 2]
    assert cache.forget(9) == 3
    assert [len(cache.look(text(ends))) for ends in ("abcd", "abxy", "pq")] == [0, 0, 2]
    assert cache.cached == 2


@pytest.mark.parametrize("held", [False, True])
def test_what_makes_room_is_told_while_it_is_whole(cache: Cache, held: bool) -> None:
    abcd = cache.keep(text("abcd"))[:4]
    xy = cache.keep(text("abxy"))[2:4]
    told: list[Leaving] = []

    def keep(leaving: list[Leaving]) -> None:
        assert all(cache.allocator.references(page) for one in leaving for page in one.pages)
        told.extend(one._replace(pages=list(one.pages)) for one in leaving)

    cache._keep = keep
    if held:
        for ends in ("abcd", "abxy"):
            cache.allocator.release(cache.match(text(ends), MODEL)[:2])
    assert (cache.forget if held else cache.evict)(6) == (2 if held else 6)
    keys = {ends: tuple(page_keys(text(ends), PAGE * len(ends), MODEL, PAGE)) for ends in ("ab", "abcd", "abxy")}
    assert {one.pages[0]: tuple(one.keys) for one in told} == {
        abcd[0]: keys["ab"],
        abcd[2]: keys["abcd"],
        xy[0]: keys["abxy"],
    }
    assert sorted(page for one in told for page in one.pages) == sorted([*abcd, *xy])
