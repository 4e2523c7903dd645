"""What tests share: a tiny model with random weights, written as a Hugging Face folder."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, LAYERS, EMBED, HEADS, KV_HEADS, MLP, CONTEXT = 512, 2, 64, 4, 2, 128, 256
MOST_MAPPINGS = 20_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the sea is wide and the sky is blue", "she sells sea shells by the shore", "user assistant system"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 50,  # some rows of the embedding stay padding
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 4, trainer)
    return tokenizer


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    head = EMBED // HEADS
    shapes = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        shapes |= {
            name + "input_layernorm.weight": (EMBED,),
            name + "post_attention_layernorm.weight": (EMBED,),
            name + "self_attn.q_proj.weight": (HEADS * head, EMBED),
            name + "self_attn.k_proj.weight": (KV_HEADS * head, EMBED),
            name + "self_attn.v_proj.weight": (KV_HEADS * head, EMBED),
            name + "self_attn.o_proj.weight": (EMBED, HEADS * head),
            name + "mlp.gate_proj.weight": (MLP, EMBED),
            name + "mlp.up_proj.weight": (MLP, EMBED),
            name + "mlp.down_proj.weight": (EMBED, MLP),
        }
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json, model.safetensors and a byte-level tokenizer with a chat template; context 256."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    special = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    _tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def unoptimised() -> Iterator[None]:
    """For programs that run so shortly that optimising them would take longer."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """Forget compiled programs once they are many: Linux lets a process map 65,530 regions, each program takes some
    dozens, and XLA does not survive the lack of them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
