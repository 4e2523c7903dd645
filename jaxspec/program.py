"""All that the compiled decode loop depends on besides shapes, and why a row of it stops."""

from dataclasses import dataclass
from enum import IntEnum

from jaxspec.config import SamplingParams
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.spec import ModelSpec
from jaxspec.sampling import sampling_row
from jaxspec.types import Drafter

NEUTRAL = sampling_row(SamplingParams())
"""The sampling of a row that asks for nothing."""


class Finish(IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    NOT_FINITE = 3


@dataclass(frozen=True)
class Program:
    """All that the compiled program depends on besides shapes."""

    model: ModelSpec
    pool: PoolSpec
    drafter: Drafter
    max_rounds: int = 16
    """Rounds that one call may run at most."""

    @property
    def draft_pool(self) -> PoolSpec | None:
        """The pool of the drafter's own model."""
        model: ModelSpec | None = self.drafter.model
        return None if model is None else self.pool.of_draft(model.num_layers, model.num_kv_heads, model.head_dim)

    @property
    def max_emitted(self) -> int:
        """Tokens a row emits in one round at most."""
        return self.drafter.tree.max_depth + 1
