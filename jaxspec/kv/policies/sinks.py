"""The first few tokens and the last ones stay: StreamingLLM (Xiao et al., 2024)."""

from jaxspec.config import EngineConfig
from jaxspec.kv.policy import Policy
from pallas_kernels.layout import Variant


def build(config: EngineConfig) -> Policy:
    """Every token sees the first `kv_sinks`, itself and the `kv_window - 1` before it."""
    return Policy(Variant(window=config.kv_window, sinks=config.kv_sinks), config.kv_positions == "cache")
