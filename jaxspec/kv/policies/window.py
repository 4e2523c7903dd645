"""The last tokens stay: what a window without sinks makes of models that were not trained with one (Xiao et al., 2024,
section 3)."""

from jaxspec.config import EngineConfig
from jaxspec.kv.policy import Policy
from pallas_kernels.layout import Variant


def build(config: EngineConfig) -> Policy:
    """Every token sees itself and the `kv_window - 1` before it."""
    return Policy(Variant(window=config.kv_window))
