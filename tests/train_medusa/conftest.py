"""The tiny model as training has it, and as the decode loop runs it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import forward
from jaxspec.types import Params, Sequences
from pallas_kernels import Rows

LONGEST = 128


@pytest.fixture(scope="session")
def loaded(tiny_model: Path) -> LoadedModel:
    """The tiny model, in float32."""
    return load_model(str(tiny_model), "float32", progress=False)


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes all devices there are, and tests have several."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: first)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")


@partial(jax.jit, static_argnames=("spec", "pool_spec"))
def _paged(params, rows, tokens, pool, sequences, *, spec, pool_spec):
    positions = jnp.arange(tokens.shape[1])[None]
    return forward(params, spec, pool_spec, rows, tokens, positions, None, pool, sequences)[0][0]


def _alone(params: Params, spec: ModelSpec, tokens: Sequence[int]) -> np.ndarray:
    pool_spec = PoolSpec(get_format("float32"), spec.num_layers, 4, LONGEST // 4, spec.num_kv_heads, spec.head_dim)
    none = jnp.zeros((1, 1), jnp.int32)
    sequences = Sequences(jnp.array([[[2, 0, 3, 1]]], jnp.int32), none, none, none[0])
    rows = Rows(*(jnp.array([value], jnp.int32) for value in (0, 0, len(tokens))))
    padded = jnp.asarray(np.pad(np.int32(tokens), (0, LONGEST - len(tokens))))[None]
    hidden = _paged(params, rows, padded, pool_spec.allocate(1), sequences, spec=spec, pool_spec=pool_spec)
    return np.asarray(hidden)[: len(tokens)]


@pytest.fixture(scope="session")
def alone() -> Callable[[Params, ModelSpec, Sequence[int]], np.ndarray]:
    """(params, spec, tokens) -> the hidden states [T, E] that the page pool's forward gives one text of 128 at most."""
    return _alone
