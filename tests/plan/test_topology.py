"""Compiling for TPUs with none."""

import importlib.util
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError
from jaxspec.plan import topology
from jaxspec.plan.chips import chip_of_device, chip_of_topology
from jaxspec.plan.topology import compile_for, devices_of

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    devices_of.cache_clear()
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs libtpu: pip install 'jaxspec\[tpu\]'"):
        devices_of("v5e:2x4")


@needs_compiler
@pytest.mark.parametrize("name", ["v5e:3x5", "h100:8", "v5e:many"])
def test_unknown_topologies(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no TPU topology '{name}' .there are: v4:2x2x1, v5e:2x4"):
        devices_of(name)


@needs_compiler
@pytest.mark.parametrize("name", [*topology.EXAMPLES, "v5e:1x1", "v6e:1x1"])
def test_devices(name: str) -> None:
    chips = math.prod(map(int, name.partition(":")[2].split("x")))
    chip = chip_of_topology(name)
    assert len(devices_of(name)) == chips * chip.devices
    assert chip_of_device(devices_of(name)[0]) == chip


@needs_compiler
def test_a_program_for_one_device() -> None:
    def update(pool: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(pool, new, (8, 0))

    pool = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
    compiled = compile_for("v5e:2x4", update, pool, jax.ShapeDtypeStruct((8, 128), jnp.float32), donate=(0,))
    assert compiled.memory.argument_size_in_bytes == (1024 + 8) * 128 * 4
    assert compiled.memory.alias_size_in_bytes == 1024 * 128 * 4
    assert compiled.seconds > 0
    assert "f32[1024,128]" in compiled.hlo


@needs_compiler
def test_programs_are_not_read_from_a_cache(tmp_path: Path) -> None:
    options = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in options}
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        for _ in range(2):
            compile_for("v5e:2x4", lambda x: x + 1, x)
            assert not list(tmp_path.iterdir())
        jax.jit(lambda x: x * 2)(jnp.ones(3))
        assert list(tmp_path.iterdir())  # for what runs here it is in use again
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@needs_compiler
def test_a_program_for_a_mesh() -> None:
    mesh = Mesh(np.array(devices_of("v6e:2x4")), ("model",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)
    columns = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("model")))
    compiled = compile_for("v6e:2x4", jnp.matmul, x, columns, mesh=mesh)
    assert "all-reduce" in compiled.hlo
    assert compiled.memory.argument_size_in_bytes == (8 * 1024 + 1024 * 256 // 8) * 2
