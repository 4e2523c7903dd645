"""Where parameters go: to one device, or to those of this process among several that share a model."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.models.sharding import shared_dimension
from jaxspec.parallel import MODEL


class Home(NamedTuple):
    """Devices that share a model, and what becomes of the arrays that are read for them."""

    devices: int
    """How many share it, those of other processes included."""
    own: tuple[int, ...]
    """Which of them are filled here, in ascending order."""
    put: Callable[[Sequence[np.ndarray], PartitionSpec], Any]
    """Makes an array of what each of `own` has of it, or of the one part that all have alike."""


def home_of(mesh: Mesh | None) -> Home:
    """The default device, or those of a mesh: what of it is in this process is filled here."""
    if mesh is None:
        return Home(1, (0,), lambda shards, spec: _on_device(shards[0]).block_until_ready())
    axis, process = mesh.axis_names.index(MODEL), jax.process_index()
    places = {device: at[axis] for at, device in np.ndenumerate(mesh.devices) if device.process_index == process}
    own = tuple(sorted(set(places.values())))

    def put(shards: Sequence[np.ndarray], spec: PartitionSpec) -> jax.Array:
        shared, shape = shared_dimension(spec), list(shards[0].shape)
        if shared is not None:
            shape[shared] *= mesh.shape[MODEL]
        arrays = [_on_device(shards[0 if shared is None else own.index(at)], device) for device, at in places.items()]
        whole = jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec), arrays)
        return whole.block_until_ready()

    return Home(mesh.shape[MODEL], own, put)


def _on_device(array: np.ndarray, device: jax.Device | None = None) -> jax.Array:
    return jax.device_put(array, device, may_alias=True)
