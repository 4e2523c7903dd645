"""Folders that `convert` writes, in transformers: its logits are ours, its tokenizer gives our ids and prompts."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.models.saving import convert
from jaxspec.tokenizer import Tokenizer
from tests.models.loading.conftest import gguf_file, random_tensors, tiny_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.parity.test_forward import TINY, paged_logits, save_tiny, their_logits  # noqa: E402 (after the skips)
from tests.parity.test_text import shared_lines  # noqa: E402

__all__ = ["gguf_file", "random_tensors", "tiny_config"]

pytestmark = pytest.mark.parity


def largest_difference(ours: LoadedModel, folder: Path) -> float:
    """Of the logits of two prompts, between our model and what transformers loads from a folder."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab = ours.spec.valid_vocab
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocab, length).tolist() for length in (37, 60)]
    logits = paged_logits(ours.params, ours.spec, prompts, 16, 5, 7)
    return max(
        np.abs(found[:, :vocab] - their_logits(theirs, prompt)[:, :vocab]).max()
        for found, prompt in zip(logits, prompts, strict=True)
    )


@pytest.mark.parametrize("kind", ["tied", "wide-heads", "rope-llama3"])
def test_saved_models(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    vocab = Tokenizer.from_folder(tiny_model).vocab_size
    reference = save_tiny(source, tiny_model, vocab, **TINY[kind])
    convert(str(source), tmp_path / "checkpoint", "orbax")
    convert(str(tmp_path / "checkpoint"), tmp_path / "out", max_shard=5e-5)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.float32
    assert found.config.to_dict() | {"_name_or_path": ""} == reference.config.to_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    assert largest_difference(load_model(str(source)), tmp_path / "out") <= 1e-4


def scaled(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_freq_base(1e5)
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize(
    ("changes", "metadata"),
    [({}, scaled), ({"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}, lambda _: None)],
)
def test_a_gguf_file(
    changes: dict[str, Any], metadata: Any, gguf_file: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path
) -> None:
    small = {name: tensor * 0.2 for name, tensor in random_tensors(tiny_config | changes).items()}
    source = gguf_file(small, metadata=metadata, **changes)
    convert(str(source), tmp_path / "out")
    assert largest_difference(load_model(str(source)), tmp_path / "out") <= 1e-4


def assert_tokenizes_alike(theirs: Any, ours: Tokenizer, texts: list[str]) -> None:
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_ids[0])
    assert len(theirs) == ours.vocab_size
    for text in texts:
        for frame in (True, False):
            ids = ours.encode(text, frame)
            assert theirs.encode(text, add_special_tokens=frame) == ids, text
            assert theirs.decode(ids, skip_special_tokens=frame) == ours.decode(ids, frame), text


TEXTS = ["", " the sea", "<|im_start|>user\nÉ 12 34²<|im_end|>", "日本 🎉\r\n\r\n  x'LL don't"]


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_a_tokenizer_of_a_gguf_file(
    pre: str, gguf_file: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path
) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = pre
        writer.add_add_bos_token(pre == "llama-bpe")
        writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")

    source = gguf_file(random_tensors(tiny_config), metadata=metadata)
    convert(str(source), tmp_path / "out")
    ours, theirs = load_model(str(source)).tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert_tokenizes_alike(theirs, ours, TEXTS)
    messages = [{"role": "user", "content": "Hi "}]
    assert theirs.apply_chat_template(messages, tokenize=False) == ours.apply_chat_template(messages)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ours.eos_ids[0]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    convert("smollm2-135m", tmp_path / "out", max_shard=0.2)
    ours = load_model("smollm2-135m", "float32")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = shared_lines("smollm2_tokens.jsonl")
    assert_tokenizes_alike(theirs, ours.tokenizer, [row["text"] for row in rows])
    assert all(theirs.encode(row["text"]) == row["ids"] for row in rows)  # llama.cpp's
    for question in shared_lines("spec_bench_dev.jsonl"):
        messages = [{"role": "user", "content": question["turns"][0]}]
        prompt = ours.tokenizer.apply_chat_template(messages)
        assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == prompt
    assert largest_difference(ours, tmp_path / "out") <= 1e-3
    files = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) == 3
