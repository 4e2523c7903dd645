"""The Llama family: Llama 2, 3 and 3.1+, TinyLlama, SmolLM2, Vicuna."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from jaxspec.errors import LoadError
from jaxspec.models.families import Parameter, Part
from jaxspec.models.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPE = "llama"
GGUF_ARCHITECTURE = "llama"
GGUF_INTERLEAVED = (".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")
BUFFERS = (".rotary_emb.inv_freq",)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class _Config(msgspec.Struct):
    """The keys of config.json that matter, with the defaults that files leave out."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Any = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    quantization_config: dict[str, Any] | None = None


def spec(config: Mapping[str, Any], valid_vocab: int) -> ModelSpec:
    """The spec of a config.json. LoadError names a missing, mistyped or unsupported setting."""
    try:
        c = msgspec.convert(dict(config), _Config)
    except msgspec.ValidationError as error:
        raise LoadError(f"config: {error}") from error
    kv_heads = c.num_key_value_heads or c.num_attention_heads
    _check(c, kv_heads)
    head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
    return ModelSpec(
        vocab_size=c.vocab_size,
        valid_vocab=min(valid_vocab, c.vocab_size),  # a tokenizer may have ids that the model has no row for
        num_layers=c.num_hidden_layers,
        embed_dim=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=c.intermediate_size,
        norm_eps=c.rms_norm_eps,
        inv_freq=_inv_freq(c, head_dim),
        max_context=c.max_position_embeddings,
        tied_embeddings=c.tie_word_embeddings,
        qkv_bias=c.attention_bias,
        o_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
    )


def _check(c: _Config, kv_heads: int) -> None:
    sizes = (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, kv_heads)
    head_dim = c.head_dim or c.hidden_size / max(c.num_attention_heads, 1)
    for ok, what in (
        (min(sizes) > 0, "a size is not above 0"),
        (c.hidden_act == "silu", f"hidden_act {c.hidden_act!r} is not supported (only silu)"),
        (
            c.quantization_config is None,
            f"quantization_config ({(c.quantization_config or {}).get('quant_method', 'unnamed')}) is not supported: "
            "take the unquantised checkpoint or a .gguf file",
        ),
        (head_dim % 2 == 0, f"a head size of {head_dim} is not an even number"),
        (
            c.num_attention_heads % max(kv_heads, 1) == 0,
            f"{c.num_attention_heads} attention heads are no multiple of {kv_heads} key/value heads",
        ),
    ):
        if not ok:
            raise LoadError(f"config: {what}")


def _inv_freq(c: _Config, head_dim: int) -> tuple[float, ...]:
    """RoPE frequencies in radians a position, scaled, rounded to float32. Scaling comes under three names and ages:
    `rope_scaling` with `type`, then with `rope_type`, and transformers 5's `rope_parameters`."""
    rope = c.rope_scaling or c.rope_parameters or {}
    partial = rope.get("partial_rotary_factor", c.partial_rotary_factor)
    if partial not in (None, 1):
        raise LoadError(f"config: partial_rotary_factor {partial} is not supported")
    try:
        theta = float(rope.get("rope_theta") or c.rope_theta or 10000.0)
        frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "linear":
            frequencies = [f / rope["factor"] for f in frequencies]
        elif kind == "llama3":
            frequencies = [_llama3(f, rope) for f in frequencies]
        elif kind != "default":
            raise LoadError(f"config: RoPE type {kind!r} is not supported (there are: default, linear, llama3)")
        usable = all(0 < f < math.inf for f in frequencies)
    except KeyError as error:
        raise LoadError(f"config: the RoPE settings lack {error.args[0]!r}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise LoadError(f"config: the RoPE settings {rope} cannot be used ({error})") from error
    if not usable:
        raise LoadError(f"config: the RoPE settings {rope} give frequencies that are not above 0")
    return tuple(float(np.float32(f)) for f in frequencies)


def _llama3(frequency: float, rope: dict[str, Any]) -> float:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between are blended."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    keep = min(max((turns - low) / (high - low), 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / rope["factor"]


def parameters(spec: ModelSpec) -> dict[str, Any]:
    """The parameter tree, with a `Parameter` for each array."""
    embed = (spec.vocab_size, spec.embed_dim)
    tree: dict[str, Any] = {
        "embed": _weight(Part("model.embed_tokens.weight", embed)),
        "layers": tuple(_layer(spec, f"model.layers.{i}") for i in range(spec.num_layers)),
        "norm": _weight(Part("model.norm.weight", (spec.embed_dim,))),
    }
    if not spec.tied_embeddings:
        tree["lm_head"] = _weight(Part("lm_head.weight", embed))
    return tree


def _weight(part: Part) -> dict[str, Parameter]:
    """A parameter that is one tensor as it stands."""
    return {"weight": Parameter(part.shape, (part,))}


def _layer(spec: ModelSpec, name: str) -> dict[str, Any]:
    e, f = spec.embed_dim, spec.mlp_dim
    return {
        "attention_norm": _weight(Part(f"{name}.input_layernorm.weight", (e,))),
        "qkv": _qkv(spec, f"{name}.self_attn"),
        "o": _linear(f"{name}.self_attn.o_proj", e, spec.num_heads * spec.head_dim, spec.o_bias),
        "mlp_norm": _weight(Part(f"{name}.post_attention_layernorm.weight", (e,))),
        "gate_up": _gate_up(spec, f"{name}.mlp"),
        "down": _linear(f"{name}.mlp.down_proj", e, f, spec.mlp_bias),
    }


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Parameter]:
    tree = _weight(Part(f"{name}.weight", (rows, columns)))
    if bias:
        tree["bias"] = Parameter((rows,), (Part(f"{name}.bias", (rows,)),))
    return tree


def _qkv(spec: ModelSpec, name: str) -> dict[str, Parameter]:
    """[K, G+2, D, E]: each key/value head has its G query heads, then its key, then its value."""
    k, g, d = spec.num_kv_heads, spec.group, spec.head_dim
    places = (
        ("q_proj", k * g * d, np.s_[:, :g]),
        ("k_proj", k * d, np.s_[:, g]),
        ("v_proj", k * d, np.s_[:, g + 1]),
    )

    def fused(kind: str, *inputs: int) -> Parameter:
        parts = tuple(Part(f"{name}.{which}.{kind}", (rows, *inputs), index) for which, rows, index in places)
        return Parameter((k, g + 2, d, *inputs), parts)

    return {"weight": fused("weight", spec.embed_dim)} | ({"bias": fused("bias")} if spec.qkv_bias else {})


def _gate_up(spec: ModelSpec, name: str) -> dict[str, Parameter]:
    """[2, F, E]: gate, then up."""

    def fused(kind: str, *inputs: int) -> Parameter:
        shape = (spec.mlp_dim, *inputs)
        parts = (Part(f"{name}.gate_proj.{kind}", shape, 0), Part(f"{name}.up_proj.{kind}", shape, 1))
        return Parameter((2, *shape), parts)

    return {"weight": fused("weight", spec.embed_dim)} | ({"bias": fused("bias")} if spec.mlp_bias else {})
