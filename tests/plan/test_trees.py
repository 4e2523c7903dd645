"""What drafts bring: by hand, and by playing them."""

import json
import random
import shutil
from pathlib import Path

import pytest

from jaxspec.config import find_config
from jaxspec.errors import ConfigError, LoadError
from jaxspec.plan.shape import read_shape
from jaxspec.plan.trees import chain_tokens, guesses_of, tree_tokens

HEADS = find_config("medusa", "smollm2-135m", "")


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.0, 7), (0.3, 1), (0.7, 4), (0.95, 63), (0.5, 0)])
def test_chains_by_the_closed_form(acceptance: float, drafts: int) -> None:
    assert chain_tokens(acceptance, drafts) == pytest.approx((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def test_chains_that_are_always_right() -> None:
    assert chain_tokens(1.0, 5) == 6


def test_trees_by_playing_them() -> None:
    """Each depth has one right guess or none, by the accuracy of heads that is assumed."""
    guesses = guesses_of(read_shape("llama-2-7b"), None)
    nodes, rng, total, rounds = set(guesses.paths[:12]), random.Random(0), 0, 40_000
    for _ in range(rounds):
        path: tuple[int, ...] = ()
        while True:
            draw, rank = rng.random(), 0
            while rank < 10 and (draw := draw - 0.5 * 0.8 ** len(path) / (rank + 1) ** 1.5) >= 0:
                rank += 1
            if (*path, rank) not in nodes:
                break
            path = (*path, rank)
        total += 1 + len(path)
    assert tree_tokens(guesses, 12) == pytest.approx(total / rounds, rel=0.01)


def test_heads_that_come_with_a_model() -> None:
    guesses = guesses_of(read_shape("smollm2-135m"), None)
    assert guesses.measured
    assert (guesses.spec.num_heads, guesses.spec.vocab, guesses.spec.conditioned) == (4, 8192, 768)
    assert tree_tokens(guesses, 1) == pytest.approx(1.53847)  # its metrics: first guess right on 54 %
    assert (len(guesses.paths), guesses.tree(7).size) == (63, 7)


def test_heads_that_nobody_measured() -> None:
    guesses = guesses_of(read_shape("llama-3.1-8b"), None)
    assert not guesses.measured
    assert (guesses.spec.num_heads, guesses.spec.embed_dim, guesses.spec.vocab) == (4, 4096, 128_256)
    assert list(guesses.chances) == sorted(guesses.chances, reverse=True)


def test_a_folder_of_heads(tmp_path: Path) -> None:
    shutil.copy(HEADS / "model.safetensors", tmp_path)
    shutil.copy(HEADS / "config.json", tmp_path)
    shape = read_shape("smollm2-135m")
    assert not guesses_of(shape, str(tmp_path)).measured  # no tree lies beside them
    (tmp_path / "tree.json").write_text(json.dumps({"nodes": [[0], [1]], "chances": [0.6, 0.2]}))
    assert tree_tokens(guesses_of(shape, str(tmp_path)), 2) == pytest.approx(1.8)
    (tmp_path / "tree.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tree\.json"):
        guesses_of(shape, str(tmp_path))
    with pytest.raises(LoadError):
        guesses_of(read_shape("llama-2-7b"), str(tmp_path))
