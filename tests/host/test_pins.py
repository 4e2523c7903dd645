"""Prompts that ask to stay in the cache: how long they do, how much of them, and what pins leave to others."""

import math

import pytest

from jaxspec.errors import RequestError
from jaxspec.host.running import Running
from jaxspec.host.scheduler import Scheduler
from tests.oracles.scheduling import add, admit, check, emit, empty, make, prefill, start

PAGE, CONTEXT, LARGEST = 4, 40, 10
"""The largest request writes CONTEXT - 1 slots."""


def roomy(most: int, **options) -> Scheduler:
    """A pool of which so many pages may be pinned."""
    return make(pages=LARGEST + most, page=PAGE, max_context=CONTEXT, **options)


def crowd(scheduler: Scheduler) -> None:
    """Others come and go until every page that could be had was theirs."""
    for number in range(scheduler.pages.num_pages // 7 + 1):
        scheduler.finish(start(scheduler, f"crowd {number} at {scheduler.pins.now}", 31))


def found(scheduler: Scheduler, running: Running) -> int:
    """Tokens that a text which begins with its prompt would find."""
    pages = scheduler.cache.match([*running.sample.prompt_ids, -1], running.sample.namespace)
    scheduler.pages.release(pages)
    return len(pages) * PAGE


def test_a_prompt_stays_until_its_time_is_over():
    scheduler = roomy(14)
    scheduler.pins.tick(100.0)
    asked, other = start(scheduler, "asked", 22, ttl=60.0), start(scheduler, "other", 22)
    assert (asked.sample.pinned_tokens, other.sample.pinned_tokens) == (20, 0)
    for running in (asked, other):
        scheduler.finish(running)
    for now, kept in ((100.0, 20), (159.9, 20), (160.0, 0)):
        scheduler.pins.tick(now)
        crowd(scheduler)
        assert (found(scheduler, asked), found(scheduler, other)) == (kept, 0)
        check(scheduler)
    empty(scheduler)


@pytest.mark.parametrize("publish_output", [True, False])
@pytest.mark.parametrize("length", [3, 4, 27, 28, 29])
def test_whole_pages_of_the_prompt_and_no_other_are_kept_under_one_pin(length: int, publish_output: bool):
    """Prefill comes in two chunks, and leaves the last token to the first round."""
    scheduler = roomy(14, publish_output=publish_output)
    running = start(scheduler, "a", length, ttl=5.0)
    emit(scheduler, running, 6, rounds=6)
    kept = (length - (not publish_output)) // PAGE * PAGE
    assert running.sample.pinned_tokens == kept
    scheduler.finish(running)
    assert scheduler.cache.pinned * PAGE == kept
    assert scheduler.pins.lift(running.sample.prompt_ids, "") == kept
    assert scheduler.cache.pinned == 0
    empty(scheduler)


def test_a_prompt_that_is_found_is_kept_as_well_and_a_second_time_prolongs_the_first():
    scheduler = roomy(14)
    first = start(scheduler, "first", 22)
    scheduler.finish(first)
    for now in (0.0, 8.0):
        scheduler.pins.tick(now)
        again = start(scheduler, f"at {now}", [*first.sample.prompt_ids], ttl=10.0)
        assert (again.sample.cached_tokens, again.sample.pinned_tokens) == (20, 20)
        scheduler.finish(again)
    scheduler.pins.tick(17.9)
    assert scheduler.cache.pinned == 5
    scheduler.pins.tick(18.0)
    assert scheduler.cache.pinned == 0


def test_a_request_that_would_leave_too_little_for_the_largest_is_refused():
    scheduler = roomy(10)
    first = start(scheduler, "a", 26, ttl=math.inf)
    scheduler.finish(first)
    assert scheduler.pins.room == 4
    long = add(scheduler, "long", 30, ttl=1.0)[0].sample
    with pytest.raises(RequestError, match=r"would pin 7 more pages of 4 tokens, and 4 more may be \(10 in all"):
        scheduler.pins.check(long, 0.0)
    scheduler.pins.check(add(scheduler, "without", 30)[0].sample, 0.0)
    scheduler.pins.check(add(scheduler, "alike", [*first.tokens[:24], *range(16)], ttl=1.0)[0].sample, 0.0)
    scheduler.pins.lift(first.tokens, "other salt")
    assert scheduler.pins.room == 4
    assert scheduler.pins.lift(first.tokens, "") == 24
    scheduler.pins.check(long, 0.0)


def test_a_check_knows_what_time_it_is():
    scheduler = roomy(6)
    scheduler.finish(start(scheduler, "a", 26, ttl=9.0))
    late = add(scheduler, "b", 26, ttl=9.0)[0].sample
    with pytest.raises(RequestError, match="and 0 more"):
        scheduler.pins.check(late, 8.9)
    scheduler.pins.check(late, 9.0)


def test_those_who_pass_together_share_the_room_that_there_is():
    scheduler = roomy(10)
    both = [add(scheduler, name, 26, place=place, ttl=9.0)[0] for place, name in enumerate("ab")]
    for running in both:
        scheduler.pins.check(running.sample, 0.0)
    admit(scheduler)
    prefill(scheduler)
    assert [running.sample.pinned_tokens for running in both] == [24, 16]
    assert (scheduler.cache.pinned, scheduler.pins.room) == (10, 0)
    check(scheduler)


@pytest.mark.parametrize("options", [{}, {"look_ahead": 7, "max_emitted": 8}])
def test_the_largest_request_gets_on_beside_all_that_can_be_pinned(options):
    look_ahead = options.get("look_ahead", 0)
    scheduler = make(pages=LARGEST + 2 + 4, page=PAGE, max_context=CONTEXT, **options)
    scheduler.finish(start(scheduler, "pinned", 35, 2, ttl=math.inf))
    assert scheduler.cache.pinned == scheduler.pins.most == (4 if look_ahead else 6)
    large = add(scheduler, "large", 8, CONTEXT - 8)[0]
    assert scheduler.pages_needed(large.sample) == scheduler.pages.num_pages - scheduler.pins.most
    assert admit(scheduler) == [large]
    prefill(scheduler)
    while len(large.tokens) < CONTEXT:
        assert scheduler.reserve(4)[1] == []
        scheduler.commit(large, [7] * min(options.get("max_emitted", 1), CONTEXT - len(large.tokens)))
    check(scheduler)


def test_samples_of_one_prompt_set_one_pin():
    scheduler = roomy(14)
    samples = add(scheduler, "many", 22, n=3, ttl=5.0)
    for _ in range(2):
        admit(scheduler)
        prefill(scheduler)
    for running in samples:
        emit(scheduler, running, 2, rounds=2)
        scheduler.finish(running)
    assert scheduler.pins.lift(samples[0].sample.prompt_ids, "") == 20
    assert scheduler.cache.pinned == 0


@pytest.mark.parametrize("options", [{"prefix_cache": False, "max_context": CONTEXT}, {}])
def test_without_a_cache_or_room_nothing_is_pinned(options):
    scheduler = make(**options)
    running = start(scheduler, "a", 22, ttl=5.0)
    with pytest.raises(RequestError, match="and 0 more" if not options else "prefix cache, which is off"):
        scheduler.pins.check(running.sample, 0.0)
    assert running.sample.pinned_tokens == 0
    assert scheduler.pins.lift(running.sample.prompt_ids, "") == 0
