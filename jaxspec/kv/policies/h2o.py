"""The last tokens stay, and those that others looked at most: heavy hitters (H2O, Zhang et al., 2023)."""

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.kv.formats import get_format
from jaxspec.kv.policy import Policy
from pallas_kernels.layout import Variant


def build(config: EngineConfig) -> Policy:
    """The last `kv_window` tokens stay, and `kv_heavy` of all others. ConfigError where slots cannot move singly."""
    form = get_format(config.kv_dtype)
    if form.group:
        raise ConfigError(
            f"kv_policy h2o moves single tokens, and kv_dtype {config.kv_dtype} scales keys over groups of "
            f"{form.group}: take kv_dtype int8 or fp8"
        )
    return Policy(Variant(mass=True), heavy=config.kv_heavy, recent=config.kv_window)
