"""Slices of chips, and what sums over their devices take."""

import pytest

from jaxspec.errors import ConfigError
from jaxspec.plan.chips import slice_names
from jaxspec.plan.slices import HOP, slice_of, slices_of

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200")


@pytest.mark.parametrize(
    ("topology", "devices", "grid", "switched"),
    [
        ("v5e:1x1", 1, (1, 1), False),
        ("v6e:2x4", 8, (2, 4), False),
        ("v5p:2x2x2", 8, (2, 2, 2), False),
        ("tpu7x:2x2x1", 8, (2, 2, 1), False),  # two devices a chip
        ("h100:8", 8, (8,), True),
    ],
)
def test_devices(topology: str, devices: int, grid: tuple[int, ...], switched: bool) -> None:
    found = slice_of(topology)
    assert (found.devices, found.grid, found.has_switch) == (devices, grid, switched)


@pytest.mark.parametrize(
    ("topology", "gib"),
    [("v4:2x2x1", 30.75), ("v5e:2x4", 15.75), ("v5p:2x2x2", 95.74), ("v6e:2x4", 31.25), ("tpu7x:2x2x1", 94.75)],
)
def test_memory_is_what_the_compiler_calls_available(topology: str, gib: float) -> None:
    assert slice_of(topology).usable_bytes / 2**30 == pytest.approx(gib)


@pytest.mark.parametrize("name", CHIPS)
def test_slices_grow(name: str) -> None:
    sizes = [one.devices for one in slices_of(name)]
    assert sizes == sorted(set(sizes))
    assert [one.topology for one in slices_of(name)] == [f"{name}:{grid}" for grid in slice_names(name)]


def test_sums_by_hand() -> None:
    size = 8 * 8192 * 2
    ring, pair, switch = slice_of("v5e:4x4"), slice_of("v5e:2x2"), slice_of("h100:8")
    assert ring.all_reduce(1, size) == ring.latency(1) == 0
    assert ring.all_reduce(16, size) == pytest.approx(2 * 15 / 16 * size / 100e9)  # one ring, both ways
    assert pair.all_reduce(2, size) == pytest.approx(size / 50e9)  # one link between two
    assert switch.all_reduce(8, size) == pytest.approx(2 * 7 / 8 * size / 450e9)
    # tpu7x: a device has half of its chip's links.
    assert slice_of("tpu7x:2x2x1").all_reduce(8, size) == pytest.approx(2 * 7 / 8 * size / 100e9)


@pytest.mark.parametrize(
    ("topology", "share", "hops"),
    [
        ("v6e:2x4", 8, 8),  # there and back along 2 and along 4
        ("v6e:2x4", 4, 4),  # a replica's: 2 x 2
        ("v5e:4x4", 16, 12),
        ("v5p:2x2x2", 8, 6),
        ("tpu7x:2x2x1", 8, 6),
        ("h200:8", 4, 4),
    ],
)
def test_hops(topology: str, share: int, hops: int) -> None:
    assert slice_of(topology).latency(share) == pytest.approx(hops * HOP)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v6e", "such as v6e:2x4, not 'v6e'"),
        ("v9:2x4", "no chip named 'v9'"),
        ("v6e:3x5", "no topology 'v6e:3x5' .there are: v6e:1x1, v6e:2x2, v6e:2x4"),
        ("v5p:2x4", "no topology 'v5p:2x4' .there are: v5p:2x2x1"),
        ("h100:3", "no topology 'h100:3' .there are: h100:1, h100:2, h100:4, h100:8"),
        ("v6e:", "no topology 'v6e:'"),
    ],
)
def test_what_is_no_topology(topology: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slice_of(topology)
