"""Storage formats, one file each: the file's name is the format's name in a config, its `FORMAT` describes it."""

import importlib
import pkgutil

from jaxspec.errors import ConfigError
from jaxspec.kv.format import Format
from jaxspec.target import platform


def format_names() -> list[str]:
    """The formats there are, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def get_format(name: str) -> Format:
    """The format of that name; "auto" is float32 on the CPU and bfloat16 elsewhere. ConfigError lists the names."""
    if name == "auto":
        name = "float32" if platform() == "cpu" else "bfloat16"
    if name not in format_names():
        raise ConfigError(f"no kv_dtype named {name!r} (there are: auto, {', '.join(format_names())})")
    return importlib.import_module(f"{__name__}.{name}").FORMAT
