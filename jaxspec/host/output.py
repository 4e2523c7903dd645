"""From emitted tokens to text: detokenisation, stop strings, log probabilities and counters of one sample."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, groupby
from typing import NamedTuple, Protocol, runtime_checkable

from jaxspec.config import SamplingParams
from jaxspec.host.request import (
    CompletionOutput,
    Kind,
    Piece,
    Round,
    Sample,
    Statistics,
    TextDelta,
    TokenLogprobs,
)
from jaxspec.host.stop import StopMatcher


@runtime_checkable
class TextStream(Protocol):
    """Incremental detokenisation; `jaxspec.tokenizer` has the one in use."""

    def push(self, ids: list[int]) -> str: ...

    def finish(self) -> str: ...


Counters = tuple[int, ...]
"""A sample's steps, drafted and accepted tokens so far."""


class Emitted(NamedTuple):
    """One token as the device emitted it."""

    token_id: int
    counters: Counters
    logprobs: TokenLogprobs | None


def read_rounds(counters: Iterable[Counters], before: Counters = (0, 0, 0)) -> list[Round]:
    """The rounds behind consecutive tokens, from the counters as of each token; `before` is as of the one before them.

    Tokens of one round share its counters, and no two rounds have the same number of steps.
    """
    rounds = []
    for now, tokens in groupby(counters):
        emitted = sum(1 for _ in tokens)
        # The host may drop the end of a round, for a stop string: what was dropped was not accepted either.
        rounds.append(Round(now[1] - before[1], min(now[2] - before[2], emitted), emitted))
        before = now
    return rounds


def token_kinds(done: Round) -> list[Kind]:
    """The kind of each token of a round: its accepted drafts first, then the target's own if the text got there."""
    if done.accepted == done.emitted:
        own = []
    elif done.drafted == 0:
        own = [Kind.PLAIN]
    else:
        own = [Kind.BONUS if done.accepted == done.drafted else Kind.CORRECTED]
    return [Kind.ACCEPTED] * done.accepted + own


class Transcript:
    """The record of one sample while it runs."""

    def __init__(self, sample: Sample, stream: TextStream) -> None:
        self.sample = sample
        self.tokens: list[Emitted] = []
        self.started = self.first = self.last = 0.0
        self.stop_reason: int | str | None = None
        self._stream = stream
        self._stop = StopMatcher(sample.params.stop_strings, sample.params.include_stop_str_in_output)
        self._text: list[str] = []

    def start(self) -> None:
        """The prompt is in the cache: decode time runs from now."""
        self.started = time.perf_counter()

    def push(self, tokens: list[Emitted], now: float) -> TextDelta:
        """Take tokens in, up to one that completes a stop string: `stop_reason` is then set and the rest dropped.

        `now` is when they were read from the device, by the clock `time.perf_counter`.
        """
        before = self.tokens[-1].counters if self.tokens else (0, 0, 0)
        kinds = chain.from_iterable(map(token_kinds, read_rounds([t.counters for t in tokens], before)))
        gap = now - self.last if tokens and self.tokens else None
        self.last = now
        if tokens and not self.tokens:
            self.first = now
        pieces = []
        for token, kind in zip(tokens, kinds, strict=True):
            self.tokens.append(token)
            armed = len(self.tokens) >= self.sample.params.min_tokens
            text, self.stop_reason = self._stop.push(self._stream.push([token.token_id]), armed)
            pieces.append(Piece(text, kind))
            if self.stop_reason is not None:
                break
        delta = TextDelta(self.sample.request_id, self.sample.index, self.sample.prompt_ids, pieces, "", None, gap)
        self._text.append(delta.text)
        return delta

    def finish(self, delta: TextDelta, reason: str, stop_reason: int | str | None) -> TextDelta:
        """End the sample: the same news with the rest of the text and the result."""
        rest = ""
        if self.stop_reason is None:
            rest, hit = self._rest()
            reason, stop_reason = ("stop", hit) if hit is not None else (reason, stop_reason)
        self._text.append(rest)
        return delta._replace(rest=rest, finished=self._result(reason, stop_reason))

    def _rest(self) -> tuple[str, str | None]:
        armed = len(self.tokens) >= self.sample.params.min_tokens
        text, hit = self._stop.push(self._stream.finish(), armed)
        return (text, hit) if hit is not None else (text + self._stop.finish(), None)

    def _result(self, reason: str, stop_reason: int | str | None) -> CompletionOutput:
        sample = self.sample
        rounds = read_rounds(t.counters for t in self.tokens)
        wanted = sample.params.logprobs is not None
        return CompletionOutput(
            index=sample.index,
            text="".join(self._text),
            token_ids=[t.token_id for t in self.tokens],
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=[t.logprobs for t in self.tokens if t.logprobs is not None] if wanted else None,
            seed=sample.seed,
            stats=Statistics(
                tokens=len(self.tokens),
                seconds=self.last - self.started,
                steps=len(rounds),
                drafted=sum(r.drafted for r in rounds),
                accepted=sum(r.accepted for r in rounds),
                prompt_tokens=len(sample.prompt_ids),
                cached_tokens=sample.cached_tokens,
                pinned_tokens=None if sample.params.cache_ttl is None else sample.pinned_tokens,
                time_to_first_token=self.first - sample.arrival,
            ),
            rounds=rounds,
        )


class Contest:
    """The samples of a `best_of` request: nothing is told of them until all have ended, and then of the best only.

    Those have the highest mean log probability of a token, as OpenAI's completions chose: the sum would prefer short
    texts. A sample in error comes last.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._pieces: dict[int, list[Piece]] = defaultdict(list)
        self._ended: list[tuple[TextDelta, CompletionOutput]] = []

    def take(self, delta: TextDelta) -> list[TextDelta]:
        """Everything about the chosen, best first and numbered so, with the last news of the last sample."""
        self._pieces[delta.index] += delta.pieces
        if delta.finished is not None:
            self._ended.append((delta, delta.finished))
        if len(self._ended) < self.params.samples:
            return []
        ranked = sorted(self._ended, key=lambda ended: (-_mean_logprob(ended[1]), ended[1].index))
        return [self._told(index, *ended) for index, ended in enumerate(ranked[: self.params.n])]

    def _told(self, index: int, delta: TextDelta, result: CompletionOutput) -> TextDelta:
        shown = result.logprobs if self.params.logprobs is not None else None
        finished = replace(result, index=index, logprobs=shown)
        return delta._replace(index=index, pieces=self._pieces[result.index], finished=finished, gap=None)


def _mean_logprob(output: CompletionOutput) -> float:
    if output.finish_reason == "error" or not output.logprobs:
        return -math.inf
    return sum(entry.logprob for entry in output.logprobs) / len(output.logprobs)
