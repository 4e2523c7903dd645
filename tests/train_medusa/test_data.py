"""Rows of packed texts, the hidden states kept for them, and the order they come in."""

import json
import shutil
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import CapacityError, ConfigError
from jaxspec.models.loading import LoadedModel
from train_medusa import data
from train_medusa.data import dataset, hidden_states, pack, spans_of, stack
from train_medusa.loss import Batch, labels_of
from train_medusa.texts import Text

ROW = 48
RNG = np.random.default_rng(0)


def random_texts(count: int = 40) -> list[Text]:
    sizes = RNG.integers(4, ROW + 1, count)
    return [Text(RNG.integers(3, 400, size).tolist(), int(RNG.integers(1, size))) for size in sizes]


TEXTS = random_texts()


class KilledError(Exception):
    """Stands for a signal."""


def silent(said: str) -> None:
    raise AssertionError(f"said: {said}")


@pytest.mark.parametrize("hidden", ["cached", "computed"])
@pytest.mark.parametrize("learn", ["answers", "all"])
def test_rows_hold_every_text_once_and_nothing_else(learn: str, hidden: str) -> None:
    spans = spans_of(TEXTS, learn, hidden)
    texts = pack(spans, ROW).texts
    found = {}
    for row in range(len(texts.tokens)):
        assert sorted(set(texts.segment[row].tolist()) - {0}) == list(range(1, texts.segment[row].max() + 1))
        for number in range(1, texts.segment[row].max() + 1):
            [here] = np.nonzero(texts.segment[row] == number)
            assert here.tolist() == list(range(here[0], here[-1] + 1))
            tokens, position, target = (a[row, here].tolist() for a in (texts.tokens, texts.position, texts.target))
            found[tuple(tokens)] = position, target
    assert len(found) == len(TEXTS)
    for text in TEXTS:
        first = max(text.start - 2, 0) if (learn, hidden) == ("answers", "cached") else 0
        start = text.start if learn == "answers" else 0
        position, target = found[tuple(text.tokens[first:])]
        assert position == list(range(first, len(text.tokens)))
        assert target == [place >= start for place in position]
    padding = texts.segment == 0
    assert not np.any(texts.tokens[padding])
    assert not np.any(texts.target[padding])


def test_each_text_goes_into_the_first_row_with_room() -> None:
    rows = pack(spans_of(TEXTS, "all", "computed"), ROW)
    free: list[int] = []
    for number, text in enumerate(TEXTS):
        index = next((i for i, room in enumerate(free) if room >= len(text.tokens)), len(free))
        free += [ROW] * (index == len(free))
        column = ROW - free[index]
        free[index] -= len(text.tokens)
        assert rows.texts.tokens[index, column : column + len(text.tokens)].tolist() == text.tokens, number
    assert len(rows) == len(free)


def test_labels_are_of_the_same_text_and_of_its_answer() -> None:
    texts = pack(spans_of(TEXTS, "answers", "cached"), ROW).texts
    batch = Batch(*(a if a is None else jnp.asarray(a) for a in texts))
    rest = {tuple(text.tokens[max(text.start - 2, 0) :]): min(text.start, 2) for text in TEXTS}
    for head in range(4):
        ids, counts = (np.asarray(a) for a in labels_of(batch, head))
        wanted = sum(max(len(tokens) - max(start, head + 2), 0) for tokens, start in rest.items())
        assert counts.sum() == wanted > 0
        for row, place in zip(*np.nonzero(counts), strict=True):
            later = place + head + 2
            assert texts.segment[row, later] == texts.segment[row, place]
            assert texts.target[row, later]
            assert ids[row, place] == texts.tokens[row, later]


def test_texts_longer_than_a_row_and_no_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="a text has 6 tokens: raise row, which is 5"):
        pack(spans_of([Text([1] * 6, 2)], "all", "computed"), 5)
    with pytest.raises(ConfigError, match="there are no texts"):
        pack([], 5)


def test_cached_states_are_those_of_each_text_alone(loaded: LoadedModel, alone, tmp_path: Path) -> None:
    spans = spans_of(TEXTS, "answers", "cached")
    states = hidden_states(spans, loaded, ROW, tmp_path / "hidden", silent)
    rows = pack(spans, ROW, states)
    found, seen = stack([rows[index] for index in range(len(rows))]), 0
    assert found.hidden.dtype == jnp.bfloat16
    for span in spans:
        wanted = alone(loaded.params, loaded.spec, span.text.tokens)[span.first :]
        row, column = (int(axis[0]) for axis in np.nonzero(rows.place == span.place))
        got = np.asarray(found.hidden[row, column : column + span.size], np.float32)
        # What bfloat16 may be off by, and what two orders of summation may.
        np.testing.assert_allclose(got, wanted, rtol=2**-8, atol=1e-4)
        seen += span.size
    assert len(states) == seen
    assert not np.any(found.hidden[found.segment == 0])


def test_a_killed_run_goes_on_where_it_stopped(loaded: LoadedModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data, "CALL_TOKENS", 4 * ROW)
    spans = spans_of(TEXTS, "answers", "cached")
    whole = np.array(hidden_states(spans, loaded, ROW, tmp_path / "whole", silent))
    assert np.all(np.any(whole, axis=1))

    calls = []
    run = data._run
    monkeypatch.setattr(data, "_run", lambda *args, **options: calls.append(0) or run(*args, **options))

    def kill(what: str, done: int, total: int) -> None:
        if done >= 8:
            raise KilledError

    with pytest.raises(KilledError):
        hidden_states(spans, loaded, ROW, tmp_path / "cut", silent, kill)
    assert len(calls) == 2
    np.testing.assert_array_equal(hidden_states(spans, loaded, ROW, tmp_path / "cut", silent), whole)
    rows = len(pack(spans_of(TEXTS, "all", "computed"), ROW))
    assert len(calls) == -(-rows // 4)
    np.testing.assert_array_equal(hidden_states(spans, loaded, ROW, tmp_path / "cut", silent), whole)
    assert len(calls) == -(-rows // 4)


@pytest.mark.parametrize("change", ["texts", "learn", "row", "weights", "damaged", "shorter"])
def test_states_of_something_else_are_never_used(loaded: LoadedModel, tmp_path: Path, change: str) -> None:
    texts, row, learn, model = TEXTS[:6], ROW, "answers", loaded
    hidden_states(spans_of(texts, learn, "cached"), model, row, tmp_path, silent)
    if change == "texts":
        texts = [Text([*texts[0].tokens[:-1], 7], texts[0].start), *texts[1:]]
    elif change == "learn":
        learn = "all"
    elif change == "row":
        row += 1
    elif change == "weights":
        model = loaded._replace(params=loaded.params | {"norm": {"weight": loaded.params["norm"]["weight"] * 2}})
    elif change == "damaged":
        (tmp_path / "done.json").write_text("{")
    else:
        (tmp_path / "states.bin").write_bytes(b"\0" * 8)
    told: list[str] = []
    found = hidden_states(spans_of(texts, learn, "cached"), model, row, tmp_path, told.append)
    assert told == [f"{tmp_path} holds hidden states of other texts or of another model: they are computed anew"]
    fresh = hidden_states(spans_of(texts, learn, "cached"), model, row, tmp_path / "fresh", silent)
    np.testing.assert_array_equal(found, fresh)


def test_a_disk_that_is_too_small_is_said_before_any_work(loaded: LoadedModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(CapacityError, match=r"the hidden states take 0\.00 GiB .* 0\.00 free: make room, or"):
        hidden_states(spans_of(TEXTS[:3], "all", "cached"), loaded, ROW, tmp_path, silent)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    rows = pack(spans_of(TEXTS, "answers", "computed"), ROW)
    batches = dataset(rows, 4, seed=3)
    came = [row.tobytes() for batch in islice(batches, len(rows)) for row in np.asarray(batch.tokens)]
    epochs = [came[start : start + len(rows)] for start in range(0, 4 * len(rows), len(rows))]
    everything = sorted(row.tobytes() for row in rows.texts.tokens)
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_order_is_the_seed_s() -> None:
    rows = pack(spans_of(TEXTS, "answers", "computed"), ROW)
    first, again, other = ([next(batches) for _ in range(9)] for batches in (dataset(rows, 4, s) for s in (0, 0, 1)))
    for one, two in zip(first, again, strict=True):
        assert_same(one, two)
    assert any(np.any(one.tokens != two.tokens) for one, two in zip(first, other, strict=True))


def test_a_batch_is_arrays_of_all_its_rows(loaded: LoadedModel, tmp_path: Path) -> None:
    spans = spans_of(TEXTS, "answers", "cached")
    rows = pack(spans, ROW, hidden_states(spans, loaded, ROW, tmp_path, silent))
    batch = next(dataset(rows, 4, seed=0))
    assert isinstance(batch, Batch)
    assert [a.shape for a in batch] == [(4, ROW)] * 4 + [(4, ROW, loaded.spec.embed_dim)]
    assert [str(a.dtype) for a in batch] == ["int32", "int32", "int32", "bool", "bfloat16"]
    assert next(dataset(pack(spans, ROW), 4, seed=0)).hidden is None


@pytest.mark.parametrize("steps", [0, 1, 7, 30])
def test_a_resumed_iterator_gives_the_same_batches(loaded: LoadedModel, tmp_path: Path, steps: int) -> None:
    spans = spans_of(TEXTS, "answers", "cached")
    rows = pack(spans, ROW, hidden_states(spans, loaded, ROW, tmp_path, silent))
    batches = dataset(rows, 4, seed=5)
    for _ in range(steps):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    resumed = dataset(rows, 4, seed=5)
    resumed.set_state(state)
    for one, two in zip(islice(batches, 12), islice(resumed, 12), strict=True):
        assert_same(one, two)


def test_one_row_is_enough() -> None:
    rows = pack(spans_of(TEXTS[:1], "answers", "computed"), ROW)
    assert next(dataset(rows, 3, seed=0)).tokens.shape == (3, ROW)


def assert_same(one: Batch, two: Batch) -> None:
    for left, right in zip(one, two, strict=True):
        np.testing.assert_array_equal(left, right)
