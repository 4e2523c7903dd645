"""Where pages are kept off the device, up to a number of bytes: host memory, and files that a restart finds again.

A file is written under another name, synced and renamed, so that what has the right name is whole; a checksum tells of
what became of it since. Files are never more than a cache: one that is missing, damaged, of another model or of another
version of the format is as good as none.
"""

import hashlib
import logging
import os
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from jaxspec.errors import ConfigError

log = logging.getLogger(__name__)
SUFFIX, PART = ".page", ".part"
MAGIC = b"jxpages1"
"""Begins every file; the last character is the version of what follows."""
MOST_WAITING = 32
"""Files that wait to be written at most: whoever has more to write waits, too."""


class Block(NamedTuple):
    """What a page holds, as bytes."""

    data: np.ndarray
    checksum: int

    @classmethod
    def of(cls, data: np.ndarray) -> "Block":
        return cls(data, zlib.crc32(data.data))

    @property
    def sound(self) -> bool:
        """Whether it is what it was."""
        return zlib.crc32(self.data.data) == self.checksum


class Text(NamedTuple):
    """All tokens up to the end of a page, and who shares them."""

    namespace: tuple
    tokens: Sequence[int]


class Memory:
    """Blocks by any key, at most `limit` bytes of them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._blocks: OrderedDict[Hashable, Block] = OrderedDict()
        """Least recently used first."""

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, key: Hashable, block: Block) -> list[Hashable]:
        """Keep a block; returns the keys whose blocks had to go for it, or its own where there is no room at all."""
        self.drop(key)
        self._blocks[key] = block
        self.used += block.data.nbytes
        gone = []
        while self.used > self.limit:
            gone.append(next(iter(self._blocks)))
            self.drop(gone[-1])
        return gone

    def get(self, key: Hashable) -> Block | None:
        """The block, which is the last to go from now on."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def drop(self, key: Hashable) -> None:
        """Let go of a block, if there is one."""
        if (block := self._blocks.pop(key, None)) is not None:
            self.used -= block.data.nbytes


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of the page in it."""

    identity: str
    namespace: tuple
    tokens: bytes
    size: int
    checksum: int
    lasting: bool


class Files:
    """Blocks in the files of a folder, at most `limit` bytes of them, written in the background.

    `identity` is of all that a page depends on besides its text. What others left in the folder counts, too, and is
    the first to go. ConfigError where there can be no such folder.
    """

    def __init__(self, folder: Path, limit: int, identity: str) -> None:
        self.folder, self.limit, self.identity = folder, limit, identity
        self.used = self.failed = self.damaged = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """By the name of the file, least recently used first."""
        self._waiting: dict[str, tuple[Future, Block]] = {}
        self._gone: list[str] = []
        self._writer = ThreadPoolExecutor(1, "offload")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"offload_folder {folder}: {error.strerror or error}") from error

    def __contains__(self, name: str | None) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def load(self) -> dict[str, Text]:
        """The pages that were left here, by the names of their files; all that is no page any more is removed."""
        found: dict[str, Text] = {}
        others = damaged = 0
        for path in self.folder.glob(f"*{PART}"):
            _remove(path)
        for path in sorted(self.folder.glob(f"*{SUFFIX}"), key=_last_used):
            head = _head(path)
            if head is None or not head.lasting:
                damaged += head is None
                _remove(path)
                continue
            self._sizes[path.name] = size = len(_framed(head)) + head.size
            self.used += size
            if head.identity == self.identity:
                found[path.name] = Text(head.namespace, np.frombuffer(head.tokens, "<u4").tolist())
            else:
                others += 1
                self._sizes.move_to_end(path.name, last=False)
        self._make_room(0)
        found = {name: text for name, text in found.items() if name in self._sizes}
        if others or damaged:
            what = f"{len(found)} pages found, {others} of other models or settings left out, {damaged} damaged"
            log.warning("offload_folder %s: %s ones removed", self.folder, what)
        self._gone.clear()
        return found

    def put(self, text: Text, block: Block, lasting: bool = True) -> str | None:
        """Begin to write a block; returns the name of its file, or None where there is no room for it at all.

        Only what is `lasting` is found by a restart.
        """
        tokens = np.asarray(text.tokens, "<u4").tobytes()
        head = _Head(self.identity, text.namespace, tokens, block.data.nbytes, block.checksum, lasting)
        name = self._name(head)
        first = _framed(head)
        size = len(first) + block.data.nbytes
        if name in self._sizes or size > self.limit:
            return name if name in self._sizes else None
        self._make_room(size)
        if name in self._gone:
            self._gone.remove(name)
        self._sizes[name] = size
        self.used += size
        while len(self._waiting) >= MOST_WAITING:
            self._end(next(iter(self._waiting)))
        self._waiting[name] = self._writer.submit(_write, self.folder / name, first, block.data), block
        return name

    def get(self, name: str, text: Text) -> Block | None:
        """The block of exactly this text; None where it is not there, or not as it was written."""
        if name not in self._sizes:
            return None
        if name in self._waiting:
            return self._waiting[name][1]
        path = self.folder / name
        try:
            with path.open("rb") as file:
                head = _read_head(file)
                block = Block(np.frombuffer(file.read(), np.uint8), head.checksum)
        except (OSError, ValueError) as error:
            self._lose(name, str(error))
            return None
        same = head.identity == self.identity and head.namespace == text.namespace
        if not same or head.tokens != np.asarray(text.tokens, "<u4").tobytes() or not block.sound:
            self._lose(name, f"{path} is not what was written")
            return None
        return block

    def touch(self, name: str) -> None:
        """A file is the last to go from now on, after a restart, too."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
            with suppress(OSError):
                os.utime(self.folder / name)

    def drop(self, name: str) -> None:
        """Remove a file, if it is there: after what is being written, so that nothing comes after it."""
        if name in self._sizes:
            self.used -= self._sizes.pop(name)
            self._gone.append(name)
            self._writer.submit(_remove, self.folder / name)

    def settle(self) -> list[str]:
        """See what has become of the files; returns the names of those that are gone since the last time."""
        for name in [name for name, (future, _) in self._waiting.items() if future.done()]:
            self._end(name)
        gone, self._gone = self._gone, []
        return gone

    def flush(self) -> None:
        """Wait until everything is written."""
        for name in list(self._waiting):
            self._end(name)
        self._writer.submit(int).result()

    def _end(self, name: str) -> None:
        future, _ = self._waiting.pop(name)
        if (error := future.exception()) is not None:
            if not self.failed:
                log.warning("offload_folder %s: a page could not be written: %s", self.folder, error)
            self.failed += 1
            self.drop(name)

    def _lose(self, name: str, why: str) -> None:
        if not self.damaged:
            log.warning("offload_folder %s: a page could not be read: %s", self.folder, why)
        self.damaged += 1
        self.drop(name)

    def _make_room(self, size: int) -> None:
        while self.used + size > self.limit:
            self.drop(next(iter(self._sizes)))

    def _name(self, head: _Head) -> str:
        text = msgspec.msgpack.encode((head.identity, head.namespace, head.tokens))
        return hashlib.blake2b(text, digest_size=20).hexdigest() + SUFFIX


def _framed(head: _Head) -> bytes:
    """The bytes before the page's own."""
    encoded = msgspec.msgpack.encode(head)
    return MAGIC + len(encoded).to_bytes(4, "little") + zlib.crc32(encoded).to_bytes(4, "little") + encoded


def _read_head(file) -> _Head:
    """ValueError where it is not right."""
    first = file.read(len(MAGIC) + 8)
    size, checksum = (int.from_bytes(first[at : at + 4], "little") for at in (len(MAGIC), len(MAGIC) + 4))
    if not first.startswith(MAGIC) or len(first) < len(MAGIC) + 8:
        raise ValueError(f"{file.name} does not begin as a page of this version does")
    encoded = file.read(size)
    if len(encoded) < size or zlib.crc32(encoded) != checksum:
        raise ValueError(f"{file.name} has a damaged head")
    try:
        return msgspec.msgpack.decode(encoded, type=_Head)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file.name} has another head: {error}") from error


def _head(path: Path) -> _Head | None:
    """Of a file of the right length; None for any other."""
    try:
        with path.open("rb") as file:
            head = _read_head(file)
            whole = file.tell() + head.size == path.stat().st_size
    except (OSError, ValueError):
        return None
    return head if whole else None


def _write(path: Path, first: bytes, data: np.ndarray) -> None:
    part = path.with_suffix(PART)
    try:
        with part.open("wb") as file:
            file.write(first)
            file.write(data.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        _remove(part)
        raise


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
