"""Nothing is evicted."""

from jaxspec.config import EngineConfig
from jaxspec.kv.policy import FULL, Policy


def build(config: EngineConfig) -> Policy:
    """Every token sees all before it."""
    return FULL
