"""Pages that leave the device: what comes back is theirs, whole and unchanged; what is lost is counted."""

import logging
import random

import numpy as np
import pytest

from jaxspec.host.offload import AT_ONCE, MOST_FLIGHTS, Offload
from jaxspec.host.radix import Leaving, page_keys
from jaxspec.host.tiers import Files, Memory
from tests.oracles.offloading import SLOT, Copies

SIZE = 2
BYTES = SIZE * SLOT * 8


class Device(Copies):
    """Pages of numbers; copies are whole when `ready` says so."""

    def __init__(self, pages: int = 64) -> None:
        super().__init__([[(page, slot, 5) for slot in range(SIZE)] for page in range(pages)], random.Random(0))
        self.ready, self.calls = True, []

    def is_read(self, stored) -> bool:
        return self.ready

    def read_pages(self, numbers):
        self.calls.append(list(numbers))
        return super().read_pages(numbers)


def keys(tokens: int, start: int = 0, salt: str = ""):
    """Of a text of so many tokens of its own."""
    return page_keys(range(start, start + tokens), tokens, (salt,), SIZE)


def restored(offload: Offload, wanted, first: int = 0) -> list[int]:
    """The pages that the contents came from."""
    targets = list(range(40, 40 + len(wanted) - first))
    found = offload.restore(wanted, targets)
    slots = [offload.device.memory[page] for page in targets[:found]]
    assert all(slot[1:] == (place, 5) for page in slots for place, slot in enumerate(page))
    return [page[0][0] for page in slots]


def make(most: int = 1000, files: Files | None = None) -> Offload:
    return Offload(Device(), SIZE, Memory(most * BYTES), files)


def is_empty(offload: Offload) -> bool:
    return not offload._root.after and not offload._named and offload.memory.used == 0


def test_pages_come_back_to_their_text_only():
    offload = make()
    offload.keep([Leaving(keys(10), [7, 8, 9]), Leaving(keys(4, 100), [3, 4])])
    assert restored(offload, keys(10), 2) == [7, 8, 9]
    assert restored(offload, keys(10)) == [], "its beginning is not kept"
    assert restored(offload, keys(6), 2) == [7]
    assert restored(offload, keys(4, 100)) == [3, 4]
    assert restored(offload, keys(4, 100, "mine")) == []
    assert restored(offload, keys(4, 101)) == []
    # The page after another text that is as long.
    assert restored(offload, [*keys(4, 100), *keys(10)[2:3]], 2) == []
    offload.keep([Leaving(keys(4), [1, 2])])
    assert restored(offload, keys(20)) == [1, 2, 7, 8, 9]
    assert offload.figures()["restored_pages"] == 3 + 1 + 2 + 5


def test_what_is_kept_is_not_copied_again():
    offload = make()
    for ready in (False, True):
        offload.device.ready = ready
        offload.keep([Leaving(keys(6), [1, 2, 3])])
        offload.settle()
    assert offload.device.calls == [[3, 2, 1]]
    assert offload.figures()["stored_pages"] == 3


def test_a_page_is_given_back_once_its_copy_is_whole_as_it_was_when_that_began():
    offload = make()
    offload.device.ready = False
    offload.keep([Leaving(keys(4), [1, 2])])
    offload.device.memory[1] = offload.device.memory[2] = ["poison"] * SIZE
    offload.settle()
    assert offload.figures()["stored_pages"] == 0
    assert restored(offload, keys(4)) == [1, 2], "whoever wants it waits for it"
    assert offload.figures()["stored_pages"] == 2


def test_few_copies_are_under_way_at_once():
    offload = make()
    offload.device.ready = False
    count = (MOST_FLIGHTS + 5) * AT_ONCE
    offload.device.memory *= 3
    offload.keep([Leaving(keys(2 * count), list(range(count)))])
    assert len(offload._flights) == MOST_FLIGHTS
    assert max(map(len, offload.device.calls)) == AT_ONCE
    offload.flush()
    assert offload.restore(keys(2 * count), [0] * count) == count


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_ends_of_what_was_used_least_recently_go_first(tmp_path, on_disk):
    offload = make(0 if on_disk else 5)
    if on_disk:
        files = Files(tmp_path, 10**6, "")
        probe = make(0, files)
        probe.keep([Leaving(keys(2, 7), [0])])
        probe.flush()
        each = files.used
        offload = make(0, Files(tmp_path / "own", 5 * each + each // 2, ""))
    offload.keep([Leaving(keys(6), [1, 2, 3])])
    offload.flush()
    offload.keep([Leaving(keys(4, 100), [4, 5])])
    offload.flush()
    assert restored(offload, keys(6)) == [1, 2, 3]
    offload.keep([Leaving(keys(2, 200), [6])])
    offload.flush()
    assert restored(offload, keys(4, 100)) == [4]
    offload.keep([Leaving(keys(4, 300), [7, 8])])
    offload.flush()
    assert restored(offload, keys(6)) == [1]
    assert restored(offload, keys(4, 300)) == [7, 8]
    assert len(offload._named) == 5 * on_disk


def test_disk_serves_what_memory_has_no_room_for(tmp_path):
    offload = make(2, Files(tmp_path, 10**6, ""))
    offload.keep([Leaving(keys(10), [1, 2, 3, 4, 5])])
    assert restored(offload, keys(10)) == [1, 2, 3, 4, 5], "while it is being written"
    offload.flush()
    assert restored(offload, keys(10)) == [1, 2, 3, 4, 5]
    assert offload.figures() == {
        "stored_pages": 5,
        "restored_pages": 10,
        "lost_pages": 0,
        "memory_pages": 2,
        "memory_bytes": 2 * BYTES,
        "disk_pages": 5,
        "disk_bytes": sum(path.stat().st_size for path in tmp_path.iterdir()),
    }
    again = make(2, Files(tmp_path, 10**6, ""))
    assert restored(again, keys(10)) == [1, 2, 3, 4, 5]
    assert restored(make(2, Files(tmp_path, 10**6, "other weights")), keys(10)) == []


def test_what_is_of_one_request_only_is_discarded_and_no_restart_finds_it(tmp_path):
    offload = make(1, Files(tmp_path, 10**6, ""))
    own = page_keys(range(5), 5, ("chat", 0), SIZE, partial=True)
    offload.keep([Leaving(own, [2, 3], lasting=False), Leaving(keys(4), [4, 5])])
    assert restored(offload, own, 1) == [2, 3]
    offload.files.flush()
    assert len(make(1, Files(tmp_path, 10**6, "")).files) == 2
    offload.discard(own)
    assert restored(offload, own, 1) == []
    assert restored(offload, keys(4)) == [4, 5]
    offload.clear()
    offload.flush()
    assert is_empty(offload)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["read_pages", "take_pages"])
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_pages_that_cannot_be_copied_are_lost_and_told_of_once(monkeypatch, caplog, when, error):
    offload = make()
    with monkeypatch.context() as patch:
        patch.setattr(Device, when, lambda *_: (_ for _ in ()).throw(error("no room for copies")))
        offload.keep([Leaving(keys(20), list(range(10)))])
        offload.flush()
    assert restored(offload, keys(20)) == []
    assert offload.figures()["lost_pages"] == 10
    assert len(caplog.messages) == 1
    assert "no room for copies" in caplog.messages[0]
    assert is_empty(offload)
    offload.keep([Leaving(keys(20), list(range(10)))])
    assert restored(offload, keys(20)) == list(range(10))


def test_a_page_that_changes_in_memory_is_lost(caplog):
    offload = make()
    offload.keep([Leaving(keys(6), [1, 2, 3])])
    offload.flush()
    page = offload._find(keys(4))
    changed = np.array(offload.memory.get(page).data)
    changed[3] ^= 1
    offload.memory._blocks[page] = offload.memory.get(page)._replace(data=changed)
    assert restored(offload, keys(6)) == [1]
    assert offload.figures()["lost_pages"] == 1
    assert "has changed in memory" in caplog.messages[0]


def test_a_full_disk_and_damaged_files_cost_pages_only(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    offload = make(0, Files(tmp_path, 10**6, ""))
    with monkeypatch.context() as patch:
        patch.setattr("jaxspec.host.tiers.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
        offload.keep([Leaving(keys(4), [1, 2])])
        offload.flush()
    assert restored(offload, keys(4)) == []
    assert is_empty(offload)
    offload.keep([Leaving(keys(4), [1, 2])])
    offload.flush()
    second = tmp_path / offload._find(keys(4)).file
    second.write_bytes(second.read_bytes()[:-1])
    assert restored(offload, keys(4)) == [1]
    assert offload.figures()["lost_pages"] == 3
    assert len(caplog.messages) == 2
