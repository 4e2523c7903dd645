"""The table of chips against JAX's own, and against cycles that are known."""

from types import SimpleNamespace

import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxspec.errors import ConfigError
from jaxspec.plan.chips import chip, chip_of_device, chip_of_topology

TPUS = {"v4": "4", "v5e": "5E", "v5p": "5P", "v6e": "6E", "tpu7x": "7X"}
CORES = {"v4": 2, "v5p": 2}
"""TensorCores that are one JAX device."""


@pytest.mark.parametrize("name", TPUS)
def test_figures_are_those_of_jax(name: str) -> None:
    cores = CORES.get(name, 1)
    version = getattr(pltpu.ChipVersion, f"TPU_{'' if name == 'tpu7x' else 'V'}{TPUS[name]}")
    known, ours = pltpu.get_tpu_info_for_chip(version, cores), chip(name)
    assert ours.vmem_bytes == known.vmem_capacity_bytes
    assert ours.bf16_flops == pytest.approx(cores * known.bf16_ops_per_second, rel=0.005)
    assert ours.hbm_bytes == pytest.approx(cores * known.hbm_capacity_bytes, rel=0.01)
    # JAX puts v5p at 2.46 TB/s, its maker at 2.765.
    assert ours.hbm_bytes_per_s == pytest.approx(cores * known.mem_bw_bytes_per_second, rel=0.13)
    if name != "v4":  # JAX counts its int8 products as none
        assert (ours.int8_flops or 0) == pytest.approx(cores * known.int8_ops_per_second, rel=0.005)
    # A matrix unit multiplies as many pairs a cycle as it has cells, from v6e on twice as many.
    cells = known.mxu_column_size**2 * (2 if known.generation > 5 else 1)
    assert ours.clock_hz == pytest.approx(known.bf16_ops_per_second / (2 * cells * known.num_mxus), rel=0.005)


@pytest.mark.parametrize(("name", "cycles"), [("v5e", 960), ("v6e", 560)])
def test_cycles_of_memory(name: str, cycles: int) -> None:
    """Of 1,024 tokens with one key/value head of 128 bfloat16 numbers."""
    assert 1024 * 2 * 128 * 2 / chip(name).hbm_bytes_per_cycle == pytest.approx(cycles, abs=1)


def test_devices_share_a_chip() -> None:
    assert chip("tpu7x").devices * chip("tpu7x").hbm_bytes_per_s == pytest.approx(7.37e12)
    assert chip("tpu7x").hbm_bytes == 96 * 2**30
    assert (chip("h200").hbm_bytes_per_s, chip("h200").fp8_flops) == (4.8e12, 1.979e15)


def test_lookups() -> None:
    assert chip_of_topology("v6e:2x4") == chip("v6e")
    assert chip_of_device(SimpleNamespace(device_kind="TPU v5 lite")) == chip("v5e")


def test_errors() -> None:
    with pytest.raises(ConfigError, match=r"no chip named 'v9' .there are: v4, v5e, v5p, v6e, tpu7x, h100, h200"):
        chip_of_topology("v9:2x2")
    with pytest.raises(ConfigError, match="such as v6e:2x4, not 'v6e'"):
        chip_of_topology("v6e")
    with pytest.raises(ConfigError, match=r"abacus is not a kind of device in configs/chips.toml"):
        chip_of_device(SimpleNamespace(device_kind="abacus"))
