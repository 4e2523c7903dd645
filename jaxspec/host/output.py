"""From emitted tokens to text: detokenisation, stop strings, log probabilities and counters of one sample."""

import time
from typing import NamedTuple, Protocol, runtime_checkable

from jaxspec.host.request import CompletionOutput, Sample, Statistics, TextDelta, TokenLogprobs
from jaxspec.host.stop import StopMatcher


@runtime_checkable
class TextStream(Protocol):
    """Incremental detokenisation; `jaxspec.tokenizer` has the one in use."""

    def push(self, ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class Emitted(NamedTuple):
    """One token as the device emitted it."""

    token_id: int
    counters: tuple[int, ...]
    """The sample's steps, drafted and accepted tokens so far."""
    logprobs: TokenLogprobs | None


class Transcript:
    """The record of one sample while it runs."""

    def __init__(self, sample: Sample, stream: TextStream) -> None:
        self.sample = sample
        self.tokens: list[Emitted] = []
        self.started = self.first = self.last = time.perf_counter()
        self.stop_reason: int | str | None = None
        self._stream = stream
        self._stop = StopMatcher(sample.params.stop_strings, sample.params.include_stop_str_in_output)
        self._text: list[str] = []

    def start(self) -> None:
        """The prompt is in the cache: decode time runs from now."""
        self.started = time.perf_counter()

    def push(self, tokens: list[Emitted]) -> TextDelta:
        """Take tokens in, up to one that completes a stop string: `stop_reason` is then set and the rest dropped."""
        before = len(self.tokens)
        self.last = time.perf_counter()
        if tokens and not self.tokens:
            self.first = self.last
        shown = []
        for token in tokens:
            self.tokens.append(token)
            armed = len(self.tokens) >= self.sample.params.min_tokens
            text, self.stop_reason = self._stop.push(self._stream.push([token.token_id]), armed)
            shown.append(text)
            if self.stop_reason is not None:
                break
        return self._delta("".join(shown), len(self.tokens) - before, None)

    def finish(self, delta: TextDelta, reason: str, stop_reason: int | str | None) -> TextDelta:
        """End the sample: the same news with the rest of the text and the result."""
        text = ""
        if self.stop_reason is None:
            text, hit = self._rest()
            reason, stop_reason = ("stop", hit) if hit is not None else (reason, stop_reason)
        delta = self._delta(text, 0, None)._replace(text=delta.text + text, tokens=delta.tokens)
        return delta._replace(finished=self._result(reason, stop_reason))

    def _rest(self) -> tuple[str, str | None]:
        armed = len(self.tokens) >= self.sample.params.min_tokens
        text, hit = self._stop.push(self._stream.finish(), armed)
        return (text, hit) if hit is not None else (text + self._stop.finish(), None)

    def _delta(self, text: str, tokens: int, finished: CompletionOutput | None) -> TextDelta:
        self._text.append(text)
        return TextDelta(self.sample.request_id, self.sample.index, self.sample.prompt_ids, text, tokens, finished)

    def _result(self, reason: str, stop_reason: int | str | None) -> CompletionOutput:
        sample = self.sample
        steps, drafted, accepted = self.tokens[-1].counters if self.tokens else (0, 0, 0)
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
                steps=steps,
                drafted=drafted,
                accepted=accepted,
                prompt_tokens=len(sample.prompt_ids),
                time_to_first_token=self.first - sample.arrival,
            ),
        )
