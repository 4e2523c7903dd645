"""Plain decoding: a tree with no draft nodes."""

import jax.numpy as jnp

from jaxspec.config import EngineConfig
from jaxspec.kv.pool import Pool, PoolSpec
from jaxspec.models.loading import LoadedModel
from jaxspec.tree import Tree
from jaxspec.types import Drafter, Params, Proposal, View

RULES = ("coupled", "rejection")


def build(config: EngineConfig, target: LoadedModel) -> tuple[Drafter, Params]:
    """Proposes nothing and remembers nothing."""
    return NONE, {}


def _propose(
    params: Params, state: tuple, pool: Pool, view: View, pool_spec: PoolSpec | None
) -> tuple[Proposal, tuple, Pool]:
    batch = view.progress.token.shape[0]
    return Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool)), state, pool


NONE = Drafter(
    tree=Tree(),
    widths=(1,),
    init=lambda batch, context: (),
    admit=lambda state, row, prompt, length: state,
    propose=_propose,
    observe=lambda state, proposal, verdict, emitted, hidden: state,
)
