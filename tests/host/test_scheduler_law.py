"""Law 5 with a scheduler at the books: whatever happens, everyone finds their own text in their pages."""

import math
import random

import pytest

from jaxspec.host.blocks import Kept
from tests.oracles.scheduling import LEVEL, Device, add, books, empty, make


@pytest.mark.parametrize("kept", [None, Kept(0, 3), Kept(4, 9), 7])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_any_work_gets_done_and_everyone_sees_their_own_text(page: int, cache: bool, kept: Kept | int | None):
    for seed in range(6):
        rng = random.Random(1000 * page + seed)
        options = {"publish_output": not isinstance(kept, int)} | books(rng, page, kept)
        scheduler = make(page=page, max_batch=5, max_context=50, prefix_cache=cache, **options)
        device, added, aborted = Device(scheduler, rng), 0, set()
        steps = pinned = 0
        while added < 25 or scheduler.waiting or scheduler.rows:
            if added < 25 and rng.random() < 0.5:
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
                if device.done and rng.random() < 0.5:
                    prompt = (rng.choice(device.done).tokens + prompt)[:30]  # goes on from an earlier text
                place = added + LEVEL * rng.choice([0, 0, 0, 1])
                ttl = rng.choice([None, None, 10.0, math.inf])
                add(scheduler, f"{added}", prompt, rng.randint(1, 20), place=place, n=rng.choice([1, 1, 3]), ttl=ttl)
                added += 1
            if rng.random() < 0.03:
                name = f"{rng.randrange(added + 1)}"
                aborted.add(name)
                scheduler.abort(name)
                device.done = [r for r in device.done if r.sample.request_id != name]
            scheduler.pins.tick(float(steps))
            device.step(
                rng.choice([1, page, 3 * page + 5]),
                rng.choice([1, 4, 16]),
                rng.choice([3, 5]) if not scheduler.rows else 5,
            )
            if cache:
                pinned = max(pinned, scheduler.cache.pinned)
                assert scheduler.cache.pinned <= scheduler.pins.most
            steps += 1
            assert steps < 5000, "nothing moves"
        finished = [(r.sample.request_id, r.sample.index) for r in device.done]
        assert len(finished) == len(set(finished))
        assert {name for name, _ in finished} >= {f"{i}" for i in range(25)} - aborted
        assert device.stays or not isinstance(kept, int)
        assert pinned > 0 or not cache or scheduler.pins.most == 0
        scheduler.pins.tick(math.inf)
        empty(scheduler)
