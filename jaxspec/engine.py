"""The thin shell: joins the host's books and the device's rounds."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.drafters import get_drafter
from jaxspec.errors import CapacityError, ConfigError, RequestError
from jaxspec.host.output import Emitted, Transcript
from jaxspec.host.request import Sample, TextDelta, TokenLogprobs
from jaxspec.host.scheduler import Scheduler
from jaxspec.kv.formats import get_format
from jaxspec.kv.pool import PoolSpec
from jaxspec.models.loading import LoadedModel
from jaxspec.models.spec import ModelSpec
from jaxspec.models.transformer import stack_layers
from jaxspec.program import Finish, Program
from jaxspec.sampling import sampling_row
from jaxspec.types import Models, Output, Params
from pallas_kernels import Rows

CHUNK = 64
"""Prompt tokens of one prefill row."""
CHUNK_ROWS = (1, 4)
"""Prefill rows of one call: with CHUNK, the shapes that prefill compiles for."""
BATCH_BUCKETS = (1, 8, 32, 128, 512)
"""Batch sizes that decoding compiles for, below the engine's own maximum."""


class Engine:
    """Serves requests in a batch: `add` them, then call `step` while there `has_work`."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.tokenizer, self.spec, self.config = loaded.tokenizer, loaded.spec, config
        self.max_context = _context(config, loaded.spec.max_context)
        drafter, draft_params = get_drafter(config, loaded)
        pool, self._table_width = _pool(config, loaded.spec, drafter.model, self.max_context + drafter.tree.size)
        self.program = Program(loaded.spec, pool, drafter)
        self.params = Models(_laid_out(loaded.params), _laid_out(draft_params))
        self.scheduler = Scheduler(pool.num_pages, pool.page_size, drafter.tree.size, config.max_batch)
        self._buckets = [b for b in BATCH_BUCKETS if b < config.max_batch] + [config.max_batch]
        self._batch = 0
        self._seeds = random.Random(config.seed)

    @property
    def has_work(self) -> bool:
        """Whether any sample waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.rows)

    def add_chat(self, request_id: str, messages: list[dict], params: SamplingParams) -> None:
        """Queue a conversation, written out by the model's chat template. Raises RequestError."""
        text = self.tokenizer.apply_chat_template(messages)
        self.add(request_id, self.tokenizer.encode(text, add_special_tokens=False), params)

    def add(self, request_id: str, prompt: str | list[int], params: SamplingParams) -> None:
        """Queue a prompt of text or token ids. Raises RequestError when it can never be served."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids, params)
        max_tokens = min(params.max_tokens, self.max_context - len(ids))
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        now = time.perf_counter()
        samples = [Sample(request_id, i, ids, params, max_tokens, seed, now) for i in range(params.n)]
        need, have = self.scheduler.pages_needed(samples[0]), self.scheduler.pages.num_pages
        if need > have:
            size = self.program.pool.page_size
            raise RequestError(
                f"prompt of {len(ids)} tokens with max_tokens {max_tokens} needs {need} pages of {size} slots, "
                f"the pool has {have}: lower max_tokens or raise kv_memory"
            )
        self.scheduler.waiting.extend(samples)

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more is heard of it."""
        self.scheduler.abort(request_id)

    def step(self) -> list[TextDelta]:
        """Admit what fits, write its prompts, run some rounds; returns what each running sample has to tell."""
        self._resize()
        new = self.scheduler.admit(self._batch, self._open)
        for row in new:
            self._admit(row)
        self._prefill(new)
        rows = self.scheduler.rows
        if not rows:
            return []
        active = np.zeros(self._batch, bool)
        active[list(rows)] = True
        self.state = decode.set_active(self.state, active)
        # A first token is shown at once; with others waiting, the first free row ends the call.
        rounds = 1 if new else self.program.max_rounds
        least = len(rows) if self.scheduler.waiting else 1
        self.state, output = decode.run(
            self.params, self.state, np.int32(rounds), np.int32(least), program=self.program
        )
        return self._collect(output)

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

    def _open(self, sample: Sample) -> Transcript:
        return Transcript(sample, self.tokenizer.stream(sample.params.skip_special_tokens))

    def _resize(self) -> None:
        """Move to the smallest batch bucket that holds the work there is."""
        wanted = next(b for b in self._buckets if b >= self.scheduler.wanted_rows)
        if not self._batch:
            self.state = decode.init_state(self.program, wanted, self._table_width)
        elif wanted != self._batch:
            old = self.scheduler.renumber()
            # Rows beyond the running ones repeat any row: they stay inactive until they are admitted.
            self.state = decode.select_rows(self.state, jnp.array(old + [0] * (wanted - len(old)), jnp.int32))
        self._batch = wanted

    def _admit(self, row: int) -> None:
        running = self.scheduler.rows[row]
        sample = running.sample
        pages = np.zeros(self._table_width, np.int32)
        pages[: len(running.pages)] = running.pages
        prompt = np.zeros(self.max_context, np.int32)
        prompt[: len(sample.prompt_ids)] = sample.prompt_ids
        sampling = sampling_row(
            sample.params,
            seed=sample.seed,
            sample=sample.index,
            max_tokens=sample.max_tokens,
            eos_ids=self.tokenizer.eos_ids,
        )
        self.state = decode.admit(
            self.state, np.int32(row), pages, prompt, np.int32(len(sample.prompt_ids)), sampling, program=self.program
        )

    def _prefill(self, new: list[int]) -> None:
        """Write the prompts of new rows, all but their last token, in calls of a few chunks each."""
        chunks = [
            (row, start, prompt[start : start + CHUNK])
            for row in new
            for prompt in [self.scheduler.rows[row].sample.prompt_ids[:-1]]
            for start in range(0, len(prompt), CHUNK)
        ]
        while chunks:
            size = CHUNK_ROWS[-1] if len(chunks) > CHUNK_ROWS[-1] // 2 else CHUNK_ROWS[0]
            part, chunks = chunks[:size], chunks[size:]
            rows, tokens = np.zeros((3, size), np.int32), np.zeros((size, CHUNK), np.int32)
            for i, (row, start, ids) in enumerate(part):
                rows[:, i] = row, start, len(ids)
                tokens[i, : len(ids)] = ids
            self.state = decode.prefill(self.params, self.state, Rows(*jnp.asarray(rows)), tokens, program=self.program)
        if new:
            jax.block_until_ready(self.state)
        for row in new:
            self.scheduler.rows[row].transcript.start()

    def _collect(self, output: Output) -> list[TextDelta]:
        """Read a call's output back, once, and hand every row its tokens."""
        rows = self.scheduler.rows
        finish = np.asarray(self.state.progress.finish)
        counts, tokens, stats = (np.asarray(a) for a in (output.count, output.tokens, output.stats))
        asked = any(r.sample.params.logprobs is not None for r in rows.values())
        logprobs = (
            tuple(np.asarray(a) for a in (output.logprob, output.top_ids, output.top_logprobs)) if asked else None
        )
        news = []
        for row in sorted(rows):
            transcript, top = rows[row].transcript, rows[row].sample.params.logprobs
            emitted = [
                Emitted(int(tokens[row, i]), tuple(stats[row, i].tolist()), _logprobs(tokens, logprobs, row, i, top))
                for i in range(counts[row])
            ]
            delta = transcript.push(emitted)
            reason = self._reason(transcript, Finish(int(finish[row])))
            if reason is not None:
                delta = transcript.finish(delta, *reason)
                self.scheduler.finish(row)
            news.append(delta)
        return news

    def _reason(self, transcript: Transcript, finish: Finish) -> tuple[str, int | str | None] | None:
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


def _context(config: EngineConfig, trained: int) -> int:
    if config.max_context is not None and config.max_context > trained:
        raise ConfigError(
            f"max_context {config.max_context} is more than the {trained} tokens the model was trained for"
        )
    return config.max_context or trained


def _laid_out(params: Params) -> Params:
    """Layers one by one on the CPU, where a scan would copy each; stacked elsewhere."""
    return params if jax.default_backend() == "cpu" or not params else stack_layers(params)


def _pool(config: EngineConfig, spec: ModelSpec, draft: ModelSpec | None, slots: int) -> tuple[PoolSpec, int]:
    """The pool that kv_memory pays for, no larger than a full batch can use, and the width of the page table."""
    page = config.page_size or (64 if jax.default_backend() == "cpu" else 128)
    width = -(-slots // page)
    storage, models = get_format(config.kv_dtype), [spec] if draft is None else [spec, draft]
    page_bytes = sum(PoolSpec(storage, m.num_layers, 1, page, m.num_kv_heads, m.head_dim).page_bytes for m in models)
    pages = min(int(config.kv_memory * 2**30) // page_bytes, config.max_batch * width)
    if pages < 1:
        raise CapacityError(
            f"kv_memory {config.kv_memory:g} GiB is less than one page: {page} tokens take "
            f"{page_bytes / 2**20:.1f} MiB; raise kv_memory or lower page_size"
        )
    return PoolSpec(storage, spec.num_layers, pages, page, spec.num_kv_heads, spec.head_dim), width
