"""The accelerators of configs/chips.toml."""

from functools import cache
from typing import Any

import msgspec

from jaxspec.config import find_config, read_toml
from jaxspec.errors import ConfigError
from pallas_kernels.chip import Chip


class _Figures(msgspec.Struct, forbid_unknown_fields=True):
    """What the file says of a whole chip."""

    kinds: list[str]
    """`device_kind` of its JAX devices."""
    clock_mhz: float
    hbm_gib: float
    usable_gib: float
    hbm_gb_per_s: float
    vmem_kib: int
    bf16_tflops: float
    link_gb_per_s: float
    """One way; the devices of a chip share its links."""
    links: int
    slices: list[str]
    """Chips each way of what it comes in, the smallest first; a single number where a switch joins them."""
    int8_tflops: float | None = None
    fp8_tflops: float | None = None
    devices: int = 1


def chip(name: str) -> Chip:
    """The chip of that name. ConfigError lists those there are."""
    figures = _figures(name)
    share = 1 / figures.devices
    return Chip(
        name=name,
        clock_hz=figures.clock_mhz * 1e6,
        hbm_bytes=round(figures.hbm_gib * 2**30 * share),
        hbm_bytes_per_s=figures.hbm_gb_per_s * 1e9 * share,
        vmem_bytes=figures.vmem_kib * 2**10,
        bf16_flops=figures.bf16_tflops * 1e12 * share,
        int8_flops=None if figures.int8_tflops is None else figures.int8_tflops * 1e12 * share,
        fp8_flops=None if figures.fp8_tflops is None else figures.fp8_tflops * 1e12 * share,
        link_bytes_per_s=figures.link_gb_per_s * 1e9 * share,
        links=figures.links,
        devices=figures.devices,
    )


def chip_of_topology(topology: str) -> Chip:
    """The chip of a topology such as v6e:2x4. ConfigError where it is not one, or of a chip that is not known."""
    name, colon, _ = topology.partition(":")
    if not colon:
        raise ConfigError(f"a topology is a chip and how many there are each way, such as v6e:2x4, not {topology!r}")
    return chip(name)


def chip_of_device(device: Any) -> Chip:
    """The chip of a JAX device, by its `device_kind`. ConfigError where it is not in the table."""
    for name, figures in _table().items():
        if device.device_kind in figures.kinds:
            return chip(name)
    raise ConfigError(f"{device.device_kind} is not a kind of device in configs/chips.toml ({', '.join(_table())})")


def usable_bytes(name: str) -> int:
    """Memory of one of a chip's devices that programs can have."""
    return round(_figures(name).usable_gib * 2**30 / _figures(name).devices)


def slice_names(name: str) -> list[str]:
    """What a chip comes in, such as 2x4, the smallest first."""
    return _figures(name).slices


def _figures(name: str) -> _Figures:
    if name not in _table():
        raise ConfigError(f"no chip named {name!r} (there are: {', '.join(_table())})")
    return _table()[name]


@cache
def _table() -> dict[str, _Figures]:
    return msgspec.convert(read_toml(find_config("", "chips")), dict[str, _Figures])
