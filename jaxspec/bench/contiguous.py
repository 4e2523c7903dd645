"""How many requests the same memory serves with pages, and with a contiguous cache: counted on the host's books.

A contiguous cache gives every request the slots of the longest one, so it has as many rows as the memory holds of
those, and nothing else limits it: its books are those of a scheduler with as many rows and one page a row. No model
runs: every request emits one token a round and as many as it may, which is all that the books depend on.
"""

import time
from collections.abc import Sequence

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.host.metrics import Metrics
from jaxspec.host.output import Transcript
from jaxspec.host.request import Sample
from jaxspec.host.scheduler import Scheduler


def contiguous(slots: int, limit: int) -> Scheduler:
    """The books of a cache of so many slots that gives each request `limit` of them."""
    rows = slots // limit
    # Admission leaves a page free for every request that runs, to grow into; here none grows.
    return Scheduler(2 * rows, limit, look_ahead=0, max_emitted=1, max_batch=rows, prefix_cache=False)


def serve(scheduler: Scheduler, engine: Engine, prompts: Sequence[int], answer: int) -> dict[str, int | float]:
    """Take requests with prompts of these lengths, all there from the beginning, through the books of a scheduler.

    `engine` gives what else a round depends on. Concurrency is requests that hold memory, its mean that of the rounds
    that left others waiting. A round's waste is over the slots that hold a token.
    """
    metrics = Metrics(scheduler.counters)
    for place, length in enumerate(prompts):
        params = SamplingParams(max_tokens=answer)
        sample = Sample(str(place), 0, [0] * length, params, answer, 0, time.perf_counter(), place)
        scheduler.add(sample, Transcript(sample, engine.tokenizer.stream(True)))
    crowds: list[int] = []
    rounds = 0
    while scheduler.waiting or scheduler.rows:
        _begin_round(scheduler, engine.config.prefill_chunk)
        metrics.take([], scheduler)
        crowds += [len(scheduler.rows)] if scheduler.waiting else []
        rounds += 1
        _end_round(scheduler, answer)
    figures = metrics.as_dict()
    return {
        "requests": len(prompts),
        "mean_length": sum(prompts) / len(prompts) + answer,
        "peak_concurrency": figures["peak_concurrency"],
        "mean_concurrency": sum(crowds) / len(crowds) if crowds else 0.0,
        "waste_share": figures["waste"]["mean"],
        "peak_waste_share": figures["waste"]["peak"],
        "rounds": rounds,
        "preemptions": figures["preemptions"],
    }


def _begin_round(scheduler: Scheduler, chunk: int) -> None:
    """What the engine has the scheduler do before the device does a round."""
    scheduler.admit(scheduler.max_batch)
    scheduler.next_chunks(chunk)
    for _, running in scheduler.reserve(1)[1]:
        running.saved = True


def _end_round(scheduler: Scheduler, answer: int) -> None:
    """A token for each row that was ready."""
    for running in scheduler.decoding.values():
        scheduler.commit(running, [0])
        if len(running.tokens) == len(running.sample.prompt_ids) + answer:
            scheduler.finish(running)
