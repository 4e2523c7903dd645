"""Who runs, on the host's books alone."""

import random

import pytest

from jaxspec.host.blocks import Budget, Copy
from jaxspec.host.running import Chunk
from tests.oracles.scheduling import LEVEL, add, admit, check, emit, empty, make, names, prefill, start


def test_rows_go_to_the_first_in_line():
    scheduler = make(max_batch=2)
    for arrival, name in enumerate("abcd"):
        add(scheduler, name, 3, place=arrival)
    assert scheduler.wanted_rows == 2
    assert names(admit(scheduler, 2)) == ["a", "b"]
    assert [r.row for r in scheduler.rows.values()] == [0, 1]
    assert admit(scheduler, 2) == []
    scheduler.finish(scheduler.rows[0])
    [third] = admit(scheduler, 2)
    assert (third.sample.request_id, third.row) == ("c", 0)
    assert names(scheduler.waiting) == ["d"]
    check(scheduler)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_request_is_overtaken_by_at_most_64_later_ones_a_level(levels: int):
    scheduler = make(max_batch=1)
    add(scheduler, "patient", 3, place=0 + LEVEL * levels)
    order = []
    for arrival in range(1, 200):
        add(scheduler, f"{arrival}", 3, place=arrival)
        [running] = admit(scheduler, 1)
        order += names([running])
        scheduler.finish(running)
    assert LEVEL * levels - 1 <= order.index("patient") <= LEVEL * levels
    assert order[:5] == ["1", "2", "3", "4", "5"]


def test_the_first_in_line_is_not_overtaken_by_one_that_fits():
    scheduler = make(pages=10, page=4)
    start(scheduler, "a", 20)
    add(scheduler, "large", 24, place=1)
    add(scheduler, "small", 2, place=2)
    assert admit(scheduler) == []
    assert names(scheduler.waiting) == ["large", "small"]
    check(scheduler)
    scheduler.finish(scheduler.rows[0])
    assert names(admit(scheduler)) == ["large", "small"]


def test_admission_counts_on_pages_that_are_found_and_evicts_the_rest():
    scheduler = make(pages=10, page=4)
    text = start(scheduler, "first", 33)
    scheduler.finish(text)
    assert (scheduler.cache.cached, scheduler.pages.free) == (8, 2)
    again = add(scheduler, "again", [*text.sample.prompt_ids[:16], 1, 2])[0]
    assert admit(scheduler) == [again]
    assert again.table.tokens == again.sample.cached_tokens == 16
    assert scheduler.counters.hit_tokens == 16
    check(scheduler)
    other = add(scheduler, "other", 15)[0]
    assert admit(scheduler) == [other]
    assert scheduler.cache.cached == 4  # nobody used the others: four pages, and one to spare for who runs already
    assert (len(other.table.pages), scheduler.pages.free) == (4, 1)
    check(scheduler)


def test_salts_do_not_meet():
    scheduler = make()
    first = start(scheduler, "a", 20, salt="x")
    for salt, hit in (("y", 0), ("", 0), ("x", 16)):
        running = add(scheduler, f"b{salt}", first.sample.prompt_ids, salt=salt)[0]
        admit(scheduler)
        assert running.sample.cached_tokens == hit


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("page", [1, 4])
def test_forks_wait_for_their_parent_and_start_from_its_pages(length: int, page: int):
    scheduler = make(pages=64, page=page, prefix_cache=False)
    samples = add(scheduler, "many", length, place=0, n=3)
    add(scheduler, "other", 6, place=1)
    expected = ["many", "other"] if length > 1 else ["many"] * 3 + ["other"]
    assert names(admit(scheduler)) == expected
    prefill(scheduler)
    emit(scheduler, samples[0], 1)  # the parent may be ahead by then
    copies = [a.copy for a in scheduler.admit(8)]
    check(scheduler)
    assert all(r.prefilled for r in samples)
    whole, rest = divmod(length - 1, page)
    for sample in samples[1:]:
        assert sample.table.pages[:whole] == samples[0].table.pages[:whole]
        assert sample.table.tokens == length - 1
    assert all(r.sample.cached_tokens == length - 1 for r in samples[1:])
    if rest:
        source = samples[0].table.pages[whole]
        assert copies == [Copy(source, sample.table.pages[whole], rest) for sample in samples[1:]]
    else:
        assert not any(copies)
    for running in [*samples, *scheduler.rows.values()]:
        scheduler.finish(running)
    empty(scheduler)


def test_forks_whose_parent_is_gone_start_like_any_other():
    scheduler = make(max_batch=2)
    samples = add(scheduler, "many", 9, n=2)
    admit(scheduler)
    prefill(scheduler)
    scheduler.finish(samples[0])
    assert admit(scheduler) == [samples[1]]
    assert (samples[1].table.tokens, samples[1].sample.cached_tokens) == (8, 8)  # the cache had it


def test_the_budget_goes_to_the_first_and_on_to_the_next():
    scheduler = make()
    first, second, third = (add(scheduler, name, size, place=i)[0] for i, (name, size) in enumerate(SIZES.items()))
    admit(scheduler)
    assert scheduler.next_chunks(12) == [Chunk(first, 0, first.tokens[:10]), Chunk(second, 0, second.tokens[:2])]
    assert list(scheduler.decoding.values()) == [first]
    assert scheduler.next_chunks(7) == [Chunk(second, 2, second.tokens[2:9])]
    got = scheduler.next_chunks(100)
    assert got == [Chunk(second, 9, second.tokens[9:20]), Chunk(third, 0, third.tokens[:5])]
    assert list(scheduler.decoding.values()) == [first, second, third]
    assert scheduler.next_chunks(100) == []
    assert scheduler.counters.computed_tokens == 10 + 20 + 5
    check(scheduler)


SIZES = {"a": 11, "b": 21, "c": 6}


def test_a_prompt_of_one_token_needs_no_prefill():
    scheduler = make()
    running = add(scheduler, "a", [5])[0]
    admit(scheduler)
    assert running.prefilled
    assert scheduler.next_chunks(10) == []


def test_reserving_gives_every_decoding_row_the_slots_of_its_rounds():
    scheduler = make(look_ahead=3, max_emitted=4)
    running = start(scheduler, "a", 6, 30)
    assert scheduler.reserve(5) == (5, [])
    assert len(running.table.pages) == scheduler.tables.count(5 + 4 * 4 + 1 + 3)
    assert scheduler.waste.look_ahead > 0
    scheduler.commit(running, [1, 2, 3])
    assert running.table.tokens == 8
    assert len(running.table.pages) == 2
    assert scheduler.waste == (0, 0)
    assert scheduler.reserve(1000) == (1000, [])
    assert len(running.table.pages) == scheduler.tables.count(6 + 30 + 3)  # and no more than it may ever use
    check(scheduler)


def test_short_of_pages_there_are_fewer_rounds_first():
    scheduler = make(pages=8, page=4)
    both = [start(scheduler, name, 9, 60, place=i) for i, name in enumerate("ab")]
    assert scheduler.reserve(16) == (4, [])
    assert [len(r.table.pages) for r in both] == [3, 3]
    check(scheduler)


def test_then_the_last_in_line_gives_way_and_comes_back_where_it_was():
    scheduler = make(pages=8, page=4, max_emitted=4)
    first = start(scheduler, "first", 9, 60, place=0)
    last = start(scheduler, "last", 9, 60, place=1)
    for _ in range(3):  # both get to 21 tokens: 20 slots are 5 pages, and there are 8
        rounds, gone = scheduler.reserve(1)
        if gone:
            break
        for running in (first, last):
            scheduler.commit(running, [1, 2, 3, 4])
            scheduler.publish(running)
    assert (rounds, gone) == (1, [(1, last)])
    assert scheduler.counters.preemptions == 1
    last.saved = "what the device knew"
    check(scheduler)
    assert len(first.table.pages) == scheduler.tables.count(len(first.tokens))
    assert admit(scheduler) == []  # it has no pages yet
    assert last.saved is not None
    written = last.table.tokens
    assert written == 0
    text = list(last.tokens)
    scheduler.finish(first)
    assert admit(scheduler) == [last]
    assert (last.saved, last.tokens) == ("what the device knew", text)
    assert last.table.tokens > 0  # some of its own pages were still there
    assert last.table.tokens % 4 == 0
    assert last.sample.cached_tokens == 0  # of its prompt, when it first came
    prefill(scheduler)
    assert last.prefilled
    check(scheduler)


def test_a_prompt_in_the_middle_of_its_chunks_may_give_way():
    scheduler = make(pages=10, page=4, look_ahead=7, max_emitted=8, prefix_cache=False)
    first = start(scheduler, "first", 5, 27, place=0)
    last = add(scheduler, "last", 16, place=1)[0]
    admit(scheduler)
    scheduler.next_chunks(6)
    assert (last.prefilled, last.table.tokens) == (False, 6)
    emit(scheduler, first, 8)
    assert scheduler.reserve(1) == (1, [(1, last)])
    assert scheduler.waiting == [last]
    check(scheduler)
    scheduler.finish(first)
    admit(scheduler)
    assert scheduler.next_chunks(100) == [Chunk(last, 0, last.tokens[:15])]


@pytest.mark.parametrize("page", [1, 4])
def test_running_texts_are_found_while_they_run(page: int):
    scheduler = make(page=page)
    running = start(scheduler, "a", 7)
    emit(scheduler, running, 3, rounds=3)
    whole = 9 // page * page
    # The last token has no key and value yet, so it is not there even where it would fill a page.
    later = add(scheduler, "b", [*running.tokens, 1, 2, 3])[0]
    admit(scheduler)
    assert later.table.tokens == whole
    assert later.table.pages[: whole // page] == running.table.pages[: whole // page]
    check(scheduler)


@pytest.mark.parametrize("end", ["abort", "finish"])
@pytest.mark.parametrize(
    "when", ["waiting", "admitted", "prefilling", "decoding", "reserved", "preempted", "readmitted"]
)
def test_an_end_at_any_time_gives_everything_back(when: str, end: str):
    scheduler = make(look_ahead=2, max_emitted=3)
    keep = start(scheduler, "keep", 9, 20)
    scheduler.tables.trim(keep.table)
    free = scheduler.pages.free + scheduler.cache.evictable
    running = add(scheduler, "a", 14, 20, place=1)[0]
    if when != "waiting":
        admit(scheduler)
    if when == "prefilling":
        scheduler.next_chunks(5)
    elif when not in ("waiting", "admitted"):
        prefill(scheduler)
    if when == "reserved":
        scheduler.reserve(4)
    if when in ("preempted", "readmitted"):
        assert scheduler.preempt() == (1, running)
    if when == "readmitted":
        assert admit(scheduler) == [running]
    check(scheduler)
    _ = scheduler.abort("a") if end == "abort" else scheduler.finish(running)
    check(scheduler)
    assert (running.row, running.table.pages) == (None, [])
    assert scheduler.waiting == []
    assert list(scheduler.rows.values()) == [keep]
    scheduler.finish(running)  # once more is no harm: the text may have ended meanwhile
    scheduler.tables.trim(keep.table)
    assert scheduler.pages.free + scheduler.cache.evictable == free
    scheduler.finish(keep)
    empty(scheduler)


def test_abort_drops_every_sample_and_no_other():
    scheduler = make(max_batch=2)
    add(scheduler, "a", 5, n=3)
    add(scheduler, "b", 5, place=1)
    admit(scheduler, 2)
    scheduler.abort("a")
    assert names(scheduler.waiting) + names(scheduler.rows.values()) == ["b"]
    check(scheduler)


def test_rows_close_up():
    scheduler = make()
    runnings = [start(scheduler, name, 5, place=i) for i, name in enumerate("abcd")]
    scheduler.finish(runnings[0])
    scheduler.finish(runnings[2])
    assert scheduler.renumber() == [1, 3]
    assert (runnings[1].row, runnings[3].row) == (0, 1)
    check(scheduler)


def test_pages_needed_are_those_it_may_come_to_use():
    scheduler = make(page=4, look_ahead=3, max_emitted=4)
    running = start(scheduler, "a", 10, 7)
    most = 0
    while len(running.tokens) < 17:
        scheduler.reserve(1)
        most = max(most, len(running.table.pages))
        scheduler.commit(running, [1])
    assert most <= scheduler.pages_needed(running.sample) == 5


@pytest.mark.parametrize("page", [1, 3, 16])
def test_waste_is_less_than_a_page_a_sequence(page: int):
    rng = random.Random(page)
    scheduler = make(pages=32 * (640 // page + 2), page=page, look_ahead=7, max_emitted=8, max_batch=32)
    runnings = [start(scheduler, f"{i}", rng.randrange(300, 501), 100, place=i) for i in range(20)]
    for _ in range(12):
        scheduler.reserve(2)
        for running in runnings:
            scheduler.commit(running, [7] * rng.randrange(1, 9))
        tokens = sum(r.table.tokens for r in runnings)
        assert tokens / len(runnings) >= 390
        reserved = sum(len(r.table.pages) for r in runnings) * page
        assert scheduler.waste == (reserved - tokens, 0)
        assert all(len(r.table.pages) * page - r.table.tokens < page for r in runnings)
        assert reserved - tokens <= (page - 1) * len(runnings)
        assert reserved - tokens < 0.04 * reserved


def test_of_those_who_begin_alike_one_computes():
    """They are admitted together, before any of it is written."""
    scheduler = make(pages=64, page=4)
    document = [random.Random(i).randrange(10_007) for i in range(40)]
    readers = [add(scheduler, f"{i}", [*document, i, 0, 1], place=i)[0] for i in range(3)]
    assert admit(scheduler) == readers
    taken = scheduler.pages.num_pages - scheduler.pages.free
    prefill(scheduler)
    assert all(reader.prefilled for reader in readers)
    # The first reader's 42 tokens; of the others what comes after the document, and of the second the 6 tokens that
    # were left of the budget when the first was done.
    assert scheduler.counters.computed_tokens == 42 + 2 * 2 + 6
    assert [reader.sample.cached_tokens for reader in readers] == [0, 34, 40]
    assert scheduler.counters.hit_tokens == 74
    shared = {page for reader in readers for page in reader.table.pages[:10]}
    assert len(shared) == 10
    assert scheduler.pages.free == scheduler.pages.num_pages - taken + 20
    check(scheduler)


BUDGET = Budget(tokens=10, limit=14, pages=5, votes=6)
"""With pages of 4 slots and drafts of 3."""


def scored(**options):
    return make(look_ahead=3, max_emitted=4, publish_output=False, budget=BUDGET, **options)


def test_pages_of_a_text_that_is_condensed_are_taken_at_once():
    scheduler = scored(pages=40)
    short, long = (start(scheduler, name, size, most) for name, size, most in (("a", 9, 6), ("b", 26, 3)))
    assert [scheduler.pages_needed(r.sample) for r in (short, long)] == [5, 6 + 5]  # a never comes to its limit
    assert [len(r.table.pages) for r in (short, long)] == [5, 11]
    for running in (short, long):
        scheduler.commit(running, [1])
    assert scheduler.reserve(16) == (16, [])
    assert [len(r.table.pages) for r in (short, long)] == [5, 11]
    check(scheduler)


def test_the_last_tokens_before_the_root_are_computed_and_vote_whatever_is_found():
    scheduler = scored()
    first = add(scheduler, "a", 26)[0]
    admit(scheduler)
    chunks = [scheduler.next_chunks(12) for _ in range(3)]
    starts = (0, 12, False), (12, 7, False), (19, 6, True)
    assert chunks == [[Chunk(first, at, first.tokens[at : at + n], votes)] for at, n, votes in starts]
    scheduler.publish(first)
    again, twin = add(scheduler, "b", first.sample.prompt_ids, place=1, n=2)
    assert admit(scheduler) == [again]
    assert again.table.tokens == again.sample.cached_tokens == 16  # of 25 tokens 19 need not vote: four whole pages
    assert scheduler.next_chunks(99) == [Chunk(again, 16, again.tokens[16:19])]
    assert scheduler.next_chunks(4) == [Chunk(again, 19, again.tokens[19:23], True)]
    assert scheduler.next_chunks(99) == [Chunk(again, 23, again.tokens[23:25], True)]
    assert admit(scheduler) == [twin]  # no fork: it votes for itself
    assert twin.table.tokens == 16
    assert not set(twin.table.pages[4:]) & set(again.table.pages)


def test_what_is_condensed_leaves_pages_to_others_and_the_prefix_cache():
    scheduler = scored()
    running = start(scheduler, "a", 26, 90)
    pages, free = list(running.table.pages), scheduler.pages.free
    assert scheduler.cache.cached == 6
    for row, source, target in scheduler.condense():
        assert (row, source, target) == (0, pages[:7], pages[-5:])
        assert running.table.pages == pages  # until the device has been told
    assert (running.table.pages, running.table.slots) == (pages[-5:], 10)
    assert scheduler.cache.evictable == 6
    assert list(scheduler.condense()) == []
    for emitted, condensed in ((3, False), (4, True), (3, False), (1, True)):
        scheduler.commit(running, [1] * emitted)
        scheduler.publish(running)
        assert [target for _, _, target in scheduler.condense()] == [pages[-5:]] * condensed
        assert (running.table.pages, scheduler.pages.free) == (pages[-5:], free)
    check(scheduler)
    scheduler.finish(running)
    empty(scheduler)
