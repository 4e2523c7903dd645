"""How long a step takes at least: what memory, matrix units and links each need for it.

A pass through a model reads its weights once and the keys and values of every sequence, multiplies each token with all
weights, and sums up activations over the devices twice a layer. Weights in fewer bits are multiplied in bfloat16
(`jaxspec.models.linear`).

The times are added up, as if memory, matrix units and links took turns: that meets published figures (`EFFICIENCY`),
which the longest of the three alone would miss by up to 58 %. Only the way of a sum's first bytes is taken to pass
while weights are read: those figures have no room for it.
"""

import math
from typing import NamedTuple

from jaxspec.config import PREFILL_ROW
from jaxspec.plan.held import ACTIVATION
from jaxspec.plan.part import Part
from jaxspec.plan.setup import Setup
from jaxspec.plan.slices import Number, Slice
from jaxspec.plan.trees import Guesses

EFFICIENCY = 0.95
"""Of HBM's bandwidth, what a step gets. With it nine of the ten batches of the one published table that says batch,
formats and chips are met within 9 %, the largest within 19 %: Llama 3.1 70B, weights and cache in int8, on a v5e 4x4
slice (github.com/jax-ml/jax-llm-examples, llama3/README.md, 2025). How full its caches of 2,048 tokens were it does not
say; half is assumed."""
SAMPLING_SUMS = 6
"""Small sums over the devices that the sampling of greedy tokens waits for."""
LOGIT_PASSES = 2
"""Times that logits go through memory: written and read."""


class Cost(NamedTuple):
    """Seconds of a step."""

    hbm: float = 0.0
    """Memory's, at the efficiency that it has."""
    mxu: float = 0.0
    """Matrix units'."""
    ici: float = 0.0
    """Links', for the bytes."""
    hops: float = 0.0
    """Links', for the first byte of every sum."""

    @property
    def seconds(self) -> float:
        return max(self.hbm, self.hops) + self.mxu + self.ici

    def times(self, count: Number) -> "Cost":
        """Of so many such steps, one after the other."""
        return Cost(*(part * count for part in self))


class Work(NamedTuple):
    """What is done on one device."""

    read: Number = 0
    """Bytes from and to memory."""
    products: Number = 0
    """Multiplications, each with an addition."""
    summed: Number = 0
    """Bytes that are summed up over the devices."""
    sums: Number = 0
    """How often."""

    def plus(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def cost(self, slice_: Slice, share: int, efficiency: float) -> Cost:
        """On devices of a slice of which so many share the model."""
        chip = slice_.chip
        return Cost(
            hbm=self.read / (chip.hbm_bytes_per_s * efficiency),
            mxu=2 * self.products / chip.bf16_flops,
            ici=slice_.all_reduce(share, self.summed),
            hops=self.sums * slice_.latency(share),
        )


def layers_work(part: Part, kv_token_bytes: Number, tokens: Number, read: Number, seen: Number) -> Work:
    """Of all layers for so many tokens: `read` cached tokens come from memory in all, and each token looks at
    `seen` of them."""
    spec = part.local
    sums = (2 * spec.num_layers if spec.share > 1 else 0) + 1  # after both halves of a layer, and of embeddings
    heads = spec.num_layers * spec.num_heads * spec.head_dim
    return Work(
        read=part.layer_bytes + (read + tokens) * kv_token_bytes,
        products=tokens * (spec.layer_count + 2 * seen * heads),
        summed=sums * tokens * spec.embed_dim * ACTIVATION.itemsize,
        sums=sums,
    )


def logits_work(part: Part, tokens: Number) -> Work:
    """Of the logits of so many tokens, and of a choice from them."""
    logits = tokens * part.local.vocab_size / part.share * 4
    return Work(part.head_bytes + LOGIT_PASSES * logits, tokens * part.head_count, 0, SAMPLING_SUMS)


def verify_work(setup: Setup, drafts: int, rows: Number, length: Number) -> Work:
    """Of a round of so many sequences that checks `drafts` drafts each; 0 is plain decoding."""
    tokens = rows * (drafts + 1)
    layers = layers_work(setup.target, setup.pool.token_bytes, tokens, rows * length, length)
    return layers.plus(logits_work(setup.target, tokens))


def verify_cost(setup: Setup, drafts: int, rows: Number, length: Number, efficiency: float) -> Cost:
    return verify_work(setup, drafts, rows, length).cost(setup.slice, setup.share, efficiency)


def draft_cost(setup: Setup, drafts: int, rows: Number, length: Number, efficiency: float) -> Cost:
    """What making the drafts takes. A draft model runs its last two tokens for each; heads run level by level."""
    if setup.draft_part is not None and setup.draft_pool is not None:
        part = setup.draft_part
        step = layers_work(part, setup.draft_pool.token_bytes, 2 * rows, rows * length, length)
        return step.plus(logits_work(part, rows)).cost(setup.slice, part.share, efficiency).times(drafts)
    if setup.guesses is not None:
        return _heads_work(setup.guesses, setup.share, drafts, rows).cost(setup.slice, setup.share, efficiency)
    return Cost()


def _heads_work(guesses: Guesses, share: int, drafts: int, rows: Number) -> Work:
    """The blocks of as many heads as the tree is deep, and as often the output projection of what heads guess."""
    spec, depth = guesses.spec, guesses.tree(drafts).max_depth
    numbers = spec.layers * spec.embed_dim**2
    if spec.conditioned:  # on one more token each: (2 + 3 + ..) embeddings in, one out
        numbers = spec.conditioned * spec.embed_dim * (depth + 5) / 2
    output = spec.vocab * spec.embed_dim / share
    read = (numbers + output) * ACTIVATION.itemsize + LOGIT_PASSES * rows * spec.vocab / share * 4
    return Work(depth * read, depth * rows * (numbers + output), 0, depth * SAMPLING_SUMS)


def prefill_costs(setup: Setup, efficiency: float) -> list[Cost]:
    """Of a chunk of a prompt, and of the same for a draft model, in the middle of the prompt: each row of a chunk reads
    the cache for itself."""
    chunk, seen = min(setup.prefill_chunk, setup.prompt), setup.prompt / 2
    read = math.ceil(chunk / PREFILL_ROW) * seen
    models = [(setup.target, setup.pool)]
    if setup.draft_part is not None and setup.draft_pool is not None:
        models.append((setup.draft_part, setup.draft_pool))
    return [
        layers_work(part, pool.token_bytes, chunk, read, seen).cost(setup.slice, part.share, efficiency)
        for part, pool in models
    ]
