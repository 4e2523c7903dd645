"""Decode bench: its arithmetic on made-up answers, and its measuring on a tiny model."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec import decode as decode_loop
from jaxspec.bench import report
from jaxspec.bench.costs import ROUNDS, Costs, measure_costs
from jaxspec.bench.decode import Answers, Group, build_engines, context_of, grouped, measure, warm_up
from jaxspec.bench.questions import Question
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.errors import ConfigError, RequestError
from jaxspec.host.request import CompletionOutput, Round, Statistics

PLAIN = Costs(0.0, 0.0, {1: 1.0}, 0)
DRAFTS = Costs(0.1, 0.0, {1: 1.0, 4: 1.4, 8: 1.7}, 7)
QUESTIONS = [Question(i, category, [text]) for i, (category, text) in enumerate([("a", "x"), ("b", "y"), ("a", "z")])]


def output(rounds: list[Round], ids: list[int] | None = None) -> CompletionOutput:
    tokens = sum(r.emitted for r in rounds)
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    stats = Statistics(tokens, 1.0, len(rounds), drafted, accepted)
    return CompletionOutput(0, "", ids or list(range(tokens)), "length", None, None, 0, stats, rounds)


def plain(tokens: int, seconds: float) -> Answers:
    return Answers(seconds, [output([Round(0, 0, 1)] * tokens)])


def test_rows_are_medians_of_ratios_within_a_repeat() -> None:
    groups = grouped(QUESTIONS, 1)
    assert [(g.category, [q.question_id for q in g.questions]) for g in groups] == [("a", [0]), ("a", [2]), ("b", [1])]
    fast = [Round(7, 3, 4), Round(3, 3, 4), Round(0, 0, 1), Round(7, 0, 1)]
    times = [  # of none and of drafts, by repeat and group
        [(10.0, 5.0), (10.0, 5.0), (20.0, 40.0)],
        [(30.0, 10.0), (30.0, 10.0), (20.0, 20.0)],
        [(10.0, 10.0), (10.0, 10.0), (20.0, 10.0)],
    ]
    turns = [
        [{"none": plain(10, none), "drafts": Answers(drafts, [output(fast)])} for none, drafts in repeat]
        for repeat in times
    ]
    turns[2][2]["drafts"].outputs[0].token_ids[-1] = 99
    rows = report.make_rows(turns, groups, {"none": PLAIN, "drafts": DRAFTS})
    assert [(r["category"], r["drafter"]) for r in rows] == [
        (category, name) for category in ("a", "b", "all") for name in ("none", "drafts")
    ]
    a_none, a, _, b, every_none, every = rows
    assert (a_none["speedup"], every_none["speedup"], a_none["predicted_speedup"]) == (1.0, 1.0, 1.0)
    assert (a["speedup"], b["speedup"]) == (2.0, 1.0)
    assert every["speedup"] == pytest.approx(4 / 3)  # of 40/50, 80/40 and 40/30
    assert (a_none["tokens_per_second"], a["tokens_per_second"]) == (1.0, 20 / 20.0)
    assert (every_none["tokens_per_second"], every["tokens_per_second"]) == (30 / 40.0, 30 / 40.0)
    assert (a["questions"], a["tokens"], every["questions"], every["tokens"]) == (2, 20, 3, 30)
    assert (a["tau"], a["acceptance_rate"]) == (2.5, pytest.approx(6 / 17))
    assert a["acceptance_by_position"] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0, 0, 0, 0])
    assert a["verify_cost"] == pytest.approx((1.7 + 1.4 + 1.0 + 1.7) / 4)
    assert a["predicted_speedup"] == pytest.approx(2.5 / (0.1 + a["verify_cost"]))
    assert (a["same_text"], b["same_text"], every["same_text"]) == (1.0, 0.0, pytest.approx(2 / 3))


def test_an_interrupted_repeat_counts_only_where_there_is_no_whole_one() -> None:
    groups = grouped(QUESTIONS, 1)
    costs = {"none": PLAIN}
    whole, part = [{"none": plain(10, 1.0)}] * 3, [{"none": plain(10, 5.0)}]
    speeds = [r["tokens_per_second"] for r in report.make_rows([whole, part], groups, costs)]
    assert speeds == [10.0, 10.0, 10.0]
    rows = report.make_rows([part], groups, costs)
    assert [(r["category"], r["tokens_per_second"]) for r in rows] == [("a", 2.0), ("all", 2.0)]
    assert report.make_rows([[]], groups, costs) == report.make_rows([], groups, costs) == []


def test_a_position_counts_the_rounds_that_had_a_draft_there() -> None:
    rounds = [Round(0, 0, 1), Round(1, 1, 2), Round(3, 2, 3), Round(3, 0, 1), Round(3, 2, 2)]
    shares = report.acceptance_by_position(rounds)
    assert shares == pytest.approx([3 / 4, 2 / 3, 0])
    offered = [4, 3, 2]
    assert sum(s * n for s, n in zip(shares, offered, strict=True)) == sum(r.accepted for r in rounds)
    assert report.acceptance_by_position([Round(0, 0, 1)]) == []


def test_a_batch_steps_at_the_length_of_its_longest_draft() -> None:
    short, long = [Round(0, 0, 1), Round(3, 0, 1)], [Round(0, 0, 1), Round(1, 0, 1), Round(7, 0, 1)]
    assert report.step_costs([Answers(1.0, [output(short)])], DRAFTS) == pytest.approx((0.1, (1.0 + 1.4) / 2))
    together = [Answers(1.0, [output(short), output(long)])]
    assert report.step_costs(together, DRAFTS) == pytest.approx((0.1, (1.0 + 1.4 + 1.7) / 3))
    by_model = DRAFTS._replace(draft=0.0, each=0.2)
    assert report.step_costs(together, by_model) == pytest.approx((0.2 * (0 + 3 + 7) / 3, (1.0 + 1.4 + 1.7) / 3))
    assert [DRAFTS.verifying(drafted) for drafted in range(8)] == [1.0, 1.4, 1.4, 1.4, 1.7, 1.7, 1.7, 1.7]


def test_leviathan_with_fixed_length_is_the_formula() -> None:
    costs = Costs(0.0, 0.1, {4: 1.5}, 3)
    rounds = [Round(3, 3, 4), Round(3, 1, 2), Round(3, 0, 1), Round(3, 2, 3)]
    a = 6 / 9  # of 3 + 2 + 1 + 3 trials
    cut = Round(3, 1, 1)
    assert report.leviathan([Round(3, 1, 2), cut], costs) == pytest.approx((1 + 2 / 3 + 4 / 9 + 8 / 27) / 1.3)
    assert report.leviathan(rounds, costs) == pytest.approx((1 - a**4) / ((1 - a) * (3 * 0.1 + 1)))
    assert report.leviathan([Round(3, 3, 4)], costs) == pytest.approx(4 / 1.3)
    assert report.leviathan([Round(3, 3, 4)], Costs(0.3, 0.0, {4: 1.5}, 3)) == pytest.approx(4 / 1.3)
    assert report.leviathan([Round(0, 0, 1)], PLAIN) == 1.0


def test_groups_hold_one_category() -> None:
    questions = [Question(i, "ab"[i > 4], ["?"]) for i in range(8)]
    assert [(g.category, len(g.questions)) for g in grouped(questions, 3)] == [("a", 3), ("a", 2), ("b", 3)]


@pytest.fixture(scope="module")
def engines(tiny_model: Path):
    config = EngineConfig(model=str(tiny_model), max_batch=2, draft_tokens=4, draft_adaptive=False)
    return build_engines(config, ["none", "ngram"])


REPEATING = [Question(i, "copy", ["the sea the sea the sea the sea " * 2 + "x" * i]) for i in range(3)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.mark.slow
def test_drafters_share_parameters_and_give_the_same_text(engines) -> None:
    none, ngram = engines.values()
    leaf = "embed", "weight"
    assert none.device.params.target[leaf[0]][leaf[1]] is ngram.device.params.target[leaf[0]][leaf[1]]
    groups, turns, told = grouped(REPEATING, 2), [], []
    warm_up(engines, groups, PARAMS)
    measure(engines, groups, PARAMS, 2, turns, told.append)
    assert told == [48, 48, 24, 24] * 2
    assert [[list(turn) for turn in repeat] for repeat in turns] == [[["none", "ngram"]] * 2] * 2
    for turn in (turn for repeat in turns for turn in repeat):
        assert turn["none"].token_ids == turn["ngram"].token_ids
        for answers in turn.values():
            assert answers.seconds == max(o.stats.seconds for o in answers.outputs) > 0
            for made in answers.outputs:
                assert sum(r.emitted for r in made.rounds) == made.stats.tokens == 24
    assert {r.drafted for o in turns[0][0]["ngram"].outputs for r in o.rounds} <= {0, 4}
    assert sum(o.stats.drafted for o in turns[0][0]["ngram"].outputs) > 0
    assert not any(engine.has_work for engine in engines.values())


def test_costs_are_those_of_the_widths_a_drafter_has(engines) -> None:
    costs = measure_costs(engines, 2, 40, PARAMS, repeats=3)
    assert costs["none"] == Costs(0.0, 0.0, {1: 1.0}, 0)
    assert set(costs["ngram"].verify) == {1, 5}
    assert costs["ngram"].verify[1] == 1.0
    assert 0 < costs["ngram"].draft < ROUNDS
    assert 0.2 < costs["ngram"].verify[5] < 20
    assert costs["ngram"].nodes == 4


def test_costs_are_ratios_of_times(engines, monkeypatch) -> None:
    """With a clock that counts the tokens of verify rows and of drafts, costs must be those counts."""
    clock = [0.0]

    def run(params, state, rounds, least, *, program):
        clock[0] += ROUNDS * program.drafter.tree.width
        return state, None

    def draft(program, params, state):
        clock[0] += ROUNDS * 2
        return state, ROUNDS * 4

    monkeypatch.setattr(decode_loop, "run", run)
    monkeypatch.setattr("jaxspec.bench.costs._draft_rounds", draft)
    monkeypatch.setattr("jaxspec.bench.costs.time.perf_counter", lambda: clock[0])
    assert measure_costs(engines, 1, 10, PARAMS, repeats=1)["ngram"] == Costs(2.0, 0.0, {1: 1.0, 5: 5.0}, 4)
    program = engines["ngram"].program
    by_model = replace(program, drafter=program.drafter._replace(model=program.model))
    monkeypatch.setattr(engines["ngram"], "program", by_model)
    assert measure_costs(engines, 1, 10, PARAMS, repeats=1)["ngram"] == Costs(0.0, 0.5, {1: 1.0, 5: 5.0}, 4)


def test_a_question_that_cannot_be_served_is_named_before_any_work(engines) -> None:
    groups = [*grouped(REPEATING, 2), Group("long", [Question("q9", "long", ["too long " * 300])])]
    with pytest.raises(RequestError, match="question q9: the prompt has"):
        warm_up(engines, groups, PARAMS)
    assert not any(engine.has_work for engine in engines.values())


def test_context_is_half_way_through_an_answer(engines) -> None:
    engine = engines["none"]
    short = context_of(engine, [Group("a", [QUESTIONS[0]])], 2)
    assert context_of(engine, [Group("a", [QUESTIONS[0]])], 42) == short + 20
    assert context_of(engine, [Group("a", [QUESTIONS[0]])], 4000) == engine.max_context - 1


def test_unknown_drafter(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no drafter named 'gram' \(there are: .*ngram"):
        build_engines(EngineConfig(model=str(tiny_model)), ["none", "gram"])


@pytest.mark.parametrize(("option", "value"), [("data_parallel", 2), ("distributed", "127.0.0.1:80,2,0")])
def test_a_benchmark_measures_one_engine(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} is for answering requests"):
        build_engines(EngineConfig(**{option: value}), ["none"])
