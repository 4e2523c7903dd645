"""The hub: what is asked for, and what comes of a failure. (Its server is never asked here.)"""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from jaxspec.errors import LoadError
from jaxspec.models.loading.hub import fetch_from_hub


def test_only_what_loading_reads_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(model: str, allow_patterns: list[str]) -> str:
        asked.update(model=model, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert fetch_from_hub("owner/name") == tmp_path
    assert asked["model"] == "owner/name"
    files = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "model.gguf", "x.py"]
    kept = huggingface_hub.utils.filter_repo_objects([*files, *others], allow_patterns=asked["patterns"])
    assert list(kept) == files


@pytest.mark.parametrize("error", [OSError("no route\nto host"), RuntimeError(), ValueError("bad id")])
def test_any_failure_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LoadError, match=r"^cannot fetch 'owner/name' from the Hugging Face hub: .+$") as caught:
        fetch_from_hub("owner/name")
    assert "\n" not in str(caught.value)
