"""Where attention and the writing of pages run: the one place that chooses."""

import logging

import jax

from jaxspec.errors import ConfigError
from jaxspec.target import platform
from pallas_kernels import XLA, Kernels

log = logging.getLogger(__name__)
STAND_IN = "v5e"
"""The chip that interpret mode stands for."""


def kernels_of(implementation: str) -> Kernels:
    """auto: Pallas kernels on a TPU, XLA elsewhere. pallas on a CPU interprets them: very slow, to look into them.

    ConfigError where there are no kernels for the device.
    """
    device = platform()
    if implementation == "xla" or (implementation == "auto" and device != "tpu"):
        return XLA
    from jaxspec.plan.chips import chip, chip_of_device

    if device == "tpu":
        try:
            return Kernels("tpu", chip_of_device(jax.devices()[0]))
        except ConfigError as error:
            if implementation == "pallas":
                raise
            log.warning("attention runs in XLA and not in Pallas kernels: %s", error)
            return XLA
    if device != "cpu":
        raise ConfigError(f"implementation pallas: there are no kernels for {device} yet; take auto or xla")
    log.warning("implementation pallas without a TPU: kernels are interpreted, which is very slow")
    return Kernels("tpu", chip(STAND_IN), interpret=True)
