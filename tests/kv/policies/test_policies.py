"""What every eviction policy must do; each file in `jaxspec/kv/policies` is found by itself."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.host.blocks import Kept, PageAllocator, Pages
from jaxspec.kv.policies import get_policy, policy_names
from jaxspec.kv.policy import Policy
from pallas_kernels import Rows, visible_slots

WINDOW, SINKS, HEAVY, PAGE, WIDTH, MOST = 7, 3, 5, 4, 3, 60
CONFIG = EngineConfig(kv_window=WINDOW, kv_sinks=SINKS, kv_heavy=HEAVY)
SEEN = {"full": (10**6, 0), "window": (WINDOW, 0), "sinks": (WINDOW, SINKS), "h2o": (10**6, 0)}
"""How many last and first tokens one sees of what is there."""
SCORED = {"h2o": (HEAVY, WINDOW)}
"""Of the others positions alone say what is there."""


@pytest.fixture(params=policy_names())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def policy(name: str) -> Policy:
    return get_policy(msgspec.structs.replace(CONFIG, kv_policy=name))


def pages_of(policy: Policy) -> Pages:
    kept = None if policy.last is None else Kept(policy.first, policy.last)
    return Pages(PageAllocator(0), PAGE, kept)


@partial(jax.jit, static_argnames="policy")
def visible(policy: Policy, start: jax.Array) -> jax.Array:
    rows = Rows(jnp.zeros(1, jnp.int32), start[None], jnp.full(1, WIDTH))
    return visible_slots(rows, jnp.arange(MOST + WIDTH), WIDTH, None, policy.variant)[0]


def seen(policy: Policy, pages: Pages, start: int, dropped: int) -> list[set[int]]:
    """Places in the text that each token of a row from `start` on sees, where so many slots have gone back."""
    slots = np.arange(MOST + WIDTH)
    place = np.where(slots < pages.first * PAGE, slots, slots + dropped)
    return [set(place[row].tolist()) for row in np.asarray(visible(policy, jnp.int32(start - dropped)))]


def test_a_token_sees_what_its_position_says_whatever_has_gone_back(name: str, policy: Policy) -> None:
    window, sinks = SEEN[name]
    pages = pages_of(policy)
    for start in range(MOST):
        for dropped in range(0, pages.droppable(start) + 1, PAGE):
            for position, places in enumerate(seen(policy, pages, start, dropped), start):
                assert places == {p for p in range(position + 1) if p > position - window or p < sinks}


def test_all_pages_that_can_go_back_do(name: str, policy: Policy) -> None:
    window, sinks = SEEN[name]
    pages = pages_of(policy)
    for tokens in range(MOST):
        unseen = [p for p in range(tokens) if p >= sinks and p <= tokens - window]
        whole = [p for p in range(0, tokens, PAGE) if all(q in unseen for q in range(p, p + PAGE))]
        assert pages.droppable(tokens) == len(whole) * PAGE


def test_sinks_are_seen_from_where_the_cache_would_have_the_query() -> None:
    positions = jnp.arange(40)
    policies = {
        mode: get_policy(msgspec.structs.replace(CONFIG, kv_policy="sinks", kv_positions=mode))
        for mode in ("cache", "text")
    }
    assert policies["text"].left_out(positions) is None
    place = positions - policies["cache"].left_out(positions)
    np.testing.assert_array_equal(place, np.minimum(positions, SINKS + WINDOW - 1))


def test_as_many_tokens_are_seen_as_it_says(name: str, policy: Policy) -> None:
    for context in (1, WINDOW, WINDOW + SINKS, 50):
        most = max(map(len, seen(policy, pages_of(policy), max(context - WIDTH, 0), 0)[: min(context, WIDTH)]))
        assert policy.most_seen(context) == most


def test_scores_decide_where_it_says_so(name: str, policy: Policy) -> None:
    """Then, and only then, votes are counted and rows condensed; whatever scores nothing sees the same."""
    heavy, recent = SCORED.get(name, (0, 0))
    assert (policy.heavy, policy.recent) == (heavy, recent)
    assert policy.budget == (heavy + recent if name in SCORED else None)
    assert policy.variant.mass == (name in SCORED)
    assert policy.forgets == (name != "full")
    assert policy.silent == replace(policy, variant=replace(policy.variant, mass=False))


def test_slots_that_cannot_move_are_not_scored() -> None:
    with pytest.raises(ConfigError, match=r"h2o moves single tokens, and kv_dtype int4 .* groups of 64: take kv_dtype"):
        get_policy(EngineConfig(kv_policy="h2o", kv_dtype="int4"))


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no kv_policy named 'h3o' .*" + ", ".join(policy_names())):
        get_policy(EngineConfig(kv_policy="h3o"))
