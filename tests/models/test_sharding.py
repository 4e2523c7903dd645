"""How parameters are shared: every family's, plain and quantised, layer by layer and stacked."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.models.families import llama
from jaxspec.models.loading.layout import layout_of
from jaxspec.models.quantization import Quantized, get_scheme
from jaxspec.models.sharding import partition, shared_dimension
from jaxspec.parallel import MODEL

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": True,
    "mlp_bias": True,
}
TREE = llama.parameters(llama.spec(CONFIG, 1000))
M = MODEL
QKV, GATE_UP = P(M, None, None, None), P(None, M, None)
LAYER = {
    "attention_norm": {"weight": P()},
    "qkv": {"weight": QKV, "bias": P(M, None, None)},
    "o": {"weight": P(None, M), "bias": P()},
    "mlp_norm": {"weight": P()},
    "gate_up": {"weight": GATE_UP, "bias": P(None, M)},
    "down": {"weight": P(None, M), "bias": P()},
}
WHOLE = {"embed": {"weight": P(M, None)}, "lm_head": {"weight": P(M, None)}, "norm": {"weight": P()}}


def layout(scheme: str | None, stacked: bool) -> dict[str, Any]:
    return layout_of(TREE, np.dtype(np.float32), None if scheme is None else get_scheme(scheme), stacked)


@pytest.mark.parametrize("tree", [TREE, layout(None, False)], ids=["parameters", "arrays"])
def test_a_plain_tree(tree: dict[str, Any]) -> None:
    assert partition(tree) == WHOLE | {"layers": (LAYER, LAYER)}


def test_a_stack_is_shared_as_its_layers_are() -> None:
    stacked = jax.tree.map(lambda spec: P(*(None, *spec) if len(spec) else ()), LAYER)
    assert partition(layout(None, True)) == WHOLE | {"layers": stacked}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("scheme", "qkv", "o"),
    [
        ("int8", Quantized(QKV, P(M, None, None)), Quantized(P(None, M), P())),
        ("int4", Quantized(QKV, P(M, None, None), QKV, QKV), Quantized(P(None, M), P(), P(None, M), P(None, M))),
        ("fp8_block", Quantized(QKV, QKV), Quantized(P(None, M), P(None, M))),
    ],
)
def test_fields_of_quantised_matrices(scheme: str, qkv: Quantized, o: Quantized, stacked: bool) -> None:
    found = partition(layout(scheme, stacked))["layers"]
    layer = found if stacked else found[1]
    for name, expected in (("qkv", qkv), ("o", o), ("down", o)):
        stack = jax.tree.map(lambda spec: P(None, *spec) if len(spec) else P(), expected)
        assert layer[name]["weight"] == (stack if stacked else expected), name


def test_shared_dimensions_are_counted_from_the_end() -> None:
    assert [shared_dimension(spec) for spec in (P(), P(None, M), P(M, None, None), P(None, None))] == [
        None,
        -1,
        -3,
        None,
    ]
