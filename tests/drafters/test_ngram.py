"""Prompt lookup against a plain search."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.drafters import _pace
from jaxspec.drafters.ngram import prompt_lookup
from jaxspec.types import Proposal, Verdict
from tests.drafters.test_drafters import progress, view

COUNT, CONTEXT = 5, 40


def search(tokens: list[int], longest: int, shortest: int) -> list[int] | None:
    """What follows the latest longest earlier copy of the end, going on in circles where it runs into the end."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 2, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[-size:]:
                known = list(tokens)
                for i in range(COUNT):
                    known.append(known[end + 1 + i])
                return known[len(tokens) :]
    return None


LOOKUPS = {key: prompt_lookup(COUNT, False, *key) for key in ((4, 2), (3, 1))}


@partial(jax.jit, static_argnames="key")
def look_up(texts: jax.Array, lengths: jax.Array, key: tuple[int, int]):
    drafter = LOOKUPS[key]
    state = drafter.init(5, CONTEXT)
    for row in range(5):
        state = drafter.admit(state, jnp.int32(row), texts[row], lengths[row])
    return drafter.propose({}, state, {}, view(progress()), None)[0]


def found(texts: list[list[int]], key: tuple[int, int], size: int = CONTEXT) -> list[list[int] | None]:
    padded = np.stack([np.pad(np.int32(text), (0, size - len(text)), constant_values=7) for text in texts])
    proposal = look_up(jnp.asarray(padded), jnp.asarray([len(text) for text in texts]), key)
    return [proposal.tokens[row].tolist() if proposal.valid[row].all() else None for row in range(len(texts))]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=5, max_size=5))
def test_equals_a_plain_search(texts: list[list[int]]) -> None:
    for key in LOOKUPS:
        assert found(texts, key) == [search(text, *key) for text in texts]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 3), min_size=CONTEXT - 3, max_size=2 * CONTEXT), min_size=5, max_size=5))
def test_of_longer_texts_the_last_tokens_are_searched(texts: list[list[int]]) -> None:
    for key in LOOKUPS:
        assert found(texts, key, 2 * CONTEXT) == [search(text[-CONTEXT:], *key) for text in texts]


def test_output_is_searched_too_and_another_request_is_not() -> None:
    drafter = prompt_lookup(3, False, 4, 2)
    state = drafter.init(5, CONTEXT)
    long = jnp.asarray(np.arange(20, 60), jnp.int32)
    state = drafter.admit(state, jnp.int32(0), long, jnp.int32(40 - 1))
    state = drafter.admit(state, jnp.int32(0), jnp.asarray([1, 2, 3, 4]), jnp.int32(4))
    verdict = Verdict(
        jnp.tile(jnp.asarray([[9, 1, 2, 30]]), (5, 1)), jnp.zeros((5, 4), jnp.int32), jnp.full(5, 3), jnp.ones(5, bool)
    )
    silent = Proposal(jnp.zeros((5, 3), jnp.int32), jnp.zeros((5, 3), bool))
    state = drafter.observe(state, silent, verdict, jnp.asarray([3, 0, 0, 0, 0]), jnp.zeros((5, 1)))
    proposal, _, _ = drafter.propose({}, state, {}, view(progress()), None)
    assert proposal.tokens[0].tolist() == [3, 4, 9]
    assert proposal.valid.tolist() == [[True] * 3, *[[False] * 3] * 4]


def test_the_pace_follows_a_rows_own_luck() -> None:
    pace = _pace.new_pace(3)
    widths = (1, 4, 8)
    drafted = jnp.asarray([7, 7, 7])
    for _ in range(6):
        pace = _pace.learn(pace, drafted, jnp.asarray([7, 0, 3]))
    lengths = _pace.best_length(pace, widths, 0.0).tolist()
    assert lengths[0] == 7
    assert lengths[1] == 0
    # A row that gave up tries again after a while.
    for _ in range(60):
        pace = _pace.learn(pace, jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32))
    assert _pace.best_length(pace, widths, 0.0)[1] > 0
    assert (
        _pace.best_length(_pace.restart(pace, jnp.int32(0)), widths, 0.0)[0]
        == _pace.best_length(_pace.new_pace(1), widths, 0.0)[0]
    )
