"""The thin shell: joins the host's books and the device's rounds."""

import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxspec import leading
from jaxspec.config import PREFILL_ROW, EngineConfig, SamplingParams
from jaxspec.drafters import get_drafter
from jaxspec.errors import RequestError
from jaxspec.host.metrics import Metrics, Status
from jaxspec.host.output import Contest, Emitted, Transcript
from jaxspec.host.packing import Part, Shape, packed, parts_of, shapes_of
from jaxspec.host.request import Sample, TextDelta, TokenLogprobs
from jaxspec.host.running import Admission, Chunk, Running
from jaxspec.host.scheduler import Scheduler
from jaxspec.implementation import kernels_of
from jaxspec.kv.policy import VOTES
from jaxspec.models.loading import LoadedModel
from jaxspec.offloading import offload_of
from jaxspec.program import Finish, Program
from jaxspec.sampling import sampling_row
from jaxspec.sizes import budget_of, context_of, kept_of, pool_of
from jaxspec.types import Models, Output
from jaxspec.worker import Worker

BATCH_BUCKETS = (1, 8, 32, 128, 512)
"""Batch sizes that decoding compiles for, below the engine's own maximum."""
PLACES_A_LEVEL = 64
"""Places in line that a level of priority is worth."""


class Flight(NamedTuple):
    """Rounds that the device was given and the host has not read."""

    output: Output
    rows: dict[int, Running]


class News(NamedTuple):
    """What was read of one sample and not told yet."""

    running: Running
    emitted: list[Emitted]
    finish: Finish
    when: float


class Engine:
    """Serves requests in a batch: `add` them, then call `step` while there `has_work`."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.tokenizer, self.spec, self.config = loaded.tokenizer, loaded.spec, config
        self.max_context = context_of(config, loaded.spec)
        drafter, draft_params = get_drafter(config, loaded)
        pool, self._table_width = pool_of(config, loaded.local, drafter, kernels_of(config.implementation))
        self.program = Program(loaded.local, pool, drafter)
        params = Models(loaded.params, draft_params)
        self.device = leading.led(Worker(self.program, params, self._table_width, PREFILL_ROW, loaded.mesh))
        budget = budget_of(pool, drafter)
        self.scheduler = Scheduler(
            pool.num_pages,
            pool.page_size,
            look_ahead=drafter.tree.size,
            max_emitted=self.program.max_emitted,
            max_batch=config.max_batch,
            max_context=self.max_context,
            prefix_cache=config.prefix_cache,
            # A draft's cache has gaps where rounds drafted nothing, and so has a condensed one: only what prefill wrote
            # is whole in both.
            publish_output=drafter.model is None and budget is None,
            # What a page lacks at its end may be in a tail, which is the parent's own.
            share_partial=not pool.format.group,
            kept=kept_of(pool.policy, drafter),
            budget=budget,
            table_width=self._table_width,
            offload=offload_of(config, self.device),
        )
        self.metrics = Metrics(self.scheduler.counters)
        self._buckets = [b for b in BATCH_BUCKETS if b < config.max_batch] + [config.max_batch]
        self._shapes = {False: shapes_of(config.prefill_chunk, PREFILL_ROW), True: [Shape(VOTES, VOTES)]}
        """Of calls to prefill, and of those of tokens that vote."""
        self._batch = 0
        self._arrivals = 0
        self._flight: Flight | None = None
        self._contests: dict[str, Contest] = {}
        """Of the requests that want the best of their samples."""
        self.seeds = random.Random(config.seed)
        """Of requests that bring none."""

    @property
    def has_work(self) -> bool:
        """Whether any sample waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.rows)

    @property
    def samples(self) -> int:
        """Samples that wait or run."""
        return len(self.scheduler.waiting) + len(self.scheduler.rows)

    def status(self) -> Status:
        """What goes on now."""
        return self.metrics.status(self.scheduler)

    def lift(self, prompt: list[int], cache_salt: str) -> int:
        """Let go of the longest pinned prefix of a prompt; returns how many tokens it had."""
        return self.scheduler.pins.lift(prompt, cache_salt)

    def figures(self) -> dict[str, Any]:
        """How it has done (see `Metrics.as_dict`), and the bytes that a token, and a tail if there is one, take.

        With host memory or disk for the cache also `offload`: see `Offload.figures`.
        """
        pool, offload = self.program.pool, self.scheduler.offload
        memory = {"kv_bytes_per_token": pool.token_bytes, "kv_tail_bytes": pool.tail_bytes}
        return self.metrics.as_dict() | memory | ({"offload": offload.figures()} if offload else {})

    def add_chat(self, request_id: str, messages: list[dict], params: SamplingParams) -> None:
        """Queue a conversation, written out by the model's chat template. Raises RequestError."""
        text = self.tokenizer.apply_chat_template(messages)
        self.add(request_id, self.tokenizer.encode(text, add_special_tokens=False), params)

    def add(self, request_id: str, prompt: str | list[int], params: SamplingParams) -> None:
        """Queue a prompt of text or token ids. Raises RequestError when it can never be served."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids, params)
        max_tokens = min(params.max_tokens, self.max_context - len(ids))
        seed = params.seed if params.seed is not None else self.seeds.getrandbits(64)
        place = self._arrivals + PLACES_A_LEVEL * params.priority
        now = time.perf_counter()
        drawn = _drawn(params)
        samples = [Sample(request_id, i, ids, drawn, max_tokens, seed, now, place) for i in range(params.samples)]
        need, have = self.scheduler.pages_needed(samples[0]), self.scheduler.pages.num_pages
        if need > have:
            size, less = self.program.pool.page_size, "max_tokens"
            if self.program.pool.policy.forgets:
                less += " or kv_window"
            raise RequestError(
                f"prompt of {len(ids)} tokens with max_tokens {max_tokens} needs {need} pages of {size} slots, "
                f"the pool has {have}: lower {less} or raise kv_memory"
            )
        self.scheduler.pins.check(samples[0], now)
        if params.best_of is not None:
            self._contests[request_id] = Contest(params)
        self._arrivals += 1
        for sample in samples:
            stream = self.tokenizer.stream(params.skip_special_tokens)
            self.scheduler.add(sample, Transcript(sample, stream))

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more is heard of it."""
        for name in self.scheduler.abort(request_id):
            self.device.forget(name)
        self._contests.pop(request_id, None)

    def step(self) -> list[TextDelta]:
        """Read what the device has done, give it more to do, and meanwhile make text of what was read.

        So the first call of a busy time has no news.
        """
        self.scheduler.pins.tick(time.perf_counter())
        news = self._read()
        self._dispatch()
        if self.scheduler.offload is not None:
            self.scheduler.offload.settle()
        told = [self._tell(piece) for piece in news]
        self.metrics.take(told, self.scheduler)
        return [delta for raw in told for delta in self._chosen(raw)]

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_context}, answer included: "
                "shorten it or raise max_context"
            )
        known = self.spec.valid_vocab
        for what, values in (
            ("prompt token ids", ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias ids", list(params.logit_bias)),
        ):
            if values and not (min(values) >= 0 and max(values) < known):
                raise RequestError(f"{what} must be 0 to {known - 1}, the model's vocabulary")

    def _dispatch(self) -> None:
        """Admit what fits, write a chunk of prompts, and start some rounds of the rows that are ready."""
        if not self.has_work:
            return
        self._resize()
        for admission in self.scheduler.admit(self._batch):
            self._place(admission)
        before = self.scheduler.decoding
        self._prefill(self.scheduler.next_chunks(self.config.prefill_chunk))
        for row, source, target in self.scheduler.condense():
            # Two shapes at most: prompts may have any number of pages.
            width = len(target) if len(source) <= len(target) else self._table_width
            self.device.condense(row, _line(source, width), _line(target, width))
        ready = self.scheduler.decoding
        # A first token is shown at once, and prompts that are not written yet wait for one round only.
        alone = len(ready) == len(self.scheduler.rows) and ready.keys() == before.keys()
        rounds, gone = self.scheduler.reserve(self.program.max_rounds if alone else 1)
        for row, running in gone:
            running.saved = f"{running.sample.request_id}/{running.sample.index}"
            self.device.save(row, running.saved)
        ready = self.scheduler.decoding
        if not ready:
            return
        self._send_pages()
        active = np.zeros(self._batch, bool)
        active[list(ready)] = True
        # With others waiting, the first free row ends the call.
        least = len(ready) if self.scheduler.waiting else 1
        self._flight = Flight(self.device.run(active, rounds, least), ready)

    def _resize(self) -> None:
        """Move to the smallest batch bucket that holds the work there is."""
        wanted = next(b for b in self._buckets if b >= self.scheduler.wanted_rows)
        if not self._batch:
            self.device.start(wanted)
        elif wanted != self._batch:
            old = self.scheduler.renumber()
            # Rows beyond the running ones repeat any row: they stay inactive until they are admitted.
            self.device.select_rows(np.array(old + [0] * (wanted - len(old)), np.int32))
        self._batch = wanted

    def _place(self, admission: Admission) -> None:
        """Give an admitted sample its row on the device."""
        running, copy = admission
        sample, row = running.sample, running.row or 0
        if copy is not None:
            self.device.copy_page(copy.source, copy.target)
        if running.saved is not None:
            self.device.restore(row, running.saved, len(running.tokens) - 1)
            running.saved = None
            return
        # Two shapes at most: few prompts are as long as texts without end may be.
        size = min(self.max_context, self.spec.max_context)
        prompt = np.zeros(size if len(sample.prompt_ids) <= size else self.max_context, np.int32)
        prompt[: len(sample.prompt_ids)] = sample.prompt_ids
        sampling = sampling_row(
            sample.params,
            seed=sample.seed,
            sample=sample.index,
            max_tokens=sample.max_tokens,
            eos_ids=self.tokenizer.eos_ids,
        )
        self.device.admit(row, prompt, len(sample.prompt_ids), tuple(sampling))

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Write chunks of prompts, packed one after the other, and start the clocks of those that are whole now."""
        if chunks:
            self._send_pages()
        for votes, shapes in self._shapes.items():
            parts = [part for chunk in chunks if chunk.votes == votes for part in self._parts(chunk)]
            for table, tokens in packed(parts, shapes):
                self.device.prefill(table, tokens, votes)
        ready = [chunk.running for chunk in chunks if chunk.running.prefilled]
        if ready:
            self.device.wait()
        for chunk in chunks:
            self.scheduler.publish(chunk.running)
        for running in ready:
            running.transcript.start()

    def _parts(self, chunk: Chunk) -> Iterator[Part]:
        """A chunk as rows of a call; each token that votes is one by itself."""
        width = 1 if chunk.votes else PREFILL_ROW
        return parts_of(chunk.running.row or 0, chunk.start, chunk.tokens, width, self.program.pool.format.group)

    def _send_pages(self) -> None:
        table, dropped = np.zeros((self._batch, self._table_width), np.int32), np.zeros(self._batch, np.int32)
        for row, running in self.scheduler.rows.items():
            table[row] = _line(running.table.pages, self._table_width)
            dropped[row] = running.table.dropped
        self.device.set_pages(table, dropped)

    def _read(self) -> list[News]:
        """Wait for the device, and take what it emitted to the books."""
        if self._flight is None:
            return []
        (output, rows), self._flight = self._flight, None
        finish = self.device.finish
        counts, tokens, stats = (np.asarray(a) for a in (output.count, output.tokens, output.stats))
        asked = any(running.sample.params.logprobs is not None for running in rows.values())
        logprobs = (
            tuple(np.asarray(a) for a in (output.logprob, output.top_ids, output.top_logprobs)) if asked else None
        )
        news, now = [], time.perf_counter()
        for row, running in rows.items():
            if running.row != row:
                continue  # ended by the host while the device went on
            top = running.sample.params.logprobs
            emitted = [
                Emitted(int(tokens[row, i]), tuple(stats[row, i].tolist()), _logprobs(tokens, logprobs, row, i, top))
                for i in range(counts[row])
            ]
            self.scheduler.commit(running, [token.token_id for token in emitted])
            why = Finish(int(finish[row]))
            if why != Finish.NOT_FINITE:
                self.scheduler.publish(running)
            if why != Finish.RUNNING:
                self.scheduler.finish(running)
            news.append(News(running, emitted, why, now))
        return news

    def _tell(self, news: News) -> TextDelta:
        """Make text of what was emitted; a stop string that shows up in it ends the sample."""
        transcript = news.running.transcript
        delta = transcript.push(news.emitted, news.when)
        reason = _reason(transcript, news.finish)
        if reason is None:
            return delta
        self.scheduler.finish(news.running)
        if news.running.saved is not None:  # it had to give way meanwhile
            self.device.forget(news.running.saved)
        return transcript.finish(delta, *reason)

    def _chosen(self, delta: TextDelta) -> list[TextDelta]:
        """The news, or what comes of it where the samples of a request compete."""
        contest = self._contests.get(delta.request_id)
        if contest is None:
            return [delta]
        chosen = contest.take(delta)
        if chosen:
            del self._contests[delta.request_id]
        return chosen


def _line(pages: list[int], width: int) -> np.ndarray:
    """Pages as a line of a table of the devices."""
    line = np.zeros(width, np.int32)
    line[: len(pages)] = pages
    return line


def _drawn(params: SamplingParams) -> SamplingParams:
    """What each sample is drawn with: those that compete are judged by their log probabilities."""
    if params.best_of is None or params.logprobs is not None:
        return params
    return msgspec.structs.replace(params, logprobs=0)


def _reason(transcript: Transcript, finish: Finish) -> tuple[str, int | str | None] | None:
    """finish_reason and stop_reason of an ended sample; None while it runs."""
    if transcript.stop_reason is not None:
        return "stop", transcript.stop_reason
    if finish == Finish.STOP:
        last = transcript.tokens[-1].token_id
        return "stop", last if last in transcript.sample.params.stop_token_ids else None
    if finish == Finish.LENGTH:
        return "length", None
    if finish == Finish.NOT_FINITE:
        return "error", "the model gave logits that are not finite: check its weights"
    return None


def _logprobs(tokens, logprobs, row: int, i: int, top: int | None) -> TokenLogprobs | None:
    if logprobs is None or top is None:
        return None
    chosen, ids, values = (a[row, i] for a in logprobs)
    best = dict(zip(ids[:top].tolist(), values[:top].tolist(), strict=True))
    return TokenLogprobs(int(tokens[row, i]), float(chosen), best)
