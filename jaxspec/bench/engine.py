"""What the engine's parts are worth, one scenario each: pages, prefix cache, chunked prefill, formats, tiers, and the
whole.

Cases that are compared take turns within a repeat, so that a busy machine slows all of them.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import msgspec

from jaxspec.bench.contiguous import contiguous, serve
from jaxspec.bench.questions import Question, mixed
from jaxspec.config import PREFILL_ROW, EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError, RequestError
from jaxspec.host.metrics import Metrics
from jaxspec.host.request import CompletionOutput, TextDelta
from jaxspec.host.scheduler import Counters
from jaxspec.models.loading import LoadedModel

Figures = dict[str, int | float]


class Measured(NamedTuple):
    """One case of a scenario in one repeat."""

    scenario: str
    case: str
    base: str
    """The case that it is compared with."""
    figures: Figures


@dataclass(frozen=True)
class Sizes:
    """How large the scenarios are, in tokens where nothing else is said."""

    limit: int = 1024
    """memory: prompt and answer of a request."""
    crowd: int = 8
    """memory: requests for each that a contiguous cache holds."""
    answer: int = 128
    """memory, throughput."""
    document: int = 2000
    readers: int = 32
    """prefix: requests over one document."""
    short_answer: int = 8
    steps: int = 10
    """growing: of the agent, and turns of the chat."""
    running: int = 8
    """chunks: requests that run when the long prompt comes."""
    long: int = 6000
    questions: int = 64
    batches: tuple[int, ...] = (1, 8, 32)
    """throughput: requests at once."""
    little: int = 2**26
    """formats: bytes of cache."""
    eager: int = 48
    """formats: requests that share it, of at most half of `limit` tokens each."""
    crowded: int = 32
    """formats: of these, at once at most."""
    formats: tuple[str, ...] = ("bfloat16", "float32", "fp8", "int8", "int4")
    visited: int = 4096
    """offload: tokens of a document."""
    visitors: int = 6
    """offload: documents, more than five times what the cache has room for."""


@dataclass(frozen=True)
class Bench:
    """What scenarios work with."""

    loaded: LoadedModel
    config: EngineConfig
    questions: Sequence[Question]
    repeats: int = 3
    sizes: Sizes = Sizes()

    def engine(self, context: int, **options: Any) -> Engine:
        """An engine for requests of so many tokens. ConfigError where the model has not been trained for them."""
        if context > self.loaded.spec.max_context:
            raise ConfigError(
                f"this takes a context of {context} tokens, {self.config.model} has {self.loaded.spec.max_context}: "
                "take another --model or scenario"
            )
        return Engine(self.loaded, msgspec.structs.replace(self.config, max_context=context, **options))

    @property
    def texts(self) -> list[str]:
        """The questions, one of each category after the other."""
        return [question.turns[0] for question in mixed(self.questions)]

    def asked(self) -> list[list[int]]:
        """The questions as prompts."""
        tokenizer = self.loaded.tokenizer
        chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in self.texts]
        return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]

    def prose(self, tokens: int, start: int = 0) -> list[int]:
        """So many tokens of running text: the questions one after the other, again and again."""
        ids = self.loaded.tokenizer.encode("\n\n".join(self.texts), add_special_tokens=False)
        return list(islice(cycle(ids), start, start + tokens))


def memory(bench: Bench) -> Iterator[Measured]:
    """Requests that the same memory holds at once: contiguous rows against pages of 16 slots and of the default."""
    sizes, base = bench.sizes, f"{bench.sizes.limit} slots each"
    lengths = [len(ids) for ids in bench.asked() if len(ids) + sizes.answer <= sizes.limit]
    if not lengths:
        raise ConfigError(f"no question of --prompts has room for {sizes.answer} tokens within {sizes.limit}")
    probe = bench.engine(sizes.limit, page_size=sizes.limit, max_batch=2**20)
    rows = probe.program.pool.num_pages
    prompts = list(islice(cycle(lengths), rows * sizes.crowd))
    yield Measured(
        "memory", base, base, serve(contiguous(rows * sizes.limit, sizes.limit), probe, prompts, sizes.answer)
    )
    for page in dict.fromkeys((16, None)):
        engine = bench.engine(sizes.limit, page_size=page, max_batch=len(prompts), prefix_cache=False)
        case = f"pages of {engine.program.pool.page_size}"
        yield Measured("memory", case, base, serve(engine.scheduler, engine, prompts, sizes.answer))


def prefix(bench: Bench) -> Iterator[Measured]:
    """Questions over one document, all there at once, with the prefix cache and without it."""
    sizes = bench.sizes
    document = bench.prose(sizes.document)
    encode = bench.loaded.tokenizer.encode
    questions = [
        encode(text, add_special_tokens=False)[:PREFILL_ROW] for text in islice(cycle(bench.texts), sizes.readers)
    ]
    params = _exactly(sizes.short_answer)
    context = sizes.document + PREFILL_ROW + sizes.short_answer
    engines = {
        "cache off": bench.engine(context, prefix_cache=False),
        "cache on": bench.engine(context, prefix_cache=True),
    }
    for engine in engines.values():
        play(engine, [document[: sizes.document // 4] + ids for ids in questions], params)
    for _ in range(bench.repeats):
        for case, engine in engines.items():
            play(engine, [document + ids for ids in questions], params)
            names = ("seconds", "tokens_per_second", "prompt_tokens", "hit_tokens", "computed_tokens")
            yield Measured("prefix", case, "cache off", _chosen(engine, names))


def growing(bench: Bench) -> Iterator[Measured]:
    """Prompts that hold all that went before: an agent that reads what its tools say, and a chat."""
    steps = bench.sizes.steps
    for case, first, more, answer in (("agent", 600, 150, 48), ("chat", 40, 40, 128)):
        engine = bench.engine(first + steps * (more + answer + 32) + 64, prefix_cache=True)
        yield Measured("growing", case, case, _converse(engine, bench, (first, more, answer)))


def _converse(engine: Engine, bench: Bench, sizes: tuple[int, int, int]) -> Figures:
    """A conversation whose first message, further messages and answers have these sizes."""
    first, more, answer = sizes
    at, said, before = 0, [], []
    prompts = computed = again = 0
    for step in range(bench.sizes.steps):
        length = more if step else first
        text = engine.tokenizer.decode(bench.prose(length, at))
        at += length
        said.append({"role": "user", "content": text})
        engine.add_chat("chat", said, _exactly(answer))
        (news,) = finish(engine)
        stats = news.stats
        prompt = engine.tokenizer.encode(engine.tokenizer.apply_chat_template(said), add_special_tokens=False)
        known = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), len(before))
        prompts += len(prompt)
        computed += len(prompt) - stats.cached_tokens
        again += max(known - stats.cached_tokens, 0)
        before = prompt + news.token_ids
        said.append({"role": "assistant", "content": news.text})
    return {
        "steps": bench.sizes.steps,
        "prompt_tokens": prompts,
        "computed_tokens": computed,
        "computed_share": computed / prompts,
        "recomputed_tokens": again,
        "recomputed_share": again / prompts,
    }


def chunks(bench: Bench) -> Iterator[Measured]:
    """A long prompt comes while others decode: in chunks, and whole."""
    sizes, chunk = bench.sizes, bench.config.prefill_chunk
    whole = -(-sizes.long // PREFILL_ROW) * PREFILL_ROW
    context = sizes.long + sizes.short_answer
    engines = {
        "whole prompt": bench.engine(context, prefill_chunk=whole, max_batch=sizes.running + 1),
        f"chunks of {chunk}": bench.engine(context, prefill_chunk=chunk, max_batch=sizes.running + 1),
    }
    # Those that run must still do so when the last chunk is written.
    answer = sizes.answer + -(-sizes.long // chunk)
    for engine in engines.values():
        _interrupt(engine, bench, 2 * chunk + PREFILL_ROW, answer)
    for _ in range(bench.repeats):
        for case, engine in engines.items():
            yield Measured("chunks", case, "whole prompt", _interrupt(engine, bench, sizes.long, answer))


def _interrupt(engine: Engine, bench: Bench, long: int, answer: int) -> Figures:
    """Let requests run, add a long prompt, and watch from then on until all have ended."""
    sizes = bench.sizes
    forget(engine)
    for index in range(sizes.running):
        engine.add(str(index), bench.prose(32, 32 * index), _exactly(answer))
    heard: set[str] = set()
    while len(heard) < sizes.running:
        heard |= {news.request_id for news in engine.step() if news.tokens}
    before, began = engine.metrics.tokens, engine.metrics.seconds
    engine.add("long", bench.prose(long, 32 * sizes.running), _exactly(sizes.short_answer))
    gaps: list[float] = []
    outputs = finish(engine, lambda news: gaps.append(news.gap or 0.0) if news.request_id != "long" else None)
    seconds = engine.metrics.seconds - began
    stats = next(output.stats for output in outputs if output.stats.prompt_tokens == long)
    return {
        "longest_gap": max(gaps),
        "tokens_per_second": (long + engine.metrics.tokens - before) / seconds,
        "ttft_of_long": stats.time_to_first_token,
    }


def throughput(bench: Bench) -> Iterator[Measured]:
    """All questions at once, prefill included, at several batch sizes, plain and with drafts from the text."""
    sizes = bench.sizes
    prompts = list(islice(cycle(bench.asked()), sizes.questions))
    context = max(map(len, prompts)) + sizes.answer
    for batch in sizes.batches:
        engines = {name: bench.engine(context, drafter=name, max_batch=batch) for name in ("none", "ngram")}
        for engine in engines.values():
            play(engine, prompts[:batch], _exactly(sizes.answer // 4))
        for _ in range(bench.repeats):
            for name, engine in engines.items():
                play(engine, prompts, _exactly(sizes.answer))
                names = ("tokens", "seconds", "tokens_per_second", "tau", "preemptions")
                figures = _chosen(engine, names)
                yield Measured("throughput", f"batch {batch}, {name}", f"batch {batch}, none", figures)


def formats(bench: Bench) -> Iterator[Measured]:
    """Requests that the same little memory runs at once, and the throughput of all, by the format of their cache."""
    sizes, limit = bench.sizes, bench.sizes.limit // 2
    short = [ids for ids in bench.asked() if len(ids) + sizes.answer <= limit]
    if not short:
        raise ConfigError(f"no question of --prompts has room for {sizes.answer} tokens within {limit}")
    prompts = list(islice(cycle(short), sizes.eager))
    shape = {
        "kv_memory": sizes.little / 2**30,
        "max_batch": sizes.crowded,
        "page_size": PREFILL_ROW,
        "prefix_cache": False,
    }
    engines = {name: bench.engine(limit, kv_dtype=name, **shape) for name in sizes.formats}
    for engine in engines.values():
        play(engine, prompts[: sizes.crowded], _exactly(4))
    for _ in range(bench.repeats):
        for name, engine in engines.items():
            play(engine, prompts, _exactly(sizes.answer))
            kept = ("kv_bytes_per_token", "peak_concurrency", "tokens_per_second", "preemptions")
            yield Measured("formats", name, sizes.formats[0], _chosen(engine, kept))


def offload(bench: Bench) -> Iterator[Measured]:
    """Second questions about documents of which the cache holds one: computed again, and restored from where they are
    kept meanwhile."""
    sizes = bench.sizes
    context = sizes.visited + PREFILL_ROW + sizes.short_answer
    room = 1.1 * context * bench.engine(context).program.pool.token_bytes / 2**30
    much = 2 * sizes.visitors * room
    with tempfile.TemporaryDirectory() as folder:
        tiers: dict[str, dict[str, Any]] = {
            "computed again": {},
            "host memory": {"offload_memory": much},
            "disk": {"offload_disk": much, "offload_folder": folder},
        }
        engines = {case: bench.engine(context, kv_memory=room, max_batch=1, **tier) for case, tier in tiers.items()}
        for _ in range(bench.repeats):
            for case, engine in engines.items():
                yield Measured("offload", case, "computed again", _visit_twice(engine, bench))


def _visit_twice(engine: Engine, bench: Bench) -> Figures:
    """Ask about each document, one after the other, and then again."""
    sizes, question = bench.sizes, PREFILL_ROW // 2
    documents = [bench.prose(sizes.visited, 7 * index + 1) for index in range(sizes.visitors)]
    forget(engine)
    times: list[float] = []
    for start in (0, question):
        times = []
        for ids in documents:
            engine.add("one", [*ids, *bench.prose(question, start)], _exactly(sizes.short_answer))
            times += [output.stats.time_to_first_token for output in finish(engine)]
        if engine.scheduler.offload is not None:
            engine.scheduler.offload.flush()
    names = ("hit_tokens", "restored_tokens", "computed_tokens")
    return {"ttft_of_second_visits": statistics.median(times)} | _chosen(engine, names)


SCENARIOS: dict[str, tuple[Callable[[Bench], Iterator[Measured]], ...]] = {
    "memory": (memory,),
    "prefix": (prefix, growing),
    "chunks": (chunks,),
    "throughput": (throughput,),
    "formats": (formats,),
    "offload": (offload,),
}


def run(name: str, bench: Bench) -> Iterator[Measured]:
    """The cases of a scenario, as they are measured."""
    return chain.from_iterable(scenario(bench) for scenario in SCENARIOS[name])


def play(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Answer prompts on an idle engine that remembers nothing; its metrics are then of these only."""
    forget(engine)
    for index, ids in enumerate(prompts):
        engine.add(str(index), ids, params)
    finish(engine)


def forget(engine: Engine) -> None:
    """Empty the prefix cache, and count anew."""
    if engine.scheduler.cache is not None:
        engine.scheduler.cache.clear()
    if engine.scheduler.offload is not None:
        engine.scheduler.offload.clear()
    engine.scheduler.counters = Counters()
    engine.metrics = Metrics(engine.scheduler.counters)


def finish(engine: Engine, hear: Callable[[TextDelta], None] = lambda news: None) -> list[CompletionOutput]:
    """Run until nothing is left; RequestError where a text ended in an error."""
    outputs = []
    while engine.has_work:
        for news in engine.step():
            hear(news)
            if news.finished is not None:
                outputs.append(news.finished)
    for output in outputs:
        if output.finish_reason == "error":
            raise RequestError(str(output.stop_reason))
    return outputs


def _chosen(engine: Engine, names: Sequence[str]) -> Figures:
    figures = engine.figures()
    return {name: figures[name] for name in names}


def _exactly(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)
