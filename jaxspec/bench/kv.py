"""Formats of keys and values, policies of what stays of them, and formats of weights, side by side: bytes, speed, what
they change in what the model says.

Cases take turns in everything that is timed, so that a busy machine slows all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxspec.bench.engine import finish
from jaxspec.bench.passkey import ANSWER, Try, make_prompt, retrieve
from jaxspec.bench.quality import Marks, Subject, compare
from jaxspec.config import PREFILL_ROW, EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.kv.formats import get_format
from jaxspec.llm import load
from jaxspec.models.loading import DTYPES, LoadedModel
from jaxspec.models.quantization import get_scheme


class Case(NamedTuple):
    """What is compared: how weights are stored, how keys and values are, and what stays of those."""

    weights: str
    kv_dtype: str
    kv_policy: str = "full"


@dataclass(frozen=True)
class Sizes:
    """How much is measured, in tokens where nothing else is said."""

    tokens: int = 20_000
    """Of text that is scored."""
    window: int = 1024
    """Read from an empty cache, again and again until all the text is."""
    repeats: int = 3
    batch: int = 8
    """Speed: requests at once."""
    context: int = 256
    """Speed: prompt of each."""
    answer: int = 32
    """Speed: decoded by each."""
    lengths: tuple[int, ...] = (256, 1024)
    """Passkey: prompts."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Passkey: where the number stands, a share of the text."""
    keys: int = 1
    """Passkey: numbers for each length and depth."""
    reach: int = 0
    """Tokens of one text that are read on and on, further than the model was trained for if need be; 0 for none."""

    def __post_init__(self) -> None:
        for name, value in (("--window", self.window), ("--reach", self.reach)):
            if value % PREFILL_ROW:
                raise ConfigError(f"{name} must be a multiple of {PREFILL_ROW}, not {value}")

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is read or asked about."""
        return max(self.window, self.context + self.answer, self.reach, *self.lengths)

    @property
    def windows(self) -> int:
        # The first token of a window has nothing before it and is not scored.
        return -(-self.tokens // (self.window - 1))


@dataclass(frozen=True)
class Findings:
    """What was measured so far, of each case."""

    speeds: dict[Case, list[float]]
    """Tokens a second, by repeat."""
    tries: dict[Case, list[Try]]
    marks: dict[Case, list[Marks]]
    """By window."""
    onward: dict[Case, list[Marks]]
    """Of the text that is read on and on, against itself."""

    def __bool__(self) -> bool:
        return any(chain(*(found.values() for found in (self.speeds, self.tries, self.marks, self.onward))))


def make_cases(weights: Sequence[str], formats: Sequence[str], policies: Sequence[str] = ("full",)) -> list[Case]:
    """Every format, then the other policies, then the other weights, each with the first of the other kinds.

    The first case is the reference. ConfigError where there is none, or for an unknown name.
    """
    if not (weights and formats and policies):
        raise ConfigError("--formats, --policies and --weights need a name each, such as float32 and full")
    for name in formats:
        get_format(name)
    for name in weights:
        if name not in ("auto", *DTYPES):
            get_scheme(name)
    return [
        *(Case(weights[0], name, policies[0]) for name in formats),
        *(Case(weights[0], formats[0], name) for name in policies[1:]),
        *(Case(name, formats[0], policies[0]) for name in weights[1:]),
    ]


def read_text(path: Path | None) -> str:
    """The text of a file, or what Python's own documentation says on every topic. ConfigError where there is none."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python comes without its documentation (pydoc_data): give --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics))


class Bench:
    """An engine for each case, and what was measured of them.

    ConfigError where the model's context or the text is too short, and for what an engine refuses.
    """

    def __init__(self, config: EngineConfig, cases: Sequence[Case], text: str, sizes: Sizes) -> None:
        self.sizes = sizes
        self.findings = Findings(*({case: [] for case in cases} for _ in range(4)))
        self.doing = ""
        """What is being measured."""
        context = max(sizes.context + sizes.answer, max(sizes.lengths, default=0) + ANSWER)
        loaded: dict[str, LoadedModel] = {}
        self.engines: dict[Case, Engine] = {}
        for case in cases:
            own = msgspec.structs.replace(
                config,
                **case._asdict(),
                max_batch=sizes.batch,
                max_context=context,
                # What is left of prompts after a prefix hit is then written at once.
                prefill_chunk=sizes.batch * PREFILL_ROW,
            )
            if case.weights not in loaded:
                loaded[case.weights] = load(own)
                _check(loaded[case.weights], context, sizes)
            self.engines[case] = Engine(loaded[case.weights], own)
        self.ids = _encoded(loaded[cases[0].weights], text, sizes)

    @property
    def steps(self) -> int:
        """Times that `measure` tells of something."""
        sizes = self.sizes
        return len(self.engines) * (sizes.repeats + len(sizes.lengths) + sizes.windows + bool(sizes.reach))

    def warm_up(self) -> None:
        """Compile what decoding needs, and have the prompts of the speed test in the prefix cache."""
        for engine in self.engines.values():
            self._speed(engine)

    def measure(self, tell: Callable[[int], None] = lambda tokens: None) -> None:
        """Add to the findings, which stay where it is interrupted; `tell` hears of the tokens of each step."""
        sizes, found = self.sizes, self.findings
        for repeat in range(sizes.repeats):
            self.doing = f"speed, turn {repeat + 1} of {sizes.repeats}"
            for case, engine in self.engines.items():
                found.speeds[case].append(self._speed(engine))
                tell(sizes.batch * sizes.answer)
        for length in sizes.lengths:
            self.doing = f"passkeys in {length} tokens"
            for case, engine in self.engines.items():
                found.tries[case].extend(retrieve(engine, length, sizes.depths, sizes.keys))
                tell(length * len(sizes.depths) * sizes.keys)
        engines = self.engines.values()
        subjects = [Subject(e.device.params.target, e.spec, e.program.pool) for e in engines]
        for index in range(sizes.windows):
            self.doing = f"perplexity, window {index + 1} of {sizes.windows}"
            window = self.ids[index * sizes.window : (index + 1) * sizes.window]
            for case, marks in zip(self.engines, compare(subjects, window, tell), strict=True):
                found.marks[case].append(marks)
        for case, subject in zip(self.engines, subjects, strict=True) if sizes.reach else ():
            self.doing = f"perplexity of one text, {case.kv_dtype} {case.kv_policy}"
            found.onward[case] += compare([subject], self.ids[: sizes.reach], tell)

    def _speed(self, engine: Engine) -> float:
        """Tokens a second of decoding, prefill left out."""
        sizes = self.sizes
        params = SamplingParams(max_tokens=sizes.answer, ignore_eos=True)
        for row in range(sizes.batch):
            prompt = list(islice(cycle(self.ids), row * sizes.context, (row + 1) * sizes.context))
            engine.add(str(row), prompt, params)
        outputs = finish(engine)
        return sum(output.stats.tokens for output in outputs) / max(output.stats.seconds for output in outputs)


def _check(loaded: LoadedModel, context: int, sizes: Sizes) -> None:
    """ConfigError where something will not work later, after minutes."""
    trained = loaded.spec.max_context
    for what, wanted in (("--window", sizes.window), ("speed and passkeys", context)):
        if wanted > trained:
            raise ConfigError(f"{what}: {wanted} tokens of context, but {loaded.name} was trained for {trained}")
    for length in sizes.lengths:
        make_prompt(loaded.tokenizer, 0, length, 0.0)


def _encoded(loaded: LoadedModel, text: str, sizes: Sizes) -> list[int]:
    """The token ids that are scored. ConfigError where the text has too few."""
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    wanted = sizes.windows * sizes.window
    for what, least in ((f"--tokens {sizes.tokens}", wanted), (f"--reach {sizes.reach}", sizes.reach)):
        if len(ids) < least:
            raise ConfigError(
                f"{what} takes a text of {least} tokens and this one has {len(ids)}: lower it or give a longer --text"
            )
    return ids[: max(wanted, sizes.reach)]
