"""What every command that runs a model needs: loading it, handing it requests, and being interrupted."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.host.request import CompletionOutput, Statistics

if TYPE_CHECKING:
    import jaxspec.llm

Messages = list[dict[str, Any]]


def load(config: EngineConfig) -> "jaxspec.llm.LLM":
    """The model, with a sign of life on a terminal. jax is imported here."""
    with Console(stderr=True).status(f"loading {config.model}"):
        from jaxspec.llm import LLM

        return LLM(**msgspec.structs.asdict(config))


def submit(engine: "jaxspec.llm.Serving", request_id: str, source: str | Messages, params: SamplingParams) -> None:
    """Queue a request: text is completed as it is, messages go through the chat template. May raise RequestError."""
    if isinstance(source, str):
        engine.add(request_id, source, params)
    else:
        engine.add_chat(request_id, source, params)


@contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C or SIGTERM ends the command with exit 130 and one line that says what was kept."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted: {kept()}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def sample_fields(output: CompletionOutput) -> dict[str, Any]:
    """A finished sample as JSON fields."""
    fields: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
    }
    if output.logprobs is not None:
        fields["logprobs"] = [entry._asdict() for entry in output.logprobs]
    return fields | {"stats": output.stats.as_dict()}


def summary(outputs: list[CompletionOutput], seconds: float) -> str:
    """One line on samples that took `seconds` together."""
    stats = [output.stats for output in outputs]
    total = Statistics(
        tokens=sum(s.tokens for s in stats),
        seconds=seconds,
        steps=sum(s.steps for s in stats),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        time_to_first_token=min((s.time_to_first_token for s in stats), default=0.0),
    )
    parts = [
        f"{total.tokens} tokens in {total.seconds:.2f} s ({total.tokens_per_second:.1f} tok/s)",
        f"{total.steps} steps (tau {total.tau:.2f})",
    ]
    if total.drafted:
        parts.append(f"{total.acceptance_rate:.0%} of {total.drafted} drafted tokens accepted")
    return ", ".join([*parts, f"first token after {total.time_to_first_token:.2f} s"])
