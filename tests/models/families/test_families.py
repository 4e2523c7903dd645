"""Laws that every file in jaxspec/models/families keeps, and how a family is found."""

from types import ModuleType

import jax
import numpy as np
import pytest

from jaxspec.errors import LoadError
from jaxspec.models import families
from jaxspec.models.families import Parameter, find_family, find_gguf_family, llama

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "attention_bias": True,
    "mlp_bias": True,
}


def test_architectures_are_found() -> None:
    assert find_family("LlamaForCausalLM") is llama
    assert find_gguf_family("llama") is llama


def test_unknown_architectures_are_named_with_the_known_ones() -> None:
    with pytest.raises(LoadError, match=r"'MambaForCausalLM' is not supported \(there are: .*LlamaForCausalLM"):
        find_family("MambaForCausalLM")
    with pytest.raises(LoadError, match=r"'mamba' is not supported \(there are: .*llama"):
        find_gguf_family("mamba")


@pytest.mark.parametrize("family", families._families(), ids=lambda family: family.__name__.rpartition(".")[2])
def test_parts_fill_every_parameter_exactly_once(family: ModuleType) -> None:
    spec = family.spec(CONFIG, 30)
    names: list[str] = []
    for parameter in jax.tree.leaves(family.parameters(spec)):
        assert isinstance(parameter, Parameter)
        filled = np.zeros(parameter.shape, int)
        for part in parameter.parts:
            assert filled[part.index].size == np.prod(part.shape)
            filled[part.index] += 1
            names.append(part.name)
        assert (filled == 1).all()
    assert len(set(names)) == len(names)
