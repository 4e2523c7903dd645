"""Drafters, one file each: the file's name is the drafter's name in a config, its `drafter()` builds it."""

import importlib
import pkgutil

from jaxspec.errors import ConfigError
from jaxspec.types import Drafter


def drafter_names() -> list[str]:
    """The drafters there are, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get_drafter(name: str) -> Drafter:
    """The drafter of that name. ConfigError lists the names there are."""
    if name not in drafter_names():
        raise ConfigError(f"no drafter named {name!r} (there are: {', '.join(drafter_names())})")
    return importlib.import_module(f"{__name__}.{name}").drafter()
