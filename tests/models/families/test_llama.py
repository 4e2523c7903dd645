"""What a Llama config.json means. (The RoPE values are compared with transformers' in tests/parity.)"""

import math
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import LoadError
from jaxspec.models.families.llama import parameters, spec

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_defaults() -> None:
    found = spec(CONFIG, 90)
    assert (found.num_kv_heads, found.head_dim, found.group) == (8, 8, 1)
    assert (found.valid_vocab, found.max_context, found.norm_eps) == (90, 2048, 1e-6)
    assert not any((found.tied_embeddings, found.qkv_bias, found.o_bias, found.mlp_bias))
    np.testing.assert_allclose(found.inv_freq, 10000.0 ** (-np.arange(4) / 4), rtol=1e-7)


def test_a_tokenizer_with_more_ids_than_rows_does_not_make_them_valid() -> None:
    assert spec(CONFIG, 101).valid_vocab == 100


def test_switches() -> None:
    found = spec(
        CONFIG
        | {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_theta": 5e5}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        100,
    )
    assert (found.group, found.head_dim, found.max_context) == (8, 16, 131072)
    assert found.tied_embeddings
    assert found.qkv_bias
    assert found.o_bias
    assert found.mlp_bias
    assert found.inv_freq[1] == pytest.approx(5e5 ** (-1 / 8), rel=1e-7)
    tree = parameters(found)
    assert "lm_head" not in tree
    assert tree["layers"][0]["qkv"]["weight"].shape == (1, 10, 16, 64)
    assert tree["layers"][0]["qkv"]["bias"].shape == (1, 10, 16)
    assert tree["layers"][0]["gate_up"]["bias"].shape == (2, 96)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_rope_scaling_is_read_under_all_its_names(key: str, name: str) -> None:
    plain = np.array(spec(CONFIG, 100).inv_freq)
    linear = spec(CONFIG | {key: {name: "linear", "factor": 4.0}}, 100).inv_freq
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-7)
    scaled = np.array(spec(CONFIG | {key: {name: "llama3", **LLAMA3}}, 100).inv_freq)
    turns = 64 * plain / (2 * math.pi)
    assert turns[0] > 4
    assert scaled[0] == plain[0]  # short waves are kept
    assert 0 < turns[-1] < 1
    assert scaled[-1] == pytest.approx(plain[-1] / 8)  # long ones stretched
    assert 1 < turns[1] < 4 or plain[1] / 8 <= scaled[1] <= plain[1]


def test_rope_theta_of_transformers_5() -> None:
    assert spec(CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, 100).inv_freq[
        2
    ] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "not above 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config \\(gptq\\)"),
        ({"num_key_value_heads": 3}, "no multiple of 3"),
        ({"num_attention_heads": 5}, "head size of 12.8"),
        ({"head_dim": 7}, "head size of 7"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "lack 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "cannot be used"),
        ({"rope_scaling": {"type": "linear", "factor": "four"}}, "cannot be used"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lack 'low_freq_factor'"),
        ({"rope_theta": -1.0}, "RoPE settings"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        spec(CONFIG | changes, 100)
    assert "\n" not in str(caught.value)


def test_missing_settings_are_named() -> None:
    with pytest.raises(LoadError, match="vocab_size"):
        spec({key: value for key, value in CONFIG.items() if key != "vocab_size"}, 100)
