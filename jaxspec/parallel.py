"""Several devices that share one model (tensor parallelism): a mesh, programs that run on it, and what they tell each
other.

A program is written for what one device has: its heads, its features, its words of the vocabulary. The functions that
join the devices' parts do nothing where a program runs on a single one, so it is the same code.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import Array

from jaxspec.errors import ConfigError

MODEL = "model"
"""The mesh axis whose devices share a model."""
DATA = "data"
"""The mesh axis whose devices have the whole of it each, or share it with those of the other axis: replicas."""


def mesh_of(share: int, replicas: int = 1) -> Mesh | None:
    """The first `replicas · share` devices of all processes as a mesh (data, model); None where one device is all.

    ConfigError where there are fewer, and where several processes have more: each takes part with all it has.
    """
    there, wanted = jax.devices(), share * replicas
    if jax.process_count() > 1 and wanted != len(there):
        raise ConfigError(f"tensor_parallel {share} must be {len(there)}: a job takes all devices of its processes")
    if wanted > len(there):
        hint = ""
        if there[0].platform == "cpu":
            hint = f"; on a CPU set JAX_NUM_CPU_DEVICES={wanted} for as many host devices"
        raise ConfigError(
            f"tensor_parallel {share} × data_parallel {replicas} needs {wanted} devices, there are {len(there)}{hint}"
        )
    if wanted == 1 and jax.process_count() == 1:
        return None
    return Mesh(np.array(there[:wanted]).reshape(replicas, share), (DATA, MODEL), axis_types=(AxisType.Explicit,) * 2)


def meshes_of(mesh: Mesh | None) -> list[Mesh | None]:
    """A mesh for each replica."""
    if mesh is None:
        return [None]
    return [Mesh(row[None], mesh.axis_names, axis_types=mesh.axis_types) for row in mesh.devices]


def of_replica(tree: Any, mesh: Mesh) -> Any:
    """The part of arrays on a mesh of several replicas that the devices of one of them hold, without a copy."""

    def one(array: jax.Array) -> jax.Array:
        held = {shard.device: shard.data for shard in array.addressable_shards}
        sharding = NamedSharding(mesh, jax.typeof(array).sharding.spec)
        parts = [held[device] for device in sharding.addressable_devices]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

    return jax.tree.map(one, tree)


def on_each(fn: Callable, out_specs: Any, *arguments: Any, mesh: Mesh | None = None) -> Any:
    """The result of `fn` on what each device has of the arguments, within jit.

    Arguments say themselves how they are shared, and so on which mesh, but where none of them is an array. `out_specs`
    are those of the result; on a single device they do not matter.
    """
    meshes = [jax.typeof(array).sharding.mesh for array in jax.tree.leaves(arguments)]
    found = next((found for found in meshes if MODEL in found.axis_names), mesh)  # training has other ones
    if found is None:
        return fn(*arguments)
    in_specs = specs_of(arguments)
    return jax.shard_map(fn, mesh=found, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arguments)


def specs_of(tree: Any) -> Any:
    """How the arrays of a tree are shared, as a tree of `PartitionSpec`s; of arguments within jit, too."""
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, tree)


def share_of(mesh: Mesh | None) -> int:
    """Devices of a mesh that share a model."""
    return 1 if mesh is None else mesh.shape[MODEL]


def share() -> int:
    """Devices that share the model, in the program that is being traced."""
    return jax.lax.axis_size(MODEL) if MODEL in jax.sharding.get_abstract_mesh().manual_axes else 1


def index() -> Array | int:
    """Which of them this one is."""
    return jax.lax.axis_index(MODEL) if share() > 1 else 0


def total(x: Array) -> Array:
    """The sum of what all of them have."""
    return jax.lax.psum(x, MODEL) if share() > 1 else x


def greatest(x: Array) -> Array:
    """The maximum of what all of them have."""
    return jax.lax.pmax(x, MODEL) if share() > 1 else x


def gathered(x: Array) -> Array:
    """What all of them have, one after the other along the last dimension."""
    return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True) if share() > 1 else x
