"""Which implementation serves attention and the writing of pages."""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pallas_kernels.chip import Chip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """Static: a program is compiled for one."""

    backend: Literal["xla", "tpu"] = "xla"
    """tpu: Pallas kernels, for what they can do; XLA does the rest."""
    chip: Chip | None = None
    """The chip that kernels size their blocks for."""
    interpret: bool = False
    """Run kernels in TPU interpret mode, where there is no TPU: slow, for tests."""


XLA = Kernels()


@cache
def tell_fallback(what: str, why: str) -> None:
    """Log, once, that XLA does what a kernel does not."""
    log.warning("%s runs in XLA and not in a Pallas kernel: %s", what, why)
