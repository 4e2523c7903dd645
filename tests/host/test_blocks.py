"""Pages, references and page tables: what each operation does, and what it refuses."""

import time

import pytest

from jaxspec.errors import CapacityError
from jaxspec.host.blocks import Budget, Copy, Kept, PageAllocator, Pages, PageTable, Waste


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(8)


@pytest.fixture
def pages(allocator: PageAllocator) -> Pages:
    return Pages(allocator, 4)


def test_allocate_gives_different_pages_with_one_reference(allocator: PageAllocator) -> None:
    taken = allocator.allocate(5)
    assert len(set(taken)) == 5
    assert set(taken) <= set(range(8))
    assert [allocator.references(page) for page in taken] == [1] * 5
    assert (allocator.free, allocator.num_pages) == (3, 8)


def test_allocate_more_than_there_is_says_the_numbers(allocator: PageAllocator) -> None:
    allocator.allocate(6)
    with pytest.raises(CapacityError, match="3 pages wanted, 2 of 8 free"):
        allocator.allocate(3)
    assert allocator.free == 2


def test_a_page_is_free_when_the_last_reference_goes(allocator: PageAllocator) -> None:
    first, second = allocator.allocate(2)
    allocator.share([first])
    assert allocator.release([first, second]) == [second]
    assert (allocator.references(first), allocator.references(second)) == (1, 0)
    assert allocator.release([first]) == [first]
    assert allocator.free == 8


def test_several_references_can_go_at_once(allocator: PageAllocator) -> None:
    (page,) = allocator.allocate(1)
    allocator.share([page, page])
    assert allocator.release([page, page, page]) == [page]
    assert sorted(allocator.allocate(8)) == list(range(8))


@pytest.mark.parametrize("wrong", [[0, 5], [0, 0, 1], [1, 0, 1], [0, -1], [8]])
def test_release_once_too_often_changes_nothing(allocator: PageAllocator, wrong: list[int]) -> None:
    assert sorted(allocator.allocate(2)) == [0, 1]
    with pytest.raises(ValueError, match="once too often"):
        allocator.release(wrong)
    assert [allocator.references(page) for page in range(8)] == [1, 1] + [0] * 6
    assert allocator.free == 6


@pytest.mark.parametrize("wrong", [[0, 5], [-1], [8]])
def test_a_free_page_cannot_be_shared(allocator: PageAllocator, wrong: list[int]) -> None:
    allocator.allocate(1)
    with pytest.raises(ValueError, match="is free"):
        allocator.share(wrong)
    assert allocator.references(0) == 1


def test_a_page_costs_the_same_in_a_large_pool() -> None:
    def seconds(num_pages: int) -> float:
        allocator = PageAllocator(num_pages)
        held = allocator.allocate(num_pages // 2)
        started = time.perf_counter()
        for page in held[:1000]:
            allocator.share([page])
            allocator.release([page, page])
            allocator.allocate(1)
        return time.perf_counter() - started

    assert min(seconds(200_000) for _ in range(3)) < 20 * min(seconds(2_000) for _ in range(3))


def test_reserve_adds_only_the_missing_pages(pages: Pages) -> None:
    table = PageTable()
    assert len(pages.reserve(table, 5)) == 2
    assert pages.reserve(table, 8) == []
    assert pages.reserve(table, 3) == []
    added = pages.reserve(table, 9)
    assert table.pages[2:] == added
    assert (len(table.pages), table.tokens) == (3, 0)


def test_reserve_beyond_the_pool_changes_nothing(pages: Pages) -> None:
    table = PageTable()
    pages.reserve(table, 20)
    before = list(table.pages)
    with pytest.raises(CapacityError, match="4 pages wanted, 3 of 8 free"):
        pages.reserve(table, 33)
    assert (table.pages, pages.allocator.free) == (before, 3)


def test_commit_needs_pages_and_rollback_is_a_length_change(pages: Pages) -> None:
    table = PageTable()
    pages.reserve(table, 7)
    pages.commit(table, 8)
    pages.commit(table, 3)
    assert (table.tokens, len(table.pages)) == (3, 2)
    for wrong in (9, -1):
        with pytest.raises(ValueError, match="2 pages of 4 reserved"):
            pages.commit(table, wrong)
    assert table.tokens == 3


def test_rollback_into_a_shared_page_is_refused(pages: Pages) -> None:
    table = PageTable()
    pages.reserve(table, 10)
    pages.commit(table, 10)
    pages.allocator.share(table.pages[:1])
    pages.commit(table, 4)
    with pytest.raises(ValueError, match="rollback from 4 to 3 slots goes into a shared page"):
        pages.commit(table, 3)
    assert table.tokens == 4


def test_trim_returns_the_surplus_of_the_look_ahead(pages: Pages) -> None:
    """Pages that rejected drafts took come back (sglang 31616)."""
    table = PageTable()
    pages.reserve(table, 6 + 16)
    pages.commit(table, 6)
    surplus = table.pages[2:]
    assert sorted(pages.trim(table)) == sorted(surplus)
    assert pages.trim(table) == []
    assert (len(table.pages), pages.allocator.free) == (2, 6)


def test_waste_is_exact(pages: Pages) -> None:
    table = PageTable()
    assert pages.waste(table) == Waste(0, 0)
    pages.reserve(table, 18)
    assert pages.waste(table) == Waste(0, 20)
    pages.commit(table, 5)
    assert pages.waste(table) == Waste(partial=3, look_ahead=12)
    pages.trim(table)
    assert pages.waste(table) == Waste(3, 0)
    pages.commit(table, 8)
    assert pages.waste(table) == Waste(0, 0)


def test_fork_shares_whole_pages_and_copies_the_partial_one(pages: Pages) -> None:
    table = PageTable()
    pages.reserve(table, 20)
    pages.commit(table, 10)
    child, copy = pages.fork(table)
    assert child.pages[:2] == table.pages[:2]
    assert copy == Copy(source=table.pages[2], target=child.pages[2], slots=2)
    assert child.pages[2] not in table.pages
    assert (child.tokens, len(child.pages)) == (10, 3)
    assert [pages.allocator.references(page) for page in table.pages] == [2, 2, 1, 1, 1]


def test_fork_on_a_page_boundary_copies_nothing(pages: Pages) -> None:
    table = PageTable()
    pages.reserve(table, 8)
    pages.commit(table, 8)
    child, copy = pages.fork(table)
    assert copy is None
    assert child == table
    assert child.pages is not table.pages
    assert pages.allocator.free == 6


def test_fork_without_a_page_for_the_copy_changes_nothing(pages: Pages) -> None:
    table = PageTable()
    pages.reserve(table, 30)
    pages.commit(table, 30)
    with pytest.raises(CapacityError, match="1 pages wanted, 0 of 8 free"):
        pages.fork(table)
    assert [pages.allocator.references(page) for page in table.pages] == [1] * 8


def test_release_after_fork_frees_every_page_once(pages: Pages) -> None:
    """Neither order of release frees a shared page twice, and an emptied table frees nothing (vllm 1556)."""
    table = PageTable()
    pages.reserve(table, 10)
    pages.commit(table, 10)
    child, _ = pages.fork(table)
    shared, own = table.pages[:2], table.pages[2:]
    assert pages.release(table) == own
    assert pages.release(table) == []
    assert (table.pages, table.tokens) == ([], 0)
    last = child.pages[2]
    assert pages.release(child) == [last, shared[1], shared[0]]
    assert sorted(pages.allocator.allocate(8)) == list(range(8))


def test_what_need_not_stay_goes_back_from_the_middle(allocator: PageAllocator) -> None:
    pages = Pages(allocator, 4, Kept(first=3, last=6))
    table = PageTable()
    pages.reserve(table, 26)
    first, gone, others = table.pages[0], table.pages[1:4], table.pages[4:]
    pages.commit(table, 21)
    assert pages.drop(table) == gone[1::-1]  # of tokens 0 to 20 those from 15 on stay, and page 3 begins with 12
    assert (table.pages, table.dropped, table.slots) == ([first, gone[2], *others], 8, 13)
    assert pages.drop(table) == []
    pages.commit(table, 22)
    assert pages.drop(table) == gone[2:]
    assert pages.pages_of_text(table) == [first, None, None, None, *others]
    assert (pages.waste(table), pages.droppable(22)) == (Waste(2, 4), 12)
    assert pages.reserve(table, 28) == []
    pages.commit(table, 24)
    assert pages.trim(table) == others[-1:]
    fork, copy = pages.fork(table)
    assert (fork, copy) == (PageTable(table.pages, 24, 12), None)
    pages.release(fork)
    assert set(pages.release(table)) == {first, *others[:-1]}
    assert (table, allocator.free) == (PageTable(), 8)


def test_a_condensed_text_has_its_last_pages_and_as_many_slots_as_stay(allocator: PageAllocator) -> None:
    pages, budget, table = Pages(allocator, 4), Budget(tokens=5, limit=9, pages=3, votes=0), PageTable()
    pages.reserve(table, 28)
    gone, own = table.pages[:4], table.pages[4:]
    allocator.share(gone[:1])  # the prefix cache has it
    pages.commit(table, 18)
    assert pages.condense(table, budget) == gone[:0:-1]
    assert (table, table.slots) == (PageTable(own, 18, 13), 5)
    pages.commit(table, 22)
    assert (pages.condense(table, budget), table) == ([], PageTable(own, 22, 17))
    assert allocator.references(gone[0]) == 1
