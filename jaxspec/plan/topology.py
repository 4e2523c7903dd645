"""Compiling for TPUs where there are none: the compiler is in libtpu, and runs on any x86 Linux machine.

Where there is no TPU, `ENVIRONMENT` keeps jax and libtpu from looking for one. jax reads JAX_PLATFORMS when it is
imported, and libtpu the rest when it is loaded, by the first compilation: set it before, or give it to a child process.
`compile_for` sets what is libtpu's and not set by then.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError
from jaxspec.plan.chips import chip_of_topology

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # arrays that a program makes on the way; libtpu would look for a TPU for them
    "TPU_SKIP_MDS_QUERY": "1",  # no cloud is asked what this machine is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_HOST_BOUNDS": "1,1,1",  # nor what hosts there are, and no complaint that it is not known
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
}
EXAMPLES = ("v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
OPTIONS: dict[str, dict[str, str | bool]] = {
    # Else 16-bit weights are copied into a taller tiling, all of them.
    "tpu7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
}
"""Of the compiler."""
CONFIGURATIONS = {"v4": {"chip_config_name": "megacore"}}
"""What else a topology needs so that its devices are those that JAX has on such machines."""


class Compiled(NamedTuple):
    """A program for TPUs, and the seconds that tracing and compiling it took."""

    program: jax.stages.Compiled
    seconds: float

    @property
    def hlo(self) -> str:
        """The optimised program as text."""
        return self.program.as_text() or ""

    @property
    def memory(self) -> Any:
        """Bytes of arguments, results and temporaries on a device, as jax's `CompiledMemoryStats`."""
        return self.program.memory_analysis()


def compile_for(
    topology: str, fn: Callable, *arguments: Any, donate: Sequence[int] = (), mesh: Mesh | None = None
) -> Compiled:
    """`fn` compiled for a topology such as v6e:2x4, to be looked at: it cannot run here.

    Arguments are pytrees of `jax.ShapeDtypeStruct`. The program is for the first device of the topology, or for a
    `mesh` of `devices_of` it; arguments that do not say how they are sharded are replicated. Those numbered in `donate`
    are given up to the results. ConfigError where libtpu is missing or the topology is not known; what the compiler
    refuses is a `jax.errors.JaxRuntimeError`.
    """
    devices = devices_of(topology)
    mesh = Mesh(np.array(devices[:1]), ("device",)) if mesh is None else mesh
    began = time.perf_counter()
    with jax.set_mesh(mesh), _uncached():
        placed = jax.tree.map(lambda argument: _placed(argument, mesh), arguments)
        lowered = jax.jit(fn, donate_argnums=tuple(donate)).lower(*placed)
        program = lowered.compile(compiler_options=OPTIONS.get(chip_of_topology(topology).name))
    return Compiled(program, time.perf_counter() - began)


@contextmanager
def _uncached() -> Iterator[None]:
    """Without jax's cache of programs on disk: those of absent devices cannot be read back."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at the option once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _placed(argument: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    if argument.sharding is not None:
        return argument
    return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


@cache
def devices_of(topology: str) -> list[jax.Device]:
    """The devices of a topology, to compile for. ConfigError as of `compile_for`."""
    chip = chip_of_topology(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("compiling for TPUs needs libtpu: pip install 'jaxspec[tpu]'")
    for name, value in ENVIRONMENT.items():
        if name != "JAX_PLATFORMS":  # too late for this process, and unasked for in its children
            os.environ.setdefault(name, value)
    settings: dict[str, Any] = {**CONFIGURATIONS.get(chip.name, {})}
    if topology.endswith(":1x1"):
        settings["chips_per_host_bounds"] = [1, 1, 1]  # of which a host has four elsewhere
    try:
        return list(topologies.get_topology_desc(topology, "tpu", **settings).devices)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"no TPU topology {topology!r} (there are: {', '.join(EXAMPLES)} and more): {reason}"
        ) from error
