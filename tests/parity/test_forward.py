"""Logits through the paged pool against transformers: SmolLM2, and tiny random models of every kind of Llama."""

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.llm import LLM
from jaxspec.models.loading import load_model
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import forward, logits_of
from jaxspec.types import Params, Sequences
from pallas_kernels import Rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

LOG = logging.getLogger(__name__)

TINY: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "wide-heads": {"head_dim": 24},
    "narrow-heads": {"head_dim": 6, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "attention_bias": True,
        "mlp_bias": True,
    },
    "sharded": {"shard": "60KB"},
    "padded-vocabulary": {"padding": 50},
}
WAYS = {"prefill": (16, 5, 7), "decode": (1, 3, 5)}
"""Tokens a row, rows a call, page size."""


def paged_logits(
    params: Params, spec: ModelSpec, prompts: list[list[int]], chunk: int, num_rows: int, page: int
) -> list[np.ndarray]:
    """Logits `[len(prompt), V]` at every token of each prompt, written `num_rows` rows of `chunk` tokens a call.

    A call mixes rows of one sequence and of several, sequences have pages in random order, and the last row is padding
    where the work does not fill a call.
    """
    width = -(-max(map(len, prompts)) // page)
    pool_spec = PoolSpec(
        get_format("float32"), spec.num_layers, len(prompts) * width + 3, page, spec.num_kv_heads, spec.head_dim
    )
    pages = np.random.default_rng(0).permutation(pool_spec.num_pages)[: len(prompts) * width]
    table = jnp.asarray(pages.reshape(1, len(prompts), width), jnp.int32)
    zeros = jnp.zeros(len(prompts), jnp.int32)
    sequences = Sequences(table, zeros[None], zeros[None], zeros)

    @partial(jax.jit, donate_argnums=1)
    def call(params, pool, rows, tokens):
        positions = rows.start[:, None] + jnp.arange(chunk)
        hidden, pool = forward(params, spec, pool_spec, rows, tokens, positions, None, pool, sequences)
        return logits_of(params, spec, hidden), pool

    work = sorted((start, i) for i, prompt in enumerate(prompts) for start in range(0, len(prompt), chunk))
    logits = [np.full((len(prompt), spec.vocab_size), np.nan, np.float32) for prompt in prompts]
    pool = pool_spec.allocate(1)
    for first in range(0, len(work), num_rows):
        rows, tokens = np.zeros((3, num_rows), np.int32), np.zeros((num_rows, chunk), np.int32)
        part = work[first : first + num_rows]
        for r, (start, i) in enumerate(part):
            ids = prompts[i][start : start + chunk]
            rows[:, r], tokens[r, : len(ids)] = (i, start, len(ids)), ids
        out, pool = call(params, pool, Rows(*map(jnp.asarray, rows)), jnp.asarray(tokens))
        for r, (start, i) in enumerate(part):
            logits[i][start : start + rows[2, r]] = out[r, : rows[2, r]]
    return logits


def their_logits(model: Any, prompt: list[int]) -> np.ndarray:
    """Logits `[len(prompt), V]` of transformers for one prompt by itself."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].numpy()


def save_tiny(folder: Path, tokenizer: Path, vocab: int, shard: str = "1GB", padding: int = 0, **settings: Any) -> Any:
    """A random Llama, saved by transformers beside a tokenizer of `vocab` tokens; returns the model."""
    defaults = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{"vocab_size": vocab + padding, **defaults, **settings})
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Far from the identity, so that a norm, bias or rotation left out shows.
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return model


@pytest.mark.parametrize("kind", TINY)
def test_tiny_llama(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    vocab = load_model(str(tiny_model)).tokenizer.vocab_size
    model = save_tiny(tmp_path, tiny_model, vocab, **TINY[kind])
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or kind != "sharded"
    loaded = load_model(str(tmp_path), progress=False)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocab, length).tolist() for length in (37, 50, 1)]
    expected = [their_logits(model, prompt) for prompt in prompts]
    for way, (chunk, num_rows, page) in WAYS.items():
        got = paged_logits(loaded.params, loaded.spec, prompts, chunk, num_rows, page)
        for ours, theirs in zip(got, expected, strict=True):
            assert np.all(np.isneginf(ours[:, vocab:]))
            difference = np.abs(ours[:, :vocab] - theirs[:, :vocab]).max()
            LOG.info("%s, %s of %d tokens: largest difference %.2e", kind, way, len(ours), difference)
            assert difference <= 1e-4


@pytest.mark.model
def test_smollm2_over_512_tokens(smollm2: LLM, reference: Any, questions: list[str]) -> None:
    prompt = smollm2.tokenizer.encode("\n\n".join(questions * 16))[:512]
    assert len(prompt) == 512
    params, spec = smollm2.engine.device.params.target, smollm2.engine.spec
    (ours,) = paged_logits(params, spec, [prompt], chunk=64, num_rows=4, page=64)
    difference = np.abs(ours - their_logits(reference, prompt)).max()
    LOG.info("largest difference of a logit: %.2e", difference)
    assert difference <= 1e-3
