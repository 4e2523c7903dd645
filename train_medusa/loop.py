"""A run: from texts to rows, and the loop of steps, measurements and checkpoints."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.heads import HeadsSpec
from jaxspec.models.loading import LoadedModel
from train_medusa.checkpoint import Checkpoints
from train_medusa.config import TrainConfig
from train_medusa.data import Rows, dataset, hidden_states, pack, spans_of, stack
from train_medusa.loss import Batch
from train_medusa.report import Journal, Row, row_of
from train_medusa.step import Frozen, Job, State, Sums, first_state, mesh_of, programs, rate_of, steps_of
from train_medusa.texts import Progress, Text, no_progress

STEPS_A_ROW = 10
"""Steps that a row of metrics is about, at most."""


class Prepared(NamedTuple):
    """What a run is made of."""

    job: Job
    frozen: Frozen
    rows: Rows
    held_out: Rows | None
    held_texts: list[Text]
    about: dict[str, Any]
    """What its checkpoints must share with it."""


def prepare(
    config: TrainConfig,
    loaded: LoadedModel,
    texts: Sequence[Text],
    tell: Callable[[str], None],
    progress: Progress = no_progress,
    devices: list[Any] | None = None,
) -> Prepared:
    """Rows to learn and to measure on, the shape of the heads, and the model on the devices (None is all there are).

    ConfigError where the configuration does not go with the texts, the model or the devices.
    """
    mesh = mesh_of(devices or jax.devices())
    if config.train.batch % mesh.size:
        raise ConfigError(f"[train] batch must be a multiple of the {mesh.size} devices, not {config.train.batch}")
    data, spans = config.data, spans_of(texts, config.data.learn, config.data.hidden)
    states = None
    if data.hidden == "cached":
        states = hidden_states(spans, loaded, data.row, Path(config.output, "hidden"), tell, progress)
    held = _held_out(len(texts), data.held_out, config.seed)
    rows = pack([span for index, span in enumerate(spans) if index not in held], data.row, states)
    held_out = pack([spans[index] for index in sorted(held)], data.row, states) if held else None
    heads, model = config.heads, loaded.spec
    ids = None if heads.vocab is None else _commonest(rows, loaded, heads.vocab)
    vocab = model.vocab_size if ids is None else len(ids)
    spec = HeadsSpec(heads.count, model.embed_dim, vocab, heads.layers, heads.own_output, heads.conditioned)
    job = Job(config.train, spec, model, steps_of(config.train, len(rows)), mesh)
    frozen = job.place(Frozen(loaded.params, {} if ids is None else {"token_map": jnp.asarray(ids)}))
    about = {"config": config.decisive(), "texts": _digest(texts)}
    return Prepared(job, frozen, rows, held_out, [texts[index] for index in sorted(held)], about)


def _held_out(count: int, fraction: float, seed: int) -> set[int]:
    """Which texts are only measured on: at least one where a fraction is wanted, and never all."""
    size = min(max(round(fraction * count), 1), count - 1) if fraction else 0
    return set(np.random.default_rng(seed).permutation(count)[:size].tolist())


def _commonest(rows: Rows, loaded: LoadedModel, size: int) -> np.ndarray:
    """The ids that are most often learned, in order of ids; those that end a text are always among them."""
    known, ends = loaded.spec.valid_vocab, list(loaded.tokenizer.eos_ids)
    if not len(ends) <= size <= known:
        raise ConfigError(f"[heads] vocab must be {len(ends) or 1} to {known}, the model's vocabulary, not {size}")
    counts = np.bincount(rows.texts.tokens[rows.texts.target], minlength=known)
    counts[ends] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def _digest(texts: Sequence[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.array([len(text.tokens), text.start, *text.tokens], np.int32).tobytes())
    return digest.hexdigest()[:16]


class Trainer:
    """A run that goes on from its last checkpoint. `checkpoints` and `journal` take what it leaves behind."""

    def __init__(self, config: TrainConfig, prepared: Prepared, checkpoints: Checkpoints) -> None:
        self.config, self.job, self._prepared = config, prepared.job, prepared
        self._checkpoints = checkpoints
        self._batches: grain.DatasetIterator[Batch] = dataset(prepared.rows, config.train.batch, config.seed)
        drawn, like = first_state(self.job, config.seed)
        shapes = like(prepared.frozen)
        self._step, self._measure = programs(self.job, shapes)
        if (latest := checkpoints.latest) is None:
            self.state = drawn(prepared.frozen)
        else:
            self.state, position = checkpoints.restore(latest, shapes)
            self._batches.set_state(position)
        self.begun = int(self.state.step)
        """The step that it goes on from."""

    def run(self, journal: Journal, show: Callable[[int, int], None], milestone: Callable[[Row | None], None]) -> State:
        """Trains to the end. `show` hears of rows and tokens after each step, `milestone` of each checkpoint, with the
        row of held-out texts if there are some. JaxspecError where the loss is no number."""
        frozen, sums, pace = self._prepared.frozen, None, _Pace()
        for step in range(self.begun + 1, self.job.steps + 1):
            batch = next(self._batches)
            tokens = int(np.count_nonzero(batch.segment))
            self.state, news = self._step(self.state, frozen, self.job.feed(batch))
            sums = news if sums is None else jax.tree.map(jnp.add, sums, news)
            if step == self.begun + 1:
                jax.block_until_ready(sums)
                pace = _Pace()  # that step was compiled, too
            else:
                pace.tokens += tokens
            show(len(batch.tokens), tokens)
            due = step % self.config.train.checkpoint_every == 0 or step == self.job.steps
            if due or step % STEPS_A_ROW == 0:
                journal.add(self._row(step, sums, pace))
                sums, pace = None, _Pace()
            if due:
                row = self._measure_held_out(step)
                if row is not None:
                    journal.add(row)
                self._checkpoints.save(step, self.state, self._batches.get_state())
                milestone(row)
                pace = _Pace()
        return self.state

    def _row(self, step: int, sums: Sums, pace: "_Pace") -> Row:
        heads, own = jax.device_get(sums)
        rate = rate_of(self.config.train, self.job.steps, self.config.train.lr)
        lr = float(jnp.asarray(rate((step - 1) // self.config.train.accumulate)))
        row = row_of(step, "train", heads, own, self.config.train, lr=lr, tokens_per_second=pace.rate)
        if not np.isfinite(row["loss"]):
            kept = self._checkpoints.latest
            where = f"the checkpoint of step {kept} is from before" if kept else "there is no checkpoint yet"
            raise JaxspecError(f"the loss is {row['loss']} at step {step}: set a lower lr or a longer warmup ({where})")
        return row

    def _measure_held_out(self, step: int) -> Row | None:
        rows = self._prepared.held_out
        if rows is None:
            return None
        parts = [
            self._measure(self.state.params, self._prepared.frozen, self.job.feed(batch))
            for batch in _in_batches(rows, self.config.train.batch)
        ]
        heads, own = jax.device_get(jax.tree.map(lambda *leaves: sum(leaves), *parts))
        return row_of(step, "held_out", heads, own, self.config.train)


class _Pace:
    """Tokens of some steps, and the seconds since it was made."""

    def __init__(self) -> None:
        self.began, self.tokens = time.perf_counter(), 0

    @property
    def rate(self) -> float | None:
        return self.tokens / (time.perf_counter() - self.began) if self.tokens else None


def _in_batches(rows: Rows, size: int) -> Iterator[Batch]:
    """All rows once; the last batch is filled up with empty ones."""
    for begin in range(0, len(rows), size):
        part = stack([rows[index] for index in range(begin, min(begin + size, len(rows)))])
        missing = size - len(part.tokens)
        yield jax.tree.map(lambda a, missing=missing: np.pad(a, ((0, missing), *[(0, 0)] * (a.ndim - 1))), part)
