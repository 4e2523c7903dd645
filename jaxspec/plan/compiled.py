"""The true steps of a setup, through the TPU compiler: what they take, and what it made of them."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec import decode
from jaxspec.config import PREFILL_ROW
from jaxspec.drafters.none import NONE
from jaxspec.errors import ConfigError
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.heads import of_base
from jaxspec.models.sharding import partition
from jaxspec.parallel import DATA, MODEL
from jaxspec.plan.held import drafter_of, heads_arrays
from jaxspec.plan.setup import Setup
from jaxspec.plan.topology import compile_for, devices_of
from jaxspec.program import Program
from jaxspec.types import Models
from pallas_kernels import Kernels, Rows


class Step(NamedTuple):
    """A compiled program of a setup; bytes are those of one device."""

    name: str
    arguments: int
    """What it is given: weights, pages, the state of all rows."""
    temporaries: int
    seconds: float
    """That tracing and compiling took."""
    all_reduces: int
    """Sums over the devices in a layer."""
    overlapped: int
    """Of these, how many begin and end in operations of their own, so that others can run in between."""
    pool_copies: int
    """Copies of an array of pages."""


def compile_steps(setup: Setup) -> list[Step]:
    """A plain round, a round of the setup's drafter if it has one, and a chunk of prompts, each with Pallas kernels.

    ConfigError where there is no compiler for the slice.
    """
    if setup.slice.has_switch:
        raise ConfigError(f"there is no compiler for {setup.slice.topology} here: --compile is for TPUs")
    mesh = _mesh(setup)
    kernels = Kernels("tpu", setup.slice.chip)
    plain = Program(setup.target.local, replace(setup.pool, kernels=kernels, look_ahead=0), NONE)
    with jax.set_mesh(mesh):  # what is drafted depends on what it costs there
        drafter = drafter_of(setup)
    own = Program(setup.target.local, replace(setup.pool, kernels=kernels), drafter)
    models = Models(_arrays(setup.target.arrays, mesh), _draft(setup, mesh))
    steps = [_round("plain", setup, plain, models._replace(draft={}), mesh)]
    if setup.drafts:
        steps.append(_round(f"{setup.drafter}, {setup.drafts + 1} tokens", setup, own, models, mesh))
    return [*steps, _prefill(setup, own, models, mesh)]


def _unjitted(function: Any) -> Callable:
    """What it was before jit, which does not say which arguments `compile_for` is to give up."""
    return function.__wrapped__


def _mesh(setup: Setup) -> Mesh:
    """Of one replica; all are alike."""
    devices = np.array(devices_of(setup.slice.topology)[: setup.share]).reshape(1, -1)
    return Mesh(devices, (DATA, MODEL), axis_types=(AxisType.Explicit,) * 2)


def _arrays(local: Any, mesh: Mesh, replicated: bool = False) -> Any:
    """The arrays of all devices, by those of one."""

    def one(array: jax.ShapeDtypeStruct, spec: Any) -> jax.ShapeDtypeStruct:
        shape = [size * (mesh.shape[MODEL] if axis == MODEL else 1) for size, axis in _axes(array.shape, spec)]
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, local, partition(local, replicated))


def _axes(shape: tuple[int, ...], spec: Any) -> list[tuple[int, Any]]:
    return list(zip(shape, [*spec, *[None] * (len(shape) - len(spec))], strict=True))


def _draft(setup: Setup, mesh: Mesh) -> Any:
    if setup.draft_part is not None:
        return _arrays(setup.draft_part.arrays, mesh, not setup.draft_shared)
    if setup.guesses is None:
        return {}
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
        heads_arrays(setup.guesses),
    )


def _whole(setup: Setup, models: Models) -> Models:
    """With what heads use of the model, which is no argument of its own."""
    if setup.guesses is None or not models.draft:
        return models
    spec = setup.guesses.spec
    return models._replace(draft=models.draft | of_base(spec, models.draft, setup.target.local, models.target))


def _state(setup: Setup, program: Program, mesh: Mesh) -> Any:
    with jax.set_mesh(mesh):
        return jax.eval_shape(partial(decode.init_state, program, setup.rows, setup.table_width, mesh))


def _round(name: str, setup: Setup, program: Program, models: Models, mesh: Mesh) -> Step:
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def run(models: Models, *rest: Any) -> Any:
        return _unjitted(decode.run)(_whole(setup, models), *rest, program=program)

    return _compile(name, setup, program, mesh, run, models, number, number)


def _prefill(setup: Setup, program: Program, models: Models, mesh: Mesh) -> Step:
    numbers: Any = jax.ShapeDtypeStruct((setup.prefill_chunk // PREFILL_ROW,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((setup.prefill_chunk,), jnp.int32)
    prefill = partial(_unjitted(decode.prefill), program=program, width=PREFILL_ROW)
    chunk = Rows(numbers, numbers, numbers), tokens
    return _compile(f"prefill, {setup.prefill_chunk} tokens", setup, program, mesh, prefill, models, *chunk)


def _compile(name: str, setup: Setup, program: Program, mesh: Mesh, function: Any, models: Models, *rest: Any) -> Step:
    state = _state(setup, program, mesh)
    compiled = compile_for(setup.slice.topology, function, models, state, *rest, donate=(1,), mesh=mesh)
    memory, hlo = compiled.memory, compiled.hlo
    sums = _in_layer(hlo)
    return Step(
        name,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        compiled.seconds,
        len(sums),
        sum("-start" in line for line in sums),
        _pool_copies(hlo, program.pool),
    )


def _in_layer(hlo: str) -> list[str]:
    """The sums over devices in the body of a loop over layers: where attention is. tpu7x calls programs of its
    SparseCores for them."""
    found, sums = [], r".* all-reduce(?:-start)?\(.*|.*%all-reduce\S* = .* call-start\(.*"
    for body in re.split(r"\n(?=%|ENTRY)", hlo):
        if "/paged_attention" in body:
            found = max(found, re.findall(sums, body), key=len)
    return found


def _pool_copies(hlo: str, pool: PoolSpec) -> int:
    shapes = {f"[{','.join(map(str, array.shape))}]" for array in pool.shapes().values()}
    copies = [line for line in hlo.splitlines() if re.search(r" copy(-start)?\(", line)]
    return sum(any(shape in line for shape in shapes) for line in copies)
