"""From texts to batches: rows of packed texts, the hidden states that are kept for them, and the order they come in."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxspec.errors import CapacityError, ConfigError
from jaxspec.models.loading import LoadedModel
from train_medusa.base import dense_hidden, identity
from train_medusa.loss import Batch
from train_medusa.texts import Progress, Text, no_progress

CALL_TOKENS = 2048
"""Tokens that the model is run over at once."""
BEFORE = 2
"""Tokens before the answer whose hidden states are kept: the first head guesses the answer's first token from there."""


class Span(NamedTuple):
    """What of a text goes into a row: its tokens from `first` on."""

    text: Text
    first: int
    start: int
    """Index in the text of the first token to be learned."""
    place: int
    """Where the hidden state of its first token is among those that are kept."""

    @property
    def size(self) -> int:
        """Tokens of a row that it takes."""
        return len(self.text.tokens) - self.first


class Rows:
    """Packed rows: `rows[index]` is a Batch of one, without its dimension N, in numpy.

    `texts` is all of them, without hidden states: those are read from `states` as they are asked for.
    """

    def __init__(self, texts: Batch, place: np.ndarray, states: np.ndarray | None) -> None:
        self.texts = texts
        self.place = place
        """int64 [N, S]: where the hidden state of each token is among `states`; -1 at padding."""
        self._states = states

    def __len__(self) -> int:
        return len(self.place)

    def __getitem__(self, index: int) -> Batch:
        tokens, segment, position, target, _ = self.texts
        hidden = None if self._states is None else self._hidden(self._states, self.place[index])
        return _batch(tokens[index], segment[index], position[index], target[index], hidden)

    def _hidden(self, states: np.ndarray, place: np.ndarray) -> np.ndarray:
        """bfloat16 [S, E]."""
        found = np.zeros((len(place), states.shape[1]), np.uint16)
        found[place >= 0] = states[place[place >= 0]]
        return found.view(jnp.bfloat16)


def spans_of(texts: Sequence[Text], learn: str, hidden: str) -> list[Span]:
    """What the rows are made of, by the `learn` and `hidden` of the configuration. Where hidden states are cached, a
    text begins no earlier than heads need it."""
    spans, place = [], 0
    for text in texts:
        start = text.start if learn == "answers" else 0
        first = max(start - BEFORE, 0) if hidden == "cached" else 0
        spans.append(Span(text, first, start, place))
        place += spans[-1].size
    return spans


def pack(spans: Sequence[Span], row: int, states: np.ndarray | None = None) -> Rows:
    """Rows of `row` tokens, each span whole in the first that has room for it. `states` is from `hidden_states`.

    ConfigError where there are none, or one is longer than a row.
    """
    spots = _first_fit([span.size for span in spans], row)
    count = 1 + max(index for index, _ in spots)
    tokens, segment, position = np.zeros((3, count, row), np.int32)
    target, place = np.zeros((count, row), bool), np.full((count, row), -1, np.int64)
    for span, (index, column) in zip(spans, spots, strict=True):
        part = np.s_[index, column : column + span.size]
        tokens[part] = span.text.tokens[span.first :]
        segment[part] = segment[index].max() + 1
        position[part] = np.arange(span.first, span.first + span.size)
        target[part] = position[part] >= span.start
        place[part] = np.arange(span.place, span.place + span.size)
    return Rows(_batch(tokens, segment, position, target), place, states)


def _first_fit(sizes: list[int], row: int) -> list[tuple[int, int]]:
    """Row and column where each goes."""
    if not sizes or max(sizes) > row:
        what = f"a text has {max(sizes)} tokens: raise row, which is {row}" if sizes else "there are no texts"
        raise ConfigError(f"cannot fill rows: {what}")
    free, spots = np.full(len(sizes), row), []
    for size in sizes:
        index = int(np.argmax(free >= size))
        spots.append((index, row - int(free[index])))
        free[index] -= size
    return spots


def stack(rows: Sequence[Batch]) -> Batch:
    """One batch of rows."""
    return _batch(*(None if parts[0] is None else np.stack(parts) for parts in zip(*rows, strict=True)))


def _batch(*arrays: Any) -> Batch:
    """Batch promises jax arrays to those who compute with it; before that they are numpy's."""
    return Batch(*arrays)


def dataset(rows: Rows, batch: int, seed: int) -> grain.DatasetIterator[Batch]:
    """Batches of so many rows without end, each epoch in another order, that depends on the seed alone.

    Where an epoch is no whole number of batches, its last rows come with the first of the next. `get_state` is a dict
    for a checkpoint, and after `set_state` with it the same batches follow as did then.
    """
    shuffled = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(shuffled.batch(batch, batch_fn=stack).to_iter_dataset(options))


class _Done(msgspec.Struct):
    """How far the hidden states on disk go."""

    fingerprint: str
    rows: int


def hidden_states(
    spans: Sequence[Span],
    loaded: LoadedModel,
    row: int,
    folder: Path,
    tell: Callable[[str], None],
    progress: Progress = no_progress,
) -> np.ndarray:
    """The model's normalised hidden states of the tokens of all spans, in their order: the bits of bfloat16, as uint16
    [tokens, E], mapped from a file in `folder`.

    Each text is run whole. What a killed run had done is kept; states of other texts or of another model are not.
    CapacityError where the disk is too small.
    """
    # Of whole texts in rows, what counts as a target here is what is kept.
    whole = pack([Span(span.text, 0, span.first, span.place - span.first) for span in spans], row)
    shape = (sum(span.size for span in spans), loaded.spec.embed_dim)
    states, done = _open(folder, shape, _fingerprint(spans, loaded, row), tell)
    step = max(CALL_TOKENS // row, 1)
    for begin in range(done.rows, len(whole), step):
        progress("hidden states", begin, len(whole))
        part = slice(begin, begin + step)
        keep = np.asarray(whole.texts.target[part])
        missing = (0, step - len(keep)), (0, 0)  # so that all calls have one shape
        inputs = (jnp.asarray(np.pad(a[part], missing)) for a in whole.texts[:3])
        found = np.asarray(_run(loaded.params, *inputs, spec=loaded.spec))[: len(keep)]
        states[whole.place[part][keep]] = found[keep].view(np.uint16)
        states.flush()
        done.rows = begin + len(keep)
        _write(folder, done)
    progress("hidden states", len(whole), len(whole))
    return np.memmap(_states_path(folder), np.uint16, "r", shape=shape)


@partial(jax.jit, static_argnames="spec")
def _run(params, tokens, segment, position, *, spec):
    return dense_hidden(params, spec, tokens, segment, position).astype(jnp.bfloat16)


def _fingerprint(spans: Sequence[Span], loaded: LoadedModel, row: int) -> str:
    digest = hashlib.sha256(f"{identity(loaded)} {row}".encode())
    for span in spans:
        digest.update(np.array([span.size, span.first, *span.text.tokens], np.int32).tobytes())
    return digest.hexdigest()


def _states_path(folder: Path) -> Path:
    return folder / "states.bin"


def _write(folder: Path, done: _Done) -> None:
    """In one step that a crash cannot halve."""
    path = folder / "done.json.tmp"
    path.write_bytes(msgspec.json.encode(done))
    path.replace(folder / "done.json")


def _open(
    folder: Path, shape: tuple[int, int], fingerprint: str, tell: Callable[[str], None]
) -> tuple[np.memmap, _Done]:
    """The file of hidden states, and how far it goes."""
    path, size = _states_path(folder), 2 * shape[0] * shape[1]
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "done.json").exists():
        try:
            done = msgspec.json.decode((folder / "done.json").read_bytes(), type=_Done)
        except msgspec.DecodeError:
            done = _Done("", 0)
        if done.fingerprint == fingerprint and path.is_file() and path.stat().st_size == size:
            return np.memmap(path, np.uint16, "r+", shape=shape), done
        tell(f"{folder} holds hidden states of other texts or of another model: they are computed anew")
        (folder / "done.json").unlink()
    path.unlink(missing_ok=True)
    if (free := shutil.disk_usage(folder).free) < size:
        raise CapacityError(
            f"the hidden states take {size / 2**30:.2f} GiB and {folder} has {free / 2**30:.2f} free: make room, or "
            'set hidden = "computed"'
        )
    return np.memmap(path, np.uint16, "w+", shape=shape), _Done(fingerprint, 0)
