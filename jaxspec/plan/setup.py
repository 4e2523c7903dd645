"""A model on a slice: what `jaxspec plan` counts, with everything chosen."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxspec.config import DRAFT_TOKENS, MAX_NODES, PREFILL_ROW, EngineConfig
from jaxspec.drafters import drafter_names
from jaxspec.errors import ConfigError
from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.quantization import scheme_names
from jaxspec.models.spec import ModelSpec
from jaxspec.plan.memory import AUTO
from jaxspec.plan.part import Part, part_of
from jaxspec.plan.shape import Shape, read_shape
from jaxspec.plan.slices import Slice, slice_of
from jaxspec.plan.trees import Guesses, guesses_of
from jaxspec.plan.weights import PLAIN
from jaxspec.sizes import accelerator_page

DRAFTERS = ("none", "ngram", "medusa", "draft_model")


@dataclass(frozen=True)
class Setup:
    """All that a plan depends on. `set_up` makes one from what people say."""

    shape: Shape
    slice: Slice
    batch: int
    """Sequences at once, of all replicas together."""
    context: int
    """Tokens of a sequence at most, prompt and answer."""
    prompt: int
    """Tokens of it that are the prompt."""
    weights: str
    kv_dtype: str
    replicas: int = 1
    """Groups of devices that have the whole model each."""
    drafter: str = "none"
    draft: Shape | None = None
    """draft_model: the model that drafts."""
    draft_shared: bool = True
    """Whether the devices that share the model share the draft model too, or have all of it each."""
    guesses: Guesses | None = None
    """medusa: the heads."""
    draft_tokens: int = DRAFT_TOKENS
    prefill_chunk: int = EngineConfig().prefill_chunk

    @property
    def share(self) -> int:
        """Devices that share the model."""
        return self.slice.devices // self.replicas

    @property
    def rows(self) -> int:
        """Sequences of a replica."""
        return -(-self.batch // self.replicas)

    @property
    def drafts(self) -> int:
        """Draft tokens of a round."""
        return 0 if self.drafter == "none" else self.draft_tokens

    @property
    def mean_length(self) -> float:
        """Tokens that a sequence has on average while its answer grows to the whole context."""
        return (self.prompt + self.context) / 2

    @property
    def page_size(self) -> int:
        return accelerator_page(self.kv_dtype)

    @property
    def table_width(self) -> int:
        """Pages of a sequence."""
        return -(-(self.context + self.drafts) // self.page_size)

    @cached_property
    def target(self) -> Part:
        """What a device has of the model."""
        return part_of(self.shape, self.weights, self.share)

    @cached_property
    def draft_part(self) -> Part | None:
        """What a device has of the draft model, which is quantised as the target is."""
        if self.draft is None:
            return None
        return part_of(self.draft, self.weights, self.share, replicated=not self.draft_shared)

    @property
    def pool(self) -> PoolSpec:
        """The pages of a full batch, as one device has them."""
        spec = self.target.local
        sizes = spec.num_layers, self.rows * self.table_width, self.page_size, spec.num_kv_heads, spec.head_dim
        return PoolSpec(get_format(self.kv_dtype), *sizes, self.drafts)

    @property
    def draft_pool(self) -> PoolSpec | None:
        """The draft model's, under the same page ids."""
        if self.draft_part is None:
            return None
        spec = self.draft_part.local
        return self.pool.of_draft(spec.num_layers, spec.num_kv_heads, spec.head_dim)

    def changed(self, **changes: Any) -> "Setup":
        """Another setup; ConfigError where it cannot be."""
        new = replace(self, **changes)
        _check(new)
        return new


def set_up(
    model: str,
    topology: str,
    batch: int = 1,
    context: int | None = None,
    prompt: int | None = None,
    weights: str = "auto",
    kv_dtype: str = "auto",
    replicas: int = 1,
    drafter: str = "none",
    draft_tokens: int | None = None,
    draft_shared: bool = True,
    medusa_heads: str | None = None,
    prefill_chunk: int = EngineConfig().prefill_chunk,
) -> Setup:
    """The setup of these options; `context` None is the model's own, `prompt` None half of it. `drafter` may name its
    model, as draft_model:llama-3.1-8b.

    ConfigError where they cannot be, LoadError where a model is not there.
    """
    shape = read_shape(model)
    if not isinstance(shape.spec, ModelSpec):
        raise ConfigError(f"{model} cannot be run yet: jaxspec plan kv counts its cache")
    name, colon, draft = drafter.partition(":")
    if name not in DRAFTERS:
        known = "has no plan yet" if name in drafter_names() else "is no drafter"
        raise ConfigError(f"{name!r} {known} (there are: {', '.join(DRAFTERS)})")
    if (name == "draft_model") != bool(draft) or (colon and not draft):
        raise ConfigError("a draft model, and no other drafter, is named behind a colon: draft_model:llama-3.1-8b")
    if medusa_heads and name != "medusa":
        raise ConfigError(f"medusa_heads is for the drafter medusa, not for {name}")
    context = shape.spec.max_context if context is None else context
    guesses = guesses_of(shape, medusa_heads) if name == "medusa" else None
    if draft_tokens is None:
        draft_tokens = DRAFT_TOKENS if guesses is None else min(DRAFT_TOKENS, len(guesses.paths))
    setup = Setup(
        shape=shape,
        slice=slice_of(topology),
        batch=batch,
        context=context,
        prompt=max(context // 2, 1) if prompt is None else prompt,
        weights=(shape.stored or AUTO) if weights == "auto" else weights,
        kv_dtype=AUTO if kv_dtype == "auto" else kv_dtype,
        replicas=replicas,
        drafter=name,
        draft=read_shape(draft) if draft else None,
        draft_shared=draft_shared,
        guesses=guesses,
        draft_tokens=draft_tokens,
        prefill_chunk=prefill_chunk,
    )
    _check(setup)
    return setup


def _check(setup: Setup) -> None:
    """ConfigError for what does not go together."""
    shape, devices, nodes = setup.shape, setup.slice.devices, MAX_NODES
    if setup.guesses is not None:
        nodes = len(setup.guesses.paths)
    trained = shape.spec.max_context
    formats = [*PLAIN, *scheme_names()]
    for ok, what in (
        (setup.batch >= 1, f"batch must be 1 or more, not {setup.batch}"),
        (setup.context >= 2, f"context must be 2 or more, not {setup.context}"),
        (
            setup.context <= trained,
            f"context {setup.context} is more than the {trained} tokens {shape.name} was trained for",
        ),
        (1 <= setup.prompt < setup.context, f"prompt must be 1 to context - 1 tokens, not {setup.prompt}"),
        (setup.weights in formats, f"no weights named {setup.weights!r} (there are: auto, {', '.join(formats)})"),
        (
            setup.replicas >= 1 and devices % setup.replicas == 0,
            f"data_parallel must divide the {devices} devices of {setup.slice.topology}, not be {setup.replicas}",
        ),
        (1 <= setup.draft_tokens <= nodes, f"draft_tokens must be 1 to {nodes}, not {setup.draft_tokens}"),
        (
            setup.prefill_chunk >= 1 and setup.prefill_chunk % PREFILL_ROW == 0,
            f"prefill_chunk must be a multiple of {PREFILL_ROW}, not {setup.prefill_chunk}",
        ),
    ):
        if not ok:
            raise ConfigError(what)
    _check_draft(setup)
    get_format(setup.kv_dtype)
    setup.pool.shapes()  # which formats refuse that have no such pages or heads


def _check_draft(setup: Setup) -> None:
    draft = setup.draft
    if draft is None:
        return
    if not isinstance(draft.spec, ModelSpec) or not isinstance(setup.shape.spec, ModelSpec):
        raise ConfigError(f"{draft.name} cannot be run yet, and so not draft")
    if draft.spec.vocab_size != setup.shape.spec.vocab_size:
        raise ConfigError(
            f"{draft.name} has a vocabulary of {draft.spec.vocab_size} and {setup.shape.name} one of "
            f"{setup.shape.spec.vocab_size}: it cannot draft for it"
        )
    if draft.spec.max_context < setup.context:
        raise ConfigError(f"{draft.name} was trained for {draft.spec.max_context} tokens: set context to that")
