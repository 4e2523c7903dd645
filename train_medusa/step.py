"""One step of training, jitted over a mesh of devices.

There is one path for any number of them: rows of a batch are split over the devices; parameters and optimiser are
copied to each, or split as well (FSDP).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec.models.heads import HeadsSpec, init_heads, of_base
from jaxspec.models.spec import ModelSpec
from jaxspec.types import Params
from train_medusa.base import dense_hidden
from train_medusa.config import LearnConfig
from train_medusa.joint import OwnTally, own_tally
from train_medusa.loss import Batch, Tally, heads_loss, shared_of

AXIS = "devices"


class Frozen(NamedTuple):
    """What training reads and never changes."""

    base: Params
    """The model as it was loaded."""
    token_map: Params
    """`{"token_map": ids}` where heads guess some tokens only, else nothing."""


class State(NamedTuple):
    """What training changes."""

    params: Params
    """`heads`, and `base` where the model is trained too."""
    optimiser: Any
    step: Int[Array, ""]


class Sums(NamedTuple):
    """What one or more batches gave."""

    heads: Tally
    own: OwnTally | None
    """Of the model, where it is trained too."""


@dataclass(frozen=True)
class Job:
    """All that the programs of a run depend on."""

    config: LearnConfig
    spec: HeadsSpec
    model: ModelSpec
    steps: int
    mesh: Mesh
    """Of one axis, AXIS."""

    def sharding(self, array: Any) -> NamedSharding:
        """Where an array of parameters or optimiser lies: for FSDP split along its largest dimension that the devices
        divide evenly, else on each device."""
        shape = array.shape
        fitting = [axis for axis, size in enumerate(shape) if size and size % self.mesh.size == 0]
        if not (self.config.fsdp and fitting):
            return NamedSharding(self.mesh, PartitionSpec())
        axis = max(fitting, key=lambda axis: shape[axis])
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXIS))

    def place(self, tree: Any) -> Any:
        """Arrays where `sharding` wants them."""
        return jax.tree.map(lambda array: jax.device_put(array, self.sharding(array)), tree)

    def feed(self, batch: Batch) -> Batch:
        """A batch of numpy arrays on the devices, its rows split over them."""
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(AXIS)))

    def optimiser(self) -> optax.GradientTransformation:
        """AdamW of clipped gradients, the heads and the model each at a rate of their own."""
        config, peaks = self.config, {"heads": self.config.lr}
        if config.method == "medusa-2":
            peaks["base"] = config.base_lr
        parts: dict[Any, optax.GradientTransformation] = {
            name: optax.adamw(rate_of(config, self.steps, peak), weight_decay=config.weight_decay)
            for name, peak in peaks.items()
        }
        labels = {name: name for name in peaks}
        chain = optax.chain(optax.clip_by_global_norm(config.clip), optax.multi_transform(parts, labels))
        if config.accumulate == 1:
            return chain
        return optax.MultiSteps(chain, config.accumulate).gradient_transformation()


def mesh_of(devices: list[Any]) -> Mesh:
    """The devices in one row."""
    return Mesh(devices, (AXIS,))


def steps_of(config: LearnConfig, rows: int) -> int:
    """Steps of a run over so many rows: whole updates."""
    steps = config.steps or math.ceil(config.epochs * rows / config.batch)
    return math.ceil(steps / config.accumulate) * config.accumulate


def rate_of(config: LearnConfig, steps: int, peak: float) -> optax.Schedule:
    """The learning rate by the number of updates made: up from 0 in a line, down to 0 as a cosine."""
    updates = steps // config.accumulate
    warmup = min(round(config.warmup * updates), updates - 1)
    return optax.warmup_cosine_decay_schedule(0.0 if warmup else peak, peak, warmup, updates)


def first_state(job: Job, seed: int) -> tuple[Callable[[Frozen], State], Callable[[Frozen], State]]:
    """Where training begins, and its mere shapes, types and shardings: two functions of what is frozen."""

    def draw(frozen: Frozen) -> State:
        output = of_base(HeadsSpec(1, job.model.embed_dim, job.spec.vocab), frozen.token_map, job.model, frozen.base)
        params = init_heads(job.spec, jax.random.key(seed), output["output"])
        if job.config.method == "medusa-2":
            params["base"] = jax.tree.map(lambda a: jnp.array(a, jnp.float32), frozen.base)
        return State(params, job.optimiser().init(params), jnp.int32(0))

    def like(frozen: Frozen) -> State:
        shapes = jax.eval_shape(draw, frozen)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=job.sharding(a)), shapes)

    def drawn(frozen: Frozen) -> State:
        return jax.jit(draw, out_shardings=jax.tree.map(lambda a: a.sharding, like(frozen)))(frozen)

    return drawn, like


def objective(job: Job, params: Params, frozen: Frozen, batch: Batch) -> tuple[Float[Array, ""], Sums]:
    """The loss of a batch, and what it is made of.

    Medusa-1: that of the heads. Medusa-2: the model's own, heads_weight times that of the heads, and distill times its
    divergence from the untouched model (Cai et al., 2024, sections 2.2 and 2.3).
    """
    config, base = job.config, params.get("base", frozen.base)
    places = batch.tokens, batch.segment, batch.position
    hidden = dense_hidden(base, job.model, *places) if batch.hidden is None else batch.hidden
    hidden = hidden.astype(jnp.float32)
    # The model's projection is no part of what heads learn, not even where the model is trained.
    shared = jax.lax.stop_gradient(shared_of(job.spec, frozen.token_map, job.model, base))
    loss, tally = heads_loss(
        job.spec, params["heads"], shared, batch, hidden, decay=config.decay, soft=config.soft, chunk=config.chunk
    )
    if "base" not in params:
        return loss, Sums(tally, None)
    before = dense_hidden(frozen.base, job.model, *places)
    own = own_tally(job.model, base, frozen.base, batch, hidden, before, config.chunk)
    labels = jnp.maximum(own.labels, 1)
    return own.loss / labels + config.heads_weight * loss + config.distill * own.divergence / labels, Sums(tally, own)


def programs(
    job: Job, like: State
) -> tuple[Callable[[State, Frozen, Batch], tuple[State, Sums]], Callable[[Params, Frozen, Batch], Sums]]:
    """The step of training, which takes a state over (its buffers are donated), and the measuring of a batch with given
    parameters."""
    optimiser, of_batch = job.optimiser(), partial(objective, job)
    here = jax.tree.map(lambda a: a.sharding, like)

    def step(state: State, frozen: Frozen, batch: Batch) -> tuple[State, Sums]:
        gradient, sums = jax.grad(of_batch, has_aux=True)(state.params, frozen, batch)
        updates, memory = optimiser.update(gradient, state.optimiser, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, memory, state.step + 1), sums

    def measure(params: Params, frozen: Frozen, batch: Batch) -> Sums:
        return of_batch(params, frozen, batch)[1]

    everywhere = NamedSharding(job.mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(here, everywhere)), jax.jit(measure, out_shardings=everywhere)
