"""What each of jaxspec's means is worth to a batch of requests: a ladder, each rung with all of those below it.

Requests are played through, with steps as long as `jaxspec.plan.roofline` has them. Prompts are equally long, answers
are spread evenly from nothing to all that is left of the context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxspec.config import DRAFT_TOKENS
from jaxspec.errors import ConfigError
from jaxspec.plan.fit import fits
from jaxspec.plan.held import held
from jaxspec.plan.roofline import EFFICIENCY, prefill_costs
from jaxspec.plan.setup import Setup, set_up
from jaxspec.plan.slices import Number
from jaxspec.plan.speed import Luck, Step, round_of


@dataclass(frozen=True)
class Demand:
    """What is asked for, and what is assumed of it."""

    model: str = "llama-3.3-70b"
    topology: str = "v6e:2x4"
    requests: int = 100
    context: int = 8192
    prompt: int = 4096
    shared: float = 0.5
    """Of every prompt, the part that all begin with."""
    kv_dtype: str = "int8"
    weights: str = "int8"
    draft: str = "llama-3.1-8b"
    acceptance: float = 0.7
    draft_tokens: int = DRAFT_TOKENS
    """At most: a batch drafts as many as are fastest for it."""
    efficiency: float = EFFICIENCY

    def __post_init__(self) -> None:
        for ok, what in (
            (self.requests >= 1, f"requests must be 1 or more, not {self.requests}"),
            (1 <= self.prompt < self.context, f"prompt must be 1 to context - 1 tokens, not {self.prompt}"),
            (0 <= self.shared < 1, f"shared must be 0 or more and below 1, not {self.shared}"),
            (0 <= self.acceptance <= 1, f"acceptance must be 0 to 1, not {self.acceptance}"),
            (0 < self.efficiency <= 1, f"efficiency must be above 0 and at most 1, not {self.efficiency}"),
        ):
            if not ok:
                raise ConfigError(what)

    @property
    def narrow(self) -> str:
        """The formats of weights and cache."""
        return self.weights if self.weights == self.kv_dtype else f"{self.weights}/{self.kv_dtype}"

    @property
    def answers(self) -> list[float]:
        """Tokens of each answer, the longest last."""
        return [(self.context - self.prompt) * (i + 1) / self.requests for i in range(self.requests)]


class Rung(NamedTuple):
    """What has been added, and what comes of it."""

    name: str
    fixed_bytes: float
    """On a device, whatever the batch is: weights, a draft model's with them."""
    sequence_bytes: float
    """That a sequence has on a device, on average at its end."""
    at_once: int
    prompt_seconds: float
    """Of all prompts."""
    decode_seconds: float
    tokens: float

    @property
    def seconds(self) -> float:
        return self.prompt_seconds + self.decode_seconds

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


def ladder(demand: Demand) -> list[Rung]:
    """The rungs. ConfigError where the model does not fit without quantising, even for one request."""
    plain = set_up(demand.model, demand.topology, 1, demand.context, demand.prompt)
    narrow = plain.changed(weights=demand.weights, kv_dtype=demand.kv_dtype)
    drafting = set_up(
        demand.model,
        demand.topology,
        1,
        demand.context,
        demand.prompt,
        demand.weights,
        demand.kv_dtype,
        drafter=f"draft_model:{demand.draft}",
        draft_tokens=demand.draft_tokens,
    )
    return [
        _static(demand, plain, "baseline"),
        _paged(demand, plain, "+ pages"),
        _paged(demand, narrow, f"+ {demand.narrow}"),
        _paged(demand, drafting, "+ drafts"),
        _paged(demand, drafting, "+ prefix cache", demand.shared),
    ]


def _static(demand: Demand, setup: Setup, name: str) -> Rung:
    """Every sequence has, and reads, the slots of the whole context; a batch ends with its longest answer."""
    fixed, size = _sizes(setup)
    at_once = _at_once(demand, setup, fixed, size)
    prompts, decoding = demand.requests * _prompt_seconds(demand, setup, demand.prompt), 0.0
    answers = _mixed(demand.answers)
    for begin in range(0, demand.requests, at_once):
        batch = answers[begin : begin + at_once]
        step = round_of(setup, Luck(), 0, len(batch), demand.context, demand.efficiency).step
        decoding += max(batch) * step.seconds
    return Rung(name, fixed, size, at_once, prompts, decoding, sum(demand.answers))


def _paged(demand: Demand, setup: Setup, name: str, shared: float = 0.0) -> Rung:
    """Sequences have pages for what they hold; who is done makes room for the next. The pages and the computing of what
    all prompts begin with are taken once."""
    fixed, whole = _sizes(setup)
    token = whole / setup.context
    prefix, mean = shared * demand.prompt, sum(demand.answers) / demand.requests
    size = token * (demand.prompt - prefix + mean + setup.page_size / 2)
    at_once = _at_once(demand, setup, fixed + token * prefix, size)
    own = _prompt_seconds(demand, setup, demand.prompt - prefix)
    prompts = _prompt_seconds(demand, setup, prefix) + demand.requests * own
    decoding = sum(_decoding(demand, setup, at_once))
    return Rung(name, fixed, size, at_once, prompts, decoding, sum(demand.answers))


def _decoding(demand: Demand, setup: Setup, at_once: int) -> Iterator[float]:
    """Seconds from one answer's end to the next; long and short answers come in turn."""
    waiting = _mixed(demand.answers)
    running: list[tuple[float, float]] = []  # tokens left, and of the answer in all
    while waiting or running:
        while waiting and len(running) < at_once:
            answer = waiting.pop()
            running.append((answer, answer))
        least = min(left for left, _ in running)
        length = demand.prompt + sum(answer - left for left, answer in running) / len(running) + least / 2
        luck, rows = Luck(demand.acceptance), len(running)
        rounds = [round_of(setup, luck, n, rows, length, demand.efficiency) for n in range(setup.drafts + 1)]
        yield least / max(one.per_sequence for one in rounds)
        running = [(left - least, answer) for left, answer in running if left > least]


def _mixed(answers: Sequence[float]) -> list[float]:
    """The same in an order without a trend: each next one is about 0.618 of all further on."""
    order = sorted(range(len(answers)), key=lambda i: i * 0.6180339887 % 1)
    return [answers[i] for i in order]


def _sizes(setup: Setup) -> tuple[int, int]:
    """Bytes of a device that do not depend on the batch, and of a sequence as long as the context."""
    one, two = held(setup).total, held(setup.changed(batch=2)).total
    return 2 * one - two, two - one


def _at_once(demand: Demand, setup: Setup, taken: Number, size: Number) -> int:
    if not fits(setup):
        raise ConfigError(
            f"{setup.shape.name} in {setup.weights} and one sequence of {setup.context} tokens do not fit into "
            f"{setup.slice.topology}: take a larger slice"
        )
    return min(int((setup.slice.usable_bytes - taken) / size), demand.requests)


def _prompt_seconds(demand: Demand, setup: Setup, tokens: Number) -> float:
    """Of so many tokens of a prompt, in chunks."""
    return tokens / setup.prefill_chunk * Step(prefill_costs(setup, demand.efficiency)).seconds
