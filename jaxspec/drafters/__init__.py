"""Drafters, one file each: the file's name is the drafter's name in a config, its `build` makes it."""

import importlib
import pkgutil

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.models.loading import LoadedModel
from jaxspec.types import Drafter, Params


def drafter_names() -> list[str]:
    """The drafters there are, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def check_drafter(name: str) -> None:
    """ConfigError lists the names there are, where this is none."""
    if name not in drafter_names():
        raise ConfigError(f"no drafter named {name!r} (there are: {', '.join(drafter_names())})")


def get_drafter(config: EngineConfig, target: LoadedModel) -> tuple[Drafter, Params]:
    """The drafter that a configuration names, and its own parameters.

    ConfigError lists the names there are, or the rules of verification that its drafts allow.
    """
    check_drafter(config.drafter)
    module = importlib.import_module(f"{__name__}.{config.drafter}")
    if config.verify not in ("auto", *module.RULES):
        rules = ", ".join(module.RULES)
        raise ConfigError(f"{config.drafter} cannot be verified by {config.verify}: verify must be auto, {rules}")
    return module.build(config, target)
