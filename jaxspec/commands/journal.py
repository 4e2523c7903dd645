"""The output of a batch: a journal that survives being killed, and at the end a file in input order."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from jaxspec.errors import ConfigError, JaxspecError

FIRST_BYTES = b'{"index":'


class Row(msgspec.Struct):
    """What the journal must know of one of its rows."""

    index: int
    request: str
    error: str | None = None


class Journal:
    """Rows are appended as they finish, each whole before the next; a torn last row of a killed run is cut off.

    Raises ConfigError when the file exists and was not written by a batch, JaxspecError when it cannot be written.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        self.places: dict[int, tuple[int, int]] = {}
        """Start and length, in bytes, of the latest row of each index."""
        self.finished: dict[int, str] = {}
        """Digests of the requests that have a row without an error, by index."""
        self.end = 0
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file")
        try:
            if not overwrite and path.exists():
                self._read()
            self._file = path.open("ab", buffering=0)
            self._file.truncate(self.end)
        except OSError as error:
            raise self._failure(error) from error

    def _read(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    if not (line.startswith(FIRST_BYTES) or FIRST_BYTES.startswith(line)):
                        raise self._foreign()
                    return
                row = self._parse(line)
                self._note(row.index, row.request, row.error, len(line))

    def _parse(self, line: bytes) -> Row:
        if not line.startswith(FIRST_BYTES):
            raise self._foreign()
        try:
            return msgspec.json.decode(line, type=Row)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._foreign() from error

    def _foreign(self) -> ConfigError:
        return ConfigError(f"{self.path} exists and is no output of a batch: name another file or add --overwrite")

    def _note(self, index: int, request: str, error: str | None, length: int) -> None:
        self.places[index] = (self.end, length)
        self.end += length
        if error is None:
            self.finished[index] = request
        else:
            self.finished.pop(index, None)

    def _failure(self, error: OSError) -> JaxspecError:
        kept = f"; {len(self.finished)} finished rows are kept" if self.finished else ""
        return JaxspecError(f"cannot write {self.path}: {error.strerror}{kept}")

    def write(self, index: int, request: str, fields: dict[str, Any]) -> None:
        """Append one row. After a failure nothing of it stays in the file."""
        line = msgspec.json.encode({"index": index, "request": request} | fields) + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self.end)
            raise self._failure(error) from error
        self._note(index, request, fields.get("error"), len(line))

    def finish(self, count: int) -> None:
        """Put the rows 0 to `count` - 1 in order, and nothing else, in one step that a crash cannot halve."""
        ordered = self.path.with_name(self.path.name + ".tmp")
        try:
            with self.path.open("rb") as rows, ordered.open("wb") as out:
                for index in range(count):
                    start, length = self.places[index]
                    rows.seek(start)
                    out.write(rows.read(length))
                out.flush()
                os.fsync(out.fileno())
            self._file.close()
            ordered.replace(self.path)
        except OSError as error:
            ordered.unlink(missing_ok=True)
            raise self._failure(error) from error

    def close(self) -> None:
        """Let go of the file; the rows written so far stay."""
        self._file.close()
