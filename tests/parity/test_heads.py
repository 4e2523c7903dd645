"""Heads against a torch module written from the paper, saved by torch in the published form."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import LoadError
from jaxspec.models.heads import head_logits, of_base
from jaxspec.models.loading.heads import load_heads
from jaxspec.models.saving.heads import save_heads
from tests.models.test_heads import MODEL, VOCAB, E, base

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 (after the skip)

pytestmark = pytest.mark.parity


class Block(torch.nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(E, E)

    def forward(self, x: Any) -> Any:
        return x + torch.nn.functional.silu(self.linear(x))


def medusa(heads: int, layers: int, dtype: Any = torch.float32) -> Any:
    """Blocks and then a projection to logits, for each head."""
    torch.manual_seed(0)
    heads_of = [
        torch.nn.Sequential(*(Block() for _ in range(layers)), torch.nn.Linear(E, VOCAB, bias=False))
        for _ in range(heads)
    ]
    return torch.nn.ModuleList(heads_of).to(dtype).eval()


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize(("heads", "layers"), [(4, 1), (2, 3)])
def test_logits(heads: int, layers: int, kind: str, tmp_path: Path) -> None:
    theirs = medusa(heads, layers)
    save = torch.save if kind == "pt" else save_file
    save(theirs.state_dict(), tmp_path / f"medusa_lm_head.{kind}")
    spec, params = load_heads(tmp_path, MODEL, jnp.float32)
    assert (spec.num_heads, spec.layers, spec.own_output) == (heads, layers, True)
    shared = of_base(spec, params, MODEL, base())
    hidden = np.random.default_rng(0).normal(size=(7, E)).astype(np.float32)
    path = jnp.zeros((7, 1), jnp.int32)
    for module, head in zip(theirs, params["heads"], strict=True):
        with torch.no_grad():
            expected = module(torch.from_numpy(hidden)).numpy()
        found = head_logits(spec, head, shared, jnp.asarray(hidden), path)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_of_a_pt_file(dtype: Any, tmp_path: Path) -> None:
    state = medusa(2, 1, dtype).state_dict()
    torch.save(state, tmp_path / "heads.pt")
    _, params = load_heads(tmp_path / "heads.pt", MODEL, jnp.bfloat16)
    for i, head in enumerate(params["heads"]):
        expected = state[f"{i}.1.weight"].to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(np.asarray(head["output"], np.float32), expected)


def test_a_pt_file_of_the_layout_of_vllm(tmp_path: Path) -> None:
    state = {"blocks.0.layers.0.weight": torch.ones(E, E), "token_map": torch.tensor([3, 1])}
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    spec, params = load_heads(tmp_path, MODEL, jnp.float32)
    assert spec.vocab == 2
    np.testing.assert_array_equal(params["token_map"], [3, 1])


def test_torch_loads_what_is_saved(tmp_path: Path) -> None:
    theirs = medusa(3, 2)
    torch.save(theirs.state_dict(), tmp_path / "heads.pt")
    spec, params = load_heads(tmp_path / "heads.pt", MODEL, jnp.float32)
    save_heads(spec, params, tmp_path / "out")
    found = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())
    medusa(3, 2).load_state_dict(found)  # strict about its names


class Other:
    """What a state dict does not hold."""


@pytest.mark.parametrize("content", [[1, 2], {"0.0.linear.weight": 3}, {"0.0.linear.weight": Other()}, b""])
def test_a_pt_file_that_holds_something_else(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(content, file)
    with pytest.raises(LoadError, match=r"medusa_lm_head\.pt is damaged or cut short, or holds more") as caught:
        load_heads(tmp_path, MODEL, jnp.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_a_truncated_pt_file(kept: float, tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(medusa(2, 1).state_dict(), file)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(LoadError, match="damaged or cut short"):
        load_heads(tmp_path, MODEL, jnp.float32)
