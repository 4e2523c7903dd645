"""Blocks in host memory and in files: what has no room goes, what was left is found, and what is damaged is not."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.host import tiers
from jaxspec.host.tiers import Block, Files, Memory, Text

SIZE = 1000


def block(seed: int) -> Block:
    return Block.of(np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8))


def text(*tokens: int, salt: str = "") -> Text:
    return Text((salt,), list(tokens))


def files(folder: Path, limit: int = 10**6, identity: str = "model") -> Files:
    made = Files(folder, limit, identity)
    made.load()
    return made


def same(found: Block | None, expected: Block) -> bool:
    return found is not None and np.array_equal(found.data, expected.data)


def test_memory_lets_go_of_what_was_used_least_recently():
    memory = Memory(3 * SIZE)
    assert [memory.put(key, block(key)) for key in range(3)] == [[], [], []]
    assert same(memory.get(0), block(0))
    assert memory.put(3, block(3)) == [1]
    assert memory.put(2, block(4)) == []
    assert same(memory.get(2), block(4))
    assert (memory.used, len(memory)) == (3 * SIZE, 3)
    memory.drop(0)
    memory.drop(0)
    assert (memory.used, len(memory), 0 in memory, memory.get(0)) == (2 * SIZE, 2, False, None)
    assert Memory(SIZE - 1).put(0, block(0)) == [0]


def test_what_was_written_is_found_by_a_restart(tmp_path):
    texts = [text(1, 2), text(1, 2, 3, 4), text(1, 2, salt="mine"), Text(("chat", 3), [1, 2])]
    first = files(tmp_path / "new" / "folder")
    names = [first.put(one, block(i), lasting=i < 3) for i, one in enumerate(texts)]
    assert len(set(names)) == 4
    for i, (name, one) in enumerate(zip(names, texts, strict=True)):
        assert same(first.get(name, one), block(i)), "while it is being written, too"
    first.flush()
    again = Files(tmp_path / "new" / "folder", 10**6, "model")
    assert again.load() == dict(zip(names[:3], texts[:3], strict=True))
    for i in range(3):
        assert same(again.get(names[i], texts[i]), block(i))
    assert names[3] not in again
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 3
    assert again.used == sum(path.stat().st_size for path in (tmp_path / "new" / "folder").iterdir())


def test_others_pages_are_left_out_and_damaged_ones_removed(tmp_path, caplog):
    ours, other = files(tmp_path), files(tmp_path, identity="other weights")
    names = [ours.put(text(i), block(i)) for i in range(6)]
    foreign = other.put(text(0), block(9))
    assert foreign != names[0]
    ours.flush()
    other.flush()
    damage = [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"jxpages0" + data[8:],
        lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
        lambda data: b"",
    ]
    for name, spoil in zip(names, damage, strict=False):
        (tmp_path / name).write_bytes(spoil((tmp_path / name).read_bytes()))
    (tmp_path / "half.part").write_bytes(b"what a killed process left")
    (tmp_path / "notes.txt").write_text("not ours")
    again = Files(tmp_path, 10**6, "model")
    assert again.load() == {names[5]: text(5)}
    [line] = caplog.messages
    assert "1 pages found, 1 of other models or settings left out, 5 damaged ones removed" in line
    assert {path.name for path in tmp_path.iterdir()} == {names[5], foreign, "notes.txt"}


@pytest.mark.parametrize("change", ["a bit of the page", "another text", "nothing is there", "it is cut off"])
def test_a_file_that_changes_later_is_no_page(tmp_path, caplog, change):
    ours = files(tmp_path)
    name, wanted = ours.put(text(1), block(1)), text(1)
    ours.flush()
    data = bytearray((tmp_path / name).read_bytes())
    if change == "a bit of the page":
        data[-10] ^= 4
        (tmp_path / name).write_bytes(data)
    elif change == "another text":
        wanted = text(2)  # as if two texts had the same hash
    elif change == "nothing is there":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(data[:-7])
    assert ours.get(name, wanted) is None
    assert ours.get(name, wanted) is None
    assert (ours.damaged, ours.used, len(ours)) == (1, 0, 0)
    assert ours.settle() == [name]
    assert len(caplog.messages) == 1
    ours.flush()
    assert not (tmp_path / name).exists()


def test_files_that_were_used_least_recently_make_room_over_restarts(tmp_path):
    ours, other = files(tmp_path), files(tmp_path, identity="other weights")
    names = [ours.put(text(i), block(i)) for i in range(4)]
    foreign = other.put(text(0), block(9))
    ours.flush()
    other.flush()
    for age, name in enumerate(names):
        os.utime(tmp_path / name, (10 + age, 10 + age))
    os.utime(tmp_path / foreign, (99, 99))
    ours.touch(names[0])
    each = ours.used // 4
    again = Files(tmp_path, 4 * each + each // 2, "model")
    assert again.load().keys() == set(names), "the foreign page is the first to go"
    fifth = again.put(text(5), block(5))
    assert again.settle() == [names[1]]
    again.flush()
    assert {path.name for path in tmp_path.iterdir()} == {names[0], *names[2:], fifth}
    assert again.used == 4 * each
    assert Files(tmp_path / "small", each - 1, "model").put(text(1), block(1)) is None


def test_a_full_disk_costs_a_page_and_no_more(tmp_path, caplog, monkeypatch):
    ours = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tiers.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        names = [ours.put(text(i), block(i)) for i in range(3)]
        ours.flush()
    assert ours.settle() == names
    assert (ours.failed, ours.used, len(ours)) == (3, 0, 0)
    assert [message for message in caplog.messages if "No space left" in message] == caplog.messages
    assert len(caplog.messages) == 1
    assert list(tmp_path.iterdir()) == []
    name = ours.put(text(1), block(1))
    ours.flush()
    assert ours.settle() == []
    assert same(ours.get(name, text(1)), block(1))


def test_whoever_writes_too_much_waits(tmp_path, monkeypatch):
    write = tiers._write
    monkeypatch.setattr(tiers, "_write", lambda *a: (time.sleep(0.002), write(*a)))
    ours = files(tmp_path)
    for i in range(3 * tiers.MOST_WAITING):
        ours.put(text(i), block(i))
        assert len(ours._waiting) <= tiers.MOST_WAITING
    ours.flush()
    assert len(list(tmp_path.iterdir())) == len(ours) == 3 * tiers.MOST_WAITING


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload_folder .*file/folder: "):
        Files(tmp_path / "file" / "folder", 1, "model")


WRITER = """
import sys
from pathlib import Path
import numpy as np
from jaxspec.host.tiers import Block, Files, Text
files = Files(Path(sys.argv[1]), 10**9, "model")
files.load()
for i in range(10**6):
    files.put(Text(("",), [i]), Block.of(np.full(300_000, i % 251, np.uint8)))
"""


def test_kill_in_the_middle_of_a_store_leaves_what_loads_clean(tmp_path, caplog):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("*.page"))) < 20 or not list(tmp_path.glob("*.part")):
        assert time.monotonic() < until
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    again = Files(tmp_path, 10**9, "model")
    found = again.load()
    assert len(found) >= 20
    for name, one in found.items():
        assert same(again.get(name, one), Block.of(np.full(300_000, one.tokens[0] % 251, np.uint8)))
    assert (again.damaged, caplog.messages) == (0, [])
    assert {path.name for path in tmp_path.iterdir()} == found.keys()
