"""The ladder: requests played through, and each rung worth something."""

from dataclasses import replace

import pytest

from jaxspec.errors import ConfigError
from jaxspec.plan.ladder import Demand, Rung, ladder
from jaxspec.plan.roofline import prefill_costs, verify_cost
from jaxspec.plan.setup import set_up

SMALL = Demand(model="llama-3.1-8b", topology="v5e:2x2", requests=20, draft="llama-3.2-1b")


@pytest.fixture(scope="module")
def rungs() -> list[Rung]:
    return ladder(Demand())


def test_the_example_with_100_requests_of_8k_on_8_chips(rungs: list[Rung]) -> None:
    assert len(rungs) == 5
    assert all(rung.tokens == pytest.approx(100 * 4096 * 101 / 200) for rung in rungs)
    seconds = [rung.seconds for rung in rungs]
    assert seconds == sorted(seconds, reverse=True)
    assert rungs[0].at_once < rungs[1].at_once < rungs[2].at_once == 100
    assert rungs[0].fixed_bytes == pytest.approx(141.1e9 / 8, rel=0.01)
    assert rungs[2].fixed_bytes == pytest.approx(rungs[0].fixed_bytes / 2, rel=0.02)
    assert rungs[0].sequence_bytes == pytest.approx(8192 * 327_680 / 8, rel=0.01)
    assert 4 < seconds[0] / seconds[-1] < 7


def test_static_batches_by_hand(rungs: list[Rung]) -> None:
    """Batches as large as memory allows, each as long as its longest answer, over the whole context."""
    demand, rung = Demand(), rungs[0]
    setup = set_up(demand.model, demand.topology, 1, demand.context, demand.prompt)
    sizes = [min(rung.at_once, 100 - begin) for begin in range(0, 100, rung.at_once)]
    steps = [verify_cost(setup, 0, size, demand.context, demand.efficiency).seconds for size in sizes]
    longest = 4096 * sum(steps)
    assert 0.9 * longest < rung.decode_seconds <= longest
    (chunk,) = prefill_costs(setup, demand.efficiency)
    assert rung.prompt_seconds == pytest.approx(100 * 4096 / 256 * chunk.seconds)


def test_a_lone_request() -> None:
    plain, paged, *_ = ladder(replace(SMALL, requests=1))
    assert plain.at_once == paged.at_once == 1
    assert plain.tokens == 4096
    assert paged.decode_seconds < plain.decode_seconds  # it reads what it has, not all its row
    assert paged.prompt_seconds == plain.prompt_seconds


def test_what_prompts_share_is_computed_once() -> None:
    none, half, most = (ladder(replace(SMALL, shared=shared))[-1] for shared in (0.0, 0.5, 0.9))
    whole = none.prompt_seconds
    assert half.prompt_seconds == pytest.approx(whole * (0.5 + 0.5 / 20))
    assert most.prompt_seconds == pytest.approx(whole * (0.1 + 0.9 / 20))
    assert most.sequence_bytes < half.sequence_bytes < none.sequence_bytes


def test_drafts_that_are_never_right_cost_prompts_only() -> None:
    *_, narrow, drafting, _ = ladder(replace(SMALL, acceptance=0.0))
    assert drafting.decode_seconds == pytest.approx(narrow.decode_seconds)  # none are drafted
    assert drafting.prompt_seconds > narrow.prompt_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 0}, "requests must be 1 or more"),
        ({"prompt": 8192}, "prompt must be 1 to context - 1"),
        ({"shared": 1.0}, "shared must be 0 or more and below 1"),
        ({"acceptance": -0.1}, "acceptance must be 0 to 1"),
        ({"efficiency": 0.0}, "efficiency must be above 0"),
        ({"topology": "v5e:2x4"}, "llama-3.3-70b in bfloat16 and one sequence of 8192 tokens do not fit into v5e:2x4"),
    ],
)
def test_what_cannot_be(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ladder(Demand(**options))
