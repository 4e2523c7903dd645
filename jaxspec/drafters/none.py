"""Plain decoding: a tree with no draft nodes."""

import jax.numpy as jnp

from jaxspec.tree import Tree
from jaxspec.types import Drafter, Proposal


def drafter() -> Drafter:
    """Proposes nothing and remembers nothing."""
    return Drafter(
        tree=Tree(),
        init=lambda spec, batch: (),
        admit=lambda state, row, tokens: state,
        propose=_propose,
        observe=lambda state, verdict: state,
    )


def _propose(params, state, sequences, progress):
    batch = progress.token.shape[0]
    return Proposal(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool)), state
