"""A plan for a slice as JSON fields, and as people read it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from jaxspec.config import PREFILL_ROW
from jaxspec.plan.compiled import Step as CompiledStep
from jaxspec.plan.held import Held, arguments_of
from jaxspec.plan.ladder import Demand, Rung
from jaxspec.plan.memory import Change
from jaxspec.plan.report import GB, GIB, add_row, both, count, new_table, options, short
from jaxspec.plan.setup import Setup
from jaxspec.plan.speed import Luck, Round, Speed, Step

KINDS = {
    "weights": "weights",
    "draft_weights": "weights that draft",
    "kv": "keys and values",
    "draft_kv": "the draft model's",
    "rows": "sampling, history, text",
    "temporaries": "temporaries, estimated",
}
SHOWN = (1, 2, 3, 5, 7, 11, 15, 31, 63)
"""Numbers of drafts in the table."""
CALIBRATION = (
    "Llama 3.1 70B in int8 on v5e:4x4 (jax-llm-examples, 2025) ran at 159 tokens a second for each of 8 sequences and "
    "108 of 32, where this arithmetic says 150 and 104; alone they imply 98 % and 87 % if the caches of 2,048 tokens "
    "were empty, 102 % and 101 % if half full"
)


class Plan(NamedTuple):
    """All that is told of a setup."""

    setup: Setup
    luck: Luck
    held: Held
    speed: Speed
    remedies: Sequence[Change]
    compiled: Sequence[CompiledStep] | None = None
    """Where it was asked for."""

    @property
    def limit(self) -> int:
        """Bytes of a device that programs can have."""
        return self.setup.slice.usable_bytes

    @property
    def fits(self) -> bool:
        return self.held.total <= self.limit


def make_step_fields(plan: Plan) -> dict[str, Any]:
    """The plan as JSON fields: bytes of one device, seconds, and tokens a second of all sequences together."""
    setup, speed, held = plan.setup, plan.speed, plan.held
    rounds = {"plain": speed.plain, "speculative": speed.speculative}
    compiled = None if plan.compiled is None else {row.name: _compiled_fields(row) for row in plan.compiled}
    return {
        "model": setup.shape.name,
        "topology": setup.slice.topology,
        "devices": setup.slice.devices,
        "data_parallel": setup.replicas,
        "batch": setup.batch,
        "context": setup.context,
        "prompt": setup.prompt,
        "weights": setup.weights,
        "kv_dtype": setup.kv_dtype,
        "page_size": setup.page_size,
        "drafter": setup.drafter,
        "draft_model": setup.draft.name if setup.draft else None,
        "draft_tokens": setup.drafts,
        "fits": plan.fits,
        "limit_bytes": plan.limit,
        "bytes_per_chip": held._asdict() | {"arguments": held.arguments, "total": held.total},
        "remedies": list(plan.remedies),
        "step_seconds": {name: one and _step_fields(one.step) for name, one in rounds.items()}
        | {"prefill": _step_fields(speed.prefill)},
        "tok_per_s": {name: one and one.per_second for name, one in rounds.items()},
        "tok_per_s_of_a_sequence": {name: one and one.per_sequence for name, one in rounds.items()},
        "tau": speed.speculative and speed.speculative.tokens,
        "prompt_seconds": speed.prompt_seconds,
        "sweep": [_round_fields(one) for one in (speed.plain, *speed.others)],
        "best": _round_fields(speed.best),
        "efficiency": speed.efficiency,
        "assumptions": list(assumptions(plan)),
        "compiled": compiled,
    }


def _step_fields(step: Step) -> dict[str, float]:
    return {"seconds": step.seconds, **step.parts._asdict()}


def _round_fields(one: Round) -> dict[str, Any]:
    return {"draft_tokens": one.drafts, "tau": one.tokens, "seconds": one.step.seconds, "tok_per_s": one.per_second}


def _compiled_fields(row: CompiledStep) -> dict[str, Any]:
    return {name: value for name, value in row._asdict().items() if name != "name"}


def assumptions(plan: Plan) -> Iterator[str]:
    """What the figures rest on besides shapes and data sheets."""
    setup, speed = plan.setup, plan.speed
    yield f"memory gives {100 * speed.efficiency:.0f} % of its bandwidth: {CALIBRATION}"
    yield "memory, matrix units and links take turns, the latter two at all of their speed: so that table is met best"
    yield f"sequences hold {setup.mean_length:,.0f} tokens on average, from a prompt of {setup.prompt:,} on"
    yield (
        f"a chunk has {min(setup.prefill_chunk, setup.prompt)} tokens of a prompt, in rows of {PREFILL_ROW} that each "
        "read what comes before"
    )
    if setup.share > 1:
        yield "sums over the devices go along one ring both ways, a microsecond a hop, which reading weights hides"
    if setup.slice.has_switch:
        yield "GPUs: launches and the latency of NCCL are not counted, and 90 % of memory is given to programs"
    if setup.drafter != "none":
        yield _luck_of(plan)


def _luck_of(plan: Plan) -> str:
    setup, luck = plan.setup, plan.luck
    if luck.tau is not None:
        return f"a round brings {luck.tau:g} tokens, as given"
    if setup.guesses is not None:
        whose = "measured" if setup.guesses.measured else "of no heads in particular"
        return f"{setup.guesses.spec.num_heads} heads, the chances of their tree's nodes {whose}"
    return f"a draft is accepted with a chance of {luck.acceptance:g} where those before it are"


def make_step_report(plan: Plan) -> Iterator[RenderableType]:
    """Tables and lines of text with rich's markup."""
    setup = plan.setup
    shared = f"{count(setup.slice.devices, 'device')} of {setup.slice.chip.name}"
    if setup.replicas > 1:
        shared += f", {setup.replicas} replicas on {setup.share} each"
    yield (
        f"[bold]{escape(setup.shape.name)}[/] on {setup.slice.topology}: {shared}; "
        f"{count(setup.batch, 'sequence')} of {count(setup.context, 'token')}, weights {setup.weights}, "
        f"cache {setup.kv_dtype}, drafter {setup.drafter}"
    )
    yield _memory_table(plan)
    yield from _verdict(plan)
    yield ""
    yield _steps_table(plan)
    if plan.speed.others:
        yield _sweep_table(plan)
    if plan.speed.speculative is not None:
        yield _advice(plan)
    if plan.compiled is not None:
        yield _compiled_table(plan)
    yield ""
    yield "Assumed:"
    yield from (f"- {escape(line)}" for line in assumptions(plan))


def _memory_table(plan: Plan) -> Table:
    table = new_table("On each device", "", "what", "GB", "GiB", "of the limit")
    sizes = [(KINDS[name], size) for name, size in plan.held._asdict().items() if size]
    for name, size in [*sizes, ("together", plan.held.total)]:
        cells = short(size / GB), short(size / GIB), f"{100 * size / plan.limit:.1f} %"
        add_row(table, name, name == "together", *cells)
    return table


def _verdict(plan: Plan) -> Iterator[str]:
    over = plan.held.total - plan.limit
    if over <= 0:
        yield f"[green]It fits into {both(plan.limit)} a device[/], {both(-over)} to spare."
        return
    yield f"[red]It does not fit into {both(plan.limit)} a device[/], by {both(over)}."
    if plan.remedies:
        yield "It would fit with " + ", or with ".join(options(change) for change in plan.remedies) + "."
    else:
        yield "No change of batch, context, formats or slice alone would do."


def _steps_table(plan: Plan) -> Table:
    speed = plan.speed
    caption = "Memory, matrix units and links add up; hops pass while memory is read."
    columns = "in all", "memory", "matrix", "hops", "links", "tokens/s", "each"
    table = new_table("Steps by their roofline, in ms", caption, "step", *columns)
    rounds = [("plain", speed.plain)]
    if speed.speculative is not None:
        rounds.append((f"{speed.speculative.drafts} drafts", speed.speculative))
    for name, one in rounds:
        add_row(table, name, False, *_ms(one.step), f"{one.per_second:,.0f}", f"{one.per_sequence:,.1f}")
    tokens = min(plan.setup.prefill_chunk, plan.setup.prompt) / speed.prefill.seconds
    add_row(table, "chunk", False, *_ms(speed.prefill), f"{plan.setup.replicas * tokens:,.0f}", "")
    return table


def _ms(step: Step) -> tuple[str, ...]:
    parts = step.parts
    return tuple(short(1000 * x) for x in (step.seconds, parts.hbm, parts.mxu, parts.hops, parts.ici))


def _sweep_table(plan: Plan) -> Table:
    best = plan.speed.best.drafts
    table = new_table("By drafts of a round", "", "drafts", "τ", "ms", "tokens/s", "× plain")
    for one in (plan.speed.plain, *plan.speed.others):
        if one.drafts in (0, best, plan.setup.drafts, *SHOWN):
            ratio = one.per_second / plan.speed.plain.per_second
            cells = f"{one.tokens:.2f}", short(1000 * one.step.seconds), f"{one.per_second:,.0f}", f"{ratio:.2f}"
            add_row(table, str(one.drafts), one.drafts == best, *cells)
    return table


def _advice(plan: Plan) -> str:
    best, plain = plan.speed.best, plan.speed.plain
    if not best.drafts:
        return "Fastest is plain decoding: these drafts cost more than they bring."
    return f"Fastest: --draft-tokens {best.drafts}, {best.per_second / plain.per_second:.2f} times plain decoding."


def _compiled_table(plan: Plan) -> Table:
    columns = "given", "estimated", "temporaries", "seconds", "sums", "copies"
    caption = "GiB of a device; sums over the devices in a layer, (of them) overlapped; copies of the pool."
    table, estimates = new_table("Compiled", caption, "step", *columns), arguments_of(plan.setup)
    for row in plan.compiled or ():
        estimate = estimates.get(row.name.partition(",")[0], estimates["round"])
        sizes = (short(size / GIB) for size in (row.arguments, estimate, row.temporaries))
        sums = f"{row.all_reduces} ({row.overlapped})"
        add_row(table, row.name, False, *sizes, f"{row.seconds:.1f}", sums, str(row.pool_copies))
    return table


def ladder_fields(demand: Demand, rungs: Sequence[Rung]) -> dict[str, Any]:
    """The ladder as JSON fields."""
    return asdict(demand) | {
        "rungs": [rung._asdict() | {"seconds": rung.seconds, "tok_per_s": rung.per_second} for rung in rungs]
    }


def ladder_report(demand: Demand, rungs: Sequence[Rung]) -> Iterator[RenderableType]:
    """The ladder as a table, and what it assumes."""
    title = f"{demand.requests} requests to {demand.model} on {demand.topology}, context {demand.context:,}"
    columns = "fixed", "each", "at once", "prompts", "decoding", "tokens/s", "×"
    caption = "fixed, each: GiB on a device, whatever the batch and of a sequence. prompts, decoding: seconds."
    table = new_table(title, caption, "", *columns)
    for rung in rungs:
        sizes = short(rung.fixed_bytes / GIB), short(rung.sequence_bytes / GIB)
        ratio = rungs[0].seconds / rung.seconds
        times = f"{rung.prompt_seconds:,.1f}", f"{rung.decode_seconds:,.1f}"
        cells = str(rung.at_once), *times, f"{rung.per_second:,.0f}", f"{ratio:.2f}"
        add_row(table, rung.name, False, *sizes, *cells)
    yield table
    yield "Assumed:"
    longest = demand.context - demand.prompt
    yield f"- prompts of {demand.prompt:,} tokens, answers of any length up to {longest:,}, on average {longest // 2:,}"
    yield f"- {demand.draft} drafts up to {demand.draft_tokens} tokens, as many as are fastest for the batch"
    yield f"- a draft is accepted with a chance of {demand.acceptance:g} where those before it are"
    yield f"- the first {100 * demand.shared:.0f} % of every prompt are the same"
    yield "- baseline: a sequence has, and reads, slots for the whole context, and a batch ends with its longest answer"
    yield "- pages: a sequence has what it holds, and who is done makes room for the next"
    yield f"- {demand.narrow}: weights {demand.weights}, cache {demand.kv_dtype}; before that both are bfloat16"
    yield f"- memory gives {100 * demand.efficiency:.0f} % of its bandwidth (jaxspec plan tells why)"
