"""A tiny model with random weights, written as a Hugging Face folder."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, LAYERS, EMBED, HEADS, KV_HEADS, MLP, CONTEXT = 512, 2, 64, 4, 2, 128, 256
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


def _weights(heads: int, kv_heads: int, embed: int, mlp: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    head, scale = embed // heads, 0.3 * (EMBED / embed) ** 0.5
    shapes = {"model.embed_tokens.weight": (VOCAB, embed), "model.norm.weight": (embed,)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        shapes |= {
            name + "input_layernorm.weight": (embed,),
            name + "post_attention_layernorm.weight": (embed,),
            name + "self_attn.q_proj.weight": (heads * head, embed),
            name + "self_attn.k_proj.weight": (kv_heads * head, embed),
            name + "self_attn.v_proj.weight": (kv_heads * head, embed),
            name + "self_attn.o_proj.weight": (embed, heads * head),
            name + "mlp.gate_proj.weight": (mlp, embed),
            name + "mlp.up_proj.weight": (mlp, embed),
            name + "mlp.down_proj.weight": (embed, mlp),
        }
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, scale, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_model(folder: Path, heads: int = HEADS, kv_heads: int = KV_HEADS, embed: int = EMBED, mlp: int = MLP) -> Path:
    """The folder, with config.json, model.safetensors and a byte-level tokenizer with a chat template."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    special = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    _tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_weights(heads, kv_heads, embed, mlp), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
