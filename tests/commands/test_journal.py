"""The output of a batch survives kills, full disks and foreign files."""

import json
import resource
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from jaxspec.commands.journal import Journal
from jaxspec.errors import ConfigError, JaxspecError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def fill(path: Path, rows: dict[int, dict]) -> None:
    with closing(Journal(path)) as journal:
        for index, fields in rows.items():
            journal.write(index, f"digest-{index}", fields)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_put_in_order_at_the_end_and_the_latest_counts(path):
    journal = Journal(path)
    for index, text in ((2, "c"), (0, "old"), (1, "b"), (0, "a"), (9, "stale")):
        journal.write(index, "d", {"text": text})
    assert [row["index"] for row in rows(path)] == [2, 0, 1, 0, 9]
    journal.finish(3)
    assert [row["text"] for row in rows(path)] == ["a", "b", "c"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("cut", [1, 5, 12, 30])
def test_a_torn_last_row_is_cut_off_and_written_again(path, cut):
    fill(path, {1: {"text": "b"}, 0: {"text": "a" * 30}})
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path)
    assert journal.finished == {1: "digest-1"}
    journal.write(0, "digest-0", {"text": "a"})
    journal.finish(2)
    assert [row["text"] for row in rows(path)] == ["a", "b"]


def test_rows_with_errors_do_not_count_as_finished(path):
    fill(path, {0: {"text": "a"}, 1: {"error": "line 2: no"}})
    with closing(Journal(path)) as journal:
        assert journal.finished == {0: "digest-0"}
        assert set(journal.places) == {0, 1}


@pytest.mark.parametrize(
    "content",
    [b"precious", b"precious\n", b'{"prompt": "a"}\n', b'{"index":0}\n', b'{"index":"x","request":"y"}\n', b"\n"],
)
def test_a_file_of_somebody_else_is_left_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--overwrite"):
        Journal(path)
    assert path.read_bytes() == content
    Journal(path, overwrite=True).close()
    assert path.read_bytes() == b""


def test_places_that_cannot_be_written(path):
    with pytest.raises(JaxspecError, match="cannot write"):
        Journal(path / "below" / "out.jsonl")
    with pytest.raises(ConfigError, match="is not a file"):
        Journal(path.parent)
    with pytest.raises(ConfigError, match="is not a file"):
        Journal(Path("/dev/full"))


@contextmanager
def largest_file(size: int):
    """Writing past `size` bytes fails as it does on a full disk, after a part of it was written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_rows_before_it(path):
    fill(path, {0: {"text": "a" * 100}})
    size = path.stat().st_size
    with closing(Journal(path)) as journal:
        with largest_file(size + 40), pytest.raises(JaxspecError, match=r"cannot write .*; 1 finished rows are kept"):
            journal.write(1, "digest-1", {"text": "b" * 100})
        assert path.stat().st_size == size
        journal.write(1, "digest-1", {"text": "b"})
        with largest_file(size), pytest.raises(JaxspecError, match="2 finished rows are kept"):
            journal.finish(2)
    assert len(rows(path)) == 2
    assert [p.name for p in path.parent.iterdir()] == [path.name]
