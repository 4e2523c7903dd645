"""Eviction policies, one file each: the file's name is the policy's name in a config, its `build` makes it."""

import importlib
import pkgutil

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.kv.policy import Policy


def policy_names() -> list[str]:
    """The policies there are, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def get_policy(config: EngineConfig) -> Policy:
    """The policy that a configuration names. ConfigError lists the names there are."""
    if config.kv_policy not in policy_names():
        raise ConfigError(f"no kv_policy named {config.kv_policy!r} (there are: {', '.join(policy_names())})")
    return importlib.import_module(f"{__name__}.{config.kv_policy}").build(config)
