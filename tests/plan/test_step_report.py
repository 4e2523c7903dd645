"""What people and programs are told of a plan for a slice."""

import io
import json
from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console

from jaxspec.plan.compiled import Step
from jaxspec.plan.fit import remedies
from jaxspec.plan.held import held
from jaxspec.plan.ladder import Demand, ladder
from jaxspec.plan.setup import set_up
from jaxspec.plan.speed import Luck, check_luck, speed_of
from jaxspec.plan.step_report import Plan, ladder_fields, ladder_report, make_step_fields, make_step_report


def plan_of(luck: Luck | None = None, compiled: list[Step] | None = None, **options: Any) -> Plan:
    given: dict[str, Any] = {"model": "llama-3.1-8b", "topology": "v5e:2x2", "batch": 4, "context": 4096}
    setup = set_up(**given | options)
    luck = check_luck(setup, luck or Luck())
    return Plan(setup, luck, held(setup), speed_of(setup, luck), remedies(setup), compiled)


def words(report: Iterable[Any]) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    for part in report:
        console.print(part)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


@pytest.mark.parametrize("drafter", ["none", "ngram", "medusa", "draft_model:llama-3.2-1b"])
def test_fields_are_json_and_agree(drafter: str) -> None:
    plan = plan_of(drafter=drafter)
    fields = json.loads(json.dumps(make_step_fields(plan)))
    kinds = fields["bytes_per_chip"]
    assert kinds["total"] == kinds["arguments"] + kinds["temporaries"]
    assert kinds["total"] == sum(kinds.values()) - kinds["total"] - kinds["arguments"]
    assert fields["fits"] == (kinds["total"] <= fields["limit_bytes"])
    assert set(fields["step_seconds"]) == {"plain", "speculative", "prefill"}
    assert set(fields["step_seconds"]["plain"]) == {"seconds", "hbm", "mxu", "ici", "hops"}
    assert fields["tok_per_s"]["plain"] == pytest.approx(4 / fields["step_seconds"]["plain"]["seconds"])
    assert (fields["step_seconds"]["speculative"] is None) == (fields["tau"] is None) == (drafter == "none")
    assert fields["compiled"] is None
    assert fields["best"] == max(fields["sweep"], key=lambda one: one["tok_per_s"])
    assert fields["draft_model"] == (drafter.partition(":")[2] or None)
    assert len(fields["sweep"]) == (1 if drafter == "none" else 64)
    assert all(isinstance(line, str) for line in fields["assumptions"])


def test_a_report_holds_the_figures() -> None:
    flat = words(
        make_step_report(
            plan_of(model="llama-3.3-70b", topology="v6e:2x4", batch=32, context=8192, weights="int8", kv_dtype="int8")
        )
    )
    for figure in (
        "llama-3.3-70b on v6e:2x4: 8 devices of v6e; 32 sequences of 8,192 tokens, weights int8, cache int8",
        "weights 8.96 8.35 26.7 %",
        "keys and values 5.45 5.08 16.2 %",
        "It fits into 31.25 GiB (33.55 GB) a device",
        "memory gives 95 % of its bandwidth",
        "159 tokens a second for each of 8 sequences",
        "6,144 tokens on average, from a prompt of 4,096 on",
    ):
        assert figure in flat
    assert "draft" not in flat.partition("drafter none")[2]


def test_what_does_not_fit_says_what_would() -> None:
    flat = words(make_step_report(plan_of(model="llama-3.3-70b", topology="v5e:2x4", batch=32, context=8192)))
    assert "It does not fit into 15.75 GiB (16.91 GB) a device, by" in flat
    assert "It would fit with --weights int4, or with --topology v5e:4x8." in flat
    flat = words(make_step_report(plan_of(model="llama-3.3-70b", topology="v5e:2x4", batch=10_000, context=8192)))
    assert "No change of batch, context, formats or slice alone would do." in flat


def test_drafts_are_compared() -> None:
    plan = plan_of(drafter="draft_model:llama-3.2-1b", batch=1, topology="v5e:1x1", weights="int8")
    flat = words(make_step_report(plan))
    assert "a draft is accepted with a chance of 0.7 where those before it are" in flat
    assert f"Fastest: --draft-tokens {plan.speed.best.drafts}," in flat
    assert f"▸ {plan.speed.best.drafts} " in flat
    assert "weights that draft" in flat
    assert "one ring" not in flat  # a single device
    flat = words(make_step_report(plan_of(drafter="ngram", luck=Luck(acceptance=0.0))))
    assert "Fastest is plain decoding" in flat


@pytest.mark.parametrize(
    ("options", "luck", "said"),
    [
        ({"drafter": "ngram"}, Luck(tau=2.5), "a round brings 2.5 tokens, as given"),
        ({"drafter": "medusa"}, Luck(), "4 heads, the chances of their tree's nodes of no heads in particular"),
        ({"drafter": "medusa", "model": "smollm2-135m", "topology": "v5e:1x1"}, Luck(), "tree's nodes measured"),
        ({"topology": "h100:2"}, Luck(), "launches and the latency of NCCL are not counted"),
        ({"replicas": 2}, Luck(), "4 devices of v5e, 2 replicas on 2 each"),
    ],
)
def test_what_is_assumed_is_said(options: dict[str, Any], luck: Luck, said: str) -> None:
    assert said in words(make_step_report(plan_of(luck, **options)))


def test_what_the_compiler_says_stands_beside() -> None:
    rows = [Step("plain", 2**33, 2**20, 7.5, 2, 1, 0), Step("prefill, 256 tokens", 2**33, 2**21, 8.25, 2, 0, 1)]
    plan = plan_of(compiled=rows)
    assert make_step_fields(plan)["compiled"]["plain"] == {
        "arguments": 2**33,
        "temporaries": 2**20,
        "seconds": 7.5,
        "all_reduces": 2,
        "overlapped": 1,
        "pool_copies": 0,
    }
    table = words(make_step_report(plan)).partition("Compiled")[2]
    assert "plain 8.00 4.24 0.000977 7.5 2 (1) 0" in table
    assert "prefill, 256 tokens 8.00 4.00 0.00195 8.2 2 (0) 1" in table


def test_the_ladder() -> None:
    demand = Demand(model="llama-3.1-8b", topology="v5e:2x2", requests=10, draft="llama-3.2-1b")
    rungs = ladder(demand)
    flat = words(ladder_report(demand, rungs))
    for said in (
        "10 requests to llama-3.1-8b on v5e:2x2, context 8,192",
        "prompts of 4,096 tokens, answers of any length up to 4,096, on average 2,048",
        "the first 50 % of every prompt are the same",
        "llama-3.2-1b drafts up to 7 tokens",
        "+ int8 ",
    ):
        assert said in flat
    fields = json.loads(json.dumps(ladder_fields(demand, rungs)))
    assert [rung["name"] for rung in fields["rungs"]] == [rung.name for rung in rungs]
    assert fields["requests"] == 10
    assert fields["rungs"][0]["seconds"] == pytest.approx(rungs[0].seconds)
