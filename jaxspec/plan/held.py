"""What one device holds: the very arrays that the decode loop is given, and what it needs beside them."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import EngineConfig
from jaxspec.decode import init_state
from jaxspec.drafters._heads import with_tree
from jaxspec.drafters._model import model_drafter
from jaxspec.drafters.medusa import medusa_drafter
from jaxspec.drafters.ngram import prompt_lookup
from jaxspec.drafters.none import NONE
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.heads import init_heads
from jaxspec.plan.setup import Setup
from jaxspec.plan.tiles import held_bytes
from jaxspec.plan.trees import Guesses
from jaxspec.program import Program
from jaxspec.types import Drafter

ACTIVATION = jnp.dtype(jnp.bfloat16)


class Held(NamedTuple):
    """Bytes on one device, by kind."""

    weights: int
    draft_weights: int
    """Of the draft model, or heads."""
    kv: int
    draft_kv: int
    rows: int
    """What sequences have besides their pages: sampling, history, page table, text."""
    temporaries: int
    """An estimate: activations, logits and what is drawn from them, in the widest step."""

    @property
    def arguments(self) -> int:
        """All but temporaries: what a compiled step is given."""
        return sum(self) - self.temporaries

    @property
    def total(self) -> int:
        return sum(self)


def held(setup: Setup) -> Held:
    """What each device holds of a setup."""
    tiled = not setup.slice.has_switch
    draft = 0
    if setup.draft_part is not None:
        draft = held_bytes(setup.draft_part.arrays, tiled)
    elif setup.guesses is not None:
        draft = held_bytes(heads_arrays(setup.guesses), tiled)
    return Held(
        weights=held_bytes(setup.target.arrays, tiled),
        draft_weights=draft,
        kv=_pool_bytes(setup, setup.pool, tiled),
        draft_kv=0 if setup.draft_pool is None else _pool_bytes(setup, setup.draft_pool, tiled),
        rows=_rows_bytes(setup, tiled),
        temporaries=_temporaries(setup),
    )


def arguments_of(setup: Setup) -> dict[str, int]:
    """Bytes that compiled steps are given: a plain one, a round with drafts, and prefill. They are given what they use:
    no projection to logits where prompts are written, and no more heads than the tree is deep."""
    whole, tiled = held(setup), not setup.slice.has_switch
    heads = whole.draft_weights if setup.guesses is not None else 0
    unused = 0.0
    if setup.guesses is not None:
        depth = setup.guesses.tree(setup.drafts).max_depth
        unused = heads * (1 - depth / setup.guesses.spec.num_heads)
    parts = [part for part in (setup.target, setup.draft_part) if part is not None]
    logits = sum(held_bytes(part.arrays.get("lm_head"), tiled) for part in parts)
    return {
        "plain": whole.arguments - whole.draft_weights - whole.draft_kv,
        "round": whole.arguments - round(unused),
        "prefill": whole.arguments - heads - logits,
    }


def drafter_of(setup: Setup) -> Drafter:
    """The drafter, as far as shapes go."""
    config = EngineConfig(drafter=setup.drafter, draft_tokens=setup.draft_tokens)
    if setup.drafter == "ngram":
        return prompt_lookup(setup.draft_tokens, config.draft_adaptive, config.ngram_max, config.ngram_min)
    if setup.draft_part is not None:
        return model_drafter(setup.draft_part.local, setup.target.local, config)
    if setup.guesses is None:
        return NONE
    guesses, size = setup.guesses, setup.draft_tokens
    heads = with_tree(guesses.spec, setup.target.local, guesses.paths[:size], guesses.chances[:size])
    return medusa_drafter(heads, config, ACTIVATION)


def _pool_bytes(setup: Setup, pool: PoolSpec, tiled: bool) -> int:
    return held_bytes((pool.shapes(), pool.tails(setup.rows)), tiled)


def _rows_bytes(setup: Setup, tiled: bool) -> int:
    program = Program(setup.target.local, setup.pool, drafter_of(setup))
    state = jax.eval_shape(partial(init_state, program, setup.rows, setup.table_width))
    share = setup.share
    history = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0], a.shape[1] // share), a.dtype), state.history)
    return held_bytes(state._replace(pool={}, draft_pool={}, history=history), tiled)


@lru_cache(maxsize=8)
def _heads_shapes(spec: Any) -> Any:
    output = jax.ShapeDtypeStruct((spec.vocab, spec.embed_dim), ACTIVATION)
    return jax.eval_shape(lambda output: init_heads(spec, jax.random.key(0), output, ACTIVATION), output)


def heads_arrays(guesses: Guesses) -> Any:
    """Every device has all of the heads."""
    return _heads_shapes(guesses.spec)


def _temporaries(setup: Setup) -> int:
    """The widest of the steps: a round that checks all drafts, or a chunk of a prompt, which makes no logits.

    A token has its embedding three times (before and after a layer, and normalised) and the features of a layer's two
    halves, the wider of which counts, as sums in float32 and rounded. Logits are there three times in float32: as they
    are, filtered, and with noise; a draft of a model or of heads has its own as well.
    """
    spec = setup.target.local
    features = max((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, 2 * spec.mlp_dim)
    token = 3 * spec.embed_dim * ACTIVATION.itemsize + features * (4 + ACTIVATION.itemsize)
    checked = setup.rows * (setup.drafts + 1)
    drafted = 0 if setup.drafter == "ngram" else setup.rows * setup.drafts
    logits = (3 * checked + drafted) * spec.vocab_size // setup.share * 4
    return max(checked * token + logits, setup.prefill_chunk * token)
