"""Chips that work together: TPUs of a slice, in a grid of so many each way, or GPUs that a switch joins."""

import math
from dataclasses import dataclass

from jaxspec.errors import ConfigError
from jaxspec.plan.chips import chip, chip_of_topology, slice_names, usable_bytes
from pallas_kernels.chip import Chip

Number = int | float
"""Of bytes or seconds: counts are whole, means are not."""
HOP = 1e-6
"""Seconds from one chip to the next: about a microsecond (Austin et al., "How to Scale Your Model", 2025)."""


@dataclass(frozen=True)
class Slice:
    """Chips of one kind, by the name of their topology."""

    topology: str
    chip: Chip
    """Of one JAX device: where a chip is two of them, half of it."""
    grid: tuple[int, ...]
    """Chips each way; one number where a switch joins them."""

    @property
    def devices(self) -> int:
        """JAX devices."""
        return math.prod(self.grid) * self.chip.devices

    @property
    def has_switch(self) -> bool:
        return len(self.grid) == 1

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that programs can have."""
        return usable_bytes(self.chip.name)

    def all_reduce(self, share: int, size: Number) -> float:
        """Seconds that links need for a sum of `size` bytes over `share` devices: each sends and receives all but its
        own part of it twice. On a grid along one ring both ways, as small sums mostly go; through a switch by all
        links."""
        if share == 1:
            return 0.0
        links = self.chip.links if self.has_switch else min(2, share - 1)
        return 2 * (share - 1) / share * size / (links * self.chip.link_bytes_per_s)

    def latency(self, share: int) -> float:
        """Seconds for the first bytes of such a sum: there and back along each way of the grid."""
        if share == 1:
            return 0.0
        if self.has_switch:
            return 2 * 2 * HOP
        left, hops = share, 0
        for ways in sorted((*self.grid, self.chip.devices)):
            along = math.gcd(left, ways)
            left, hops = left // along, hops + along - 1
        return 2 * hops * HOP


def slice_of(topology: str) -> Slice:
    """The slice of a topology such as v6e:2x4, or h100:8. ConfigError lists those that the chip comes in."""
    of_chip = chip_of_topology(topology)
    grid = topology.partition(":")[2]
    if grid not in slice_names(of_chip.name):
        there = ", ".join(f"{of_chip.name}:{name}" for name in slice_names(of_chip.name))
        raise ConfigError(f"no topology {topology!r} (there are: {there})")
    return Slice(topology, of_chip, tuple(map(int, grid.split("x"))))


def slices_of(name: str) -> list[Slice]:
    """All slices of a chip, the smallest first."""
    return [slice_of(f"{chip(name).name}:{grid}") for grid in slice_names(name)]
