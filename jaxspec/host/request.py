"""A request on its way through the engine, and what comes back of it. Plain Python: no jax here."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from jaxspec.config import SamplingParams


class TokenLogprobs(NamedTuple):
    """Log probabilities at one emitted token, natural logarithm, of the model's distribution before any filter."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The likeliest token ids, best first; empty where `logprobs` was 0."""


class Kind(StrEnum):
    """Where a token came from."""

    PLAIN = "plain"
    """The target's own, in a round without a draft."""
    ACCEPTED = "accepted"
    """Drafted, and what the target wanted."""
    CORRECTED = "corrected"
    """The target's own, where it rejected a draft."""
    BONUS = "bonus"
    """The target's own, after a draft of which it accepted everything."""


class Round(NamedTuple):
    """What one verify round did for a sample."""

    drafted: int
    accepted: int
    """Drafts among the emitted tokens."""
    emitted: int
    """Accepted drafts and one more; less where the text ended before that."""


@dataclass(frozen=True)
class Statistics:
    """Counters of one sample. `seconds` is decode time: from its first round to its last token."""

    tokens: int
    seconds: float
    steps: int
    """Verify rounds it took part in."""
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed: they were found in the prefix cache, or came with a fork."""
    pinned_tokens: int | None = None
    """Prompt tokens that stay in the prefix cache for `cache_ttl`; None where the request has none."""
    time_to_first_token: float = 0.0
    """Seconds from the request's arrival."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tau(self) -> float:
        """Tokens a round: 1 without speculation."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of all drafted tokens; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """The figures `generate --json` and `batch` print."""
        names = ("tokens", "seconds", "tokens_per_second", "steps", "tau", "acceptance_rate", "cached_tokens")
        pinned = {} if self.pinned_tokens is None else {"pinned_tokens": self.pinned_tokens}
        return {name: getattr(self, name) for name in names} | pinned


@dataclass(frozen=True)
class CompletionOutput:
    """One finished sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """All emitted ids, the one that ended the text included."""
    finish_reason: str
    """"stop" (end of sequence, stop id or stop string), "length" (max_tokens or context) or "error"."""
    stop_reason: int | str | None
    """The stop id or string that ended it; None for end of sequence and length; the message of an error."""
    logprobs: list[TokenLogprobs] | None
    seed: int
    """The seed used, also where the request brought none: the same seed gives the same text again."""
    stats: Statistics
    rounds: list[Round]
    """The rounds that emitted these tokens, in order."""


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt, the best first where `best_of` chose; the plain properties are those of the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def stats(self) -> Statistics:
        return self.outputs[0].stats


class Piece(NamedTuple):
    """What one more token let be shown: text held back by earlier tokens comes with the one that sets it free."""

    text: str
    kind: Kind


class TextDelta(NamedTuple):
    """News of one sample after a call of the engine: what to print, and its result once it is finished."""

    request_id: str
    index: int
    prompt_ids: list[int]
    pieces: list[Piece]
    """One a token emitted since the last news."""
    rest: str
    """What was held back until the end."""
    finished: CompletionOutput | None
    gap: float | None
    """Seconds since the tokens before these were read from the device; None where these are the first, or none."""

    @property
    def text(self) -> str:
        """All there is to print."""
        return "".join(piece.text for piece in self.pieces) + self.rest

    @property
    def tokens(self) -> int:
        """Tokens emitted since the last news."""
        return len(self.pieces)


@dataclass
class Sample:
    """One running or waiting sample: the host's side of a device row."""

    request_id: str
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """As asked for, bounded by the context."""
    seed: int
    arrival: float
    place: int = 0
    """In the line: the lower the earlier."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache."""
    pinned_tokens: int = 0
    """Tokens of the prompt that its `cache_ttl` keeps there."""

    @property
    def namespace(self) -> tuple[str]:
        """Who shares cached prefixes with it."""
        return namespace(self.params.cache_salt)


def namespace(cache_salt: str) -> tuple[str]:
    """Who shares cached prefixes."""
    return (cache_salt,)
