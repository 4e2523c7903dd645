"""Models of the Hugging Face hub, by their id owner/name."""

from pathlib import Path

from jaxspec.errors import LoadError

FILES = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja"]


def fetch_from_hub(model: str) -> Path:
    """The folder of a model in the hub's own cache, after downloading what is missing. LoadError where that fails."""
    from huggingface_hub import snapshot_download  # slow to import, and most loads do without

    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except Exception as error:  # besides its own errors the hub's library lets those of its HTTP client through
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise LoadError(f"cannot fetch {model!r} from the Hugging Face hub: {reason}") from error
