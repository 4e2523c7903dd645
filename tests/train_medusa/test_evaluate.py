"""What heads are said to be worth, against a count by hand and the engine."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.heads import head_logits, of_base
from jaxspec.models.loading.heads import load_heads
from tests.driver import write_heads
from train_medusa import evaluate, select_tree
from train_medusa.base import dense_hidden
from train_medusa.texts import Text


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    rng = np.random.default_rng(0)
    return [Text(rng.integers(3, 300, size=20 + 3 * i).tolist(), 8 + i) for i in range(5)]


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    tokens = range(3, 40)
    return write_heads(tmp_path_factory.mktemp("heads"), loaded.spec, conditioned=8, tokens=list(tokens), heads=2)


@pytest.mark.slow
def test_the_score_is_a_count_text_by_text(loaded, texts, folder) -> None:
    spec, params = load_heads(folder, loaded.spec, jnp.float32)
    tally = evaluate.score(spec, params, loaded, texts, row=64)
    shared = of_base(spec, params, loaded.spec, loaded.params)
    guessed = np.asarray(params["token_map"]).tolist()
    labels, ranks = np.zeros(2), np.zeros((2, len(guessed)))
    for text in texts:
        ids = jnp.asarray([text.tokens])
        hidden = dense_hidden(loaded.params, loaded.spec, ids, ids * 0 + 1, jnp.arange(ids.shape[1])[None])[0]
        for k in range(2):
            for place in range(len(text.tokens) - k - 2):
                label = text.tokens[place + k + 2]
                if place + k + 2 < text.start:
                    continue
                labels[k] += 1
                if label not in guessed:
                    continue
                path = jnp.asarray(text.tokens[place + 1 : place + k + 2])
                logits = np.asarray(head_logits(spec, params["heads"][k], shared, hidden[place], path))
                ranks[k, np.sum(logits > logits[guessed.index(label)])] += 1
    np.testing.assert_array_equal(tally.labels, labels)
    np.testing.assert_array_equal(tally.ranks, ranks[:, : tally.ranks.shape[1]])
    found = evaluate.accuracies(tally)
    for k in range(2):
        assert found[k]["top5"] == pytest.approx(ranks[k, :5].sum() / labels[k])
        assert found[k]["guessable"] == pytest.approx(ranks[k].sum() / labels[k])
    np.testing.assert_allclose(evaluate.by_rank(tally), ranks[:, : tally.ranks.shape[1]] / labels[:, None])


@pytest.mark.slow
def test_the_tree_is_where_the_drafter_finds_it(loaded, texts, folder) -> None:
    spec, params = load_heads(folder, loaded.spec, jnp.float32)
    told: list[str] = []
    tally = evaluate.score(spec, params, loaded, texts, row=64)
    best, choices = select_tree.choose(loaded, folder, tally, told.append, sizes=(1, 3))
    assert [choice.nodes for choice in choices] == [1, 3]
    assert best == max(choices, key=lambda choice: choice.tau / (choice.verify + choice.draft)).nodes
    written = json.loads((folder / "tree.json").read_text())
    assert written["fastest"] == {"cpu": best}
    assert len(written["nodes"]) == len(written["chances"]) >= 3
    assert choices[1].tau == pytest.approx(1 + sum(written["chances"][:3]))
    engine = evaluate.engine_of(loaded, drafter="medusa", medusa_heads=str(folder))
    assert engine.program.drafter.tree.size == best


def test_heads_change_no_text(loaded, texts, folder) -> None:
    select_tree.write_tree(folder, select_tree.best_nodes([[0.5, 0.2], [0.4, 0.1]]))
    plain, runs = evaluate.runs_of(loaded, folder, texts, (5,))
    for run in runs.values():
        assert run.token_ids == plain.token_ids
        assert run.drafted > 0
        assert run.tau == pytest.approx(1 + run.accepted / run.steps)
    assert plain.tau == 1
