"""Whole runs on a tiny model with random weights: they learn, and leave what they should."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.models.loading.heads import load_heads
from train_medusa.__main__ import main
from train_medusa.checkpoint import Checkpoints
from train_medusa.config import DataConfig, HeadsConfig, LearnConfig, TrainConfig
from train_medusa.loop import Trainer, prepare
from train_medusa.report import Journal
from train_medusa.step import first_state, programs, rate_of, steps_of
from train_medusa.texts import Text

SEQUENCES, LENGTH = 32, 64


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    rng = np.random.default_rng(0)
    return [Text(rng.integers(3, 300, LENGTH).tolist(), 0) for _ in range(SEQUENCES)]


def config_of(folder: Path, data: dict | None = None, heads: dict | None = None, **train) -> TrainConfig:
    fields = {"files": ["unread"], "row": LENGTH, "held_out": 0.0, "learn": "all"} | (data or {})
    return TrainConfig(
        model="tiny",
        output=str(folder),
        data=DataConfig(**fields),
        heads=HeadsConfig(**heads or {}),
        train=LearnConfig(**train),
    )


def trained(config: TrainConfig, loaded: LoadedModel, texts: list[Text]) -> tuple[Trainer, Journal]:
    Path(config.output).mkdir(parents=True, exist_ok=True)
    prepared = prepare(config, loaded, texts, lambda line: None)
    with Checkpoints(Path(config.output) / "checkpoints", prepared.about) as checkpoints:
        trainer = Trainer(config, prepared, checkpoints)
        journal = Journal(Path(config.output) / "metrics.jsonl", trainer.begun)
        trainer.run(journal, lambda rows, tokens: None, lambda row: None)
    return trainer, journal


def test_it_learns_32_sequences_by_heart(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    heads = {"count": 1, "conditioned": 512, "own_output": True}
    config = config_of(tmp_path, heads=heads, steps=80, batch=SEQUENCES, lr=1e-2, chunk=2048, checkpoint_every=1000)
    _, journal = trained(config, loaded, texts)
    assert journal.rows[0]["heads"][0]["top1"] < 0.5
    assert journal.rows[-1]["heads"][0]["top1"] > 0.95
    assert journal.rows[-1]["loss"] < 0.2


@pytest.mark.usefixtures("unoptimised")
def test_computed_hidden_states_train_as_cached_ones_do(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    """Cached ones are bfloat16, and of texts without what comes long before the answer."""
    some = [Text(text.tokens[:40], 20) for text in texts[:8]]
    losses = []
    for hidden in ("cached", "computed"):
        data = {"hidden": hidden, "learn": "answers", "held_out": 0.25}
        config = config_of(tmp_path / hidden, data, {"count": 2}, steps=4, batch=6, lr=1e-2, checkpoint_every=2)
        losses.append([row["loss"] for row in trained(config, loaded, some)[1].rows])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)


def test_held_out_texts_are_not_learned(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    config = config_of(tmp_path, {"held_out": 0.1})
    prepared = prepare(config, loaded, texts, lambda line: None)
    assert len(prepared.held_texts) == 3
    assert prepared.held_out is not None
    held = {tuple(tokens) for tokens in prepared.held_out.texts.tokens.tolist()}
    assert held == {tuple(text.tokens) for text in prepared.held_texts}
    assert not held & {tuple(tokens) for tokens in prepared.rows.texts.tokens.tolist()}
    assert len(prepared.rows) == SEQUENCES - 3


def test_the_token_map_holds_the_commonest_and_those_that_end_a_text(loaded: LoadedModel, tmp_path: Path) -> None:
    texts = [Text([400, 400, 9, 9, 9, 8, 8, 7], 2), Text([400, 400, 9, 8, 6], 2)]
    config = config_of(tmp_path, {"learn": "answers"}, {"vocab": 3})
    prepared = prepare(config, loaded, texts, lambda line: None)
    assert prepared.frozen.token_map["token_map"].tolist() == [*loaded.tokenizer.eos_ids, 8, 9]
    assert prepared.job.spec.vocab == 3
    with pytest.raises(ConfigError, match=r"\[heads\] vocab must be 1 to 306, the model's vocabulary, not 500"):
        prepare(config_of(tmp_path, heads={"vocab": 500}), loaded, texts, lambda line: None)


@pytest.mark.usefixtures("unoptimised")
def test_accumulated_batches_make_the_update_of_a_large_one(loaded: LoadedModel, texts: list[Text], tmp_path) -> None:
    """Where all batches have as many labels."""
    states = []
    for batch, accumulate in ((8, 1), (2, 4)):
        config = config_of(
            tmp_path / str(batch), heads={"count": 2}, steps=accumulate, batch=batch, accumulate=accumulate, lr=1e-2
        )
        states.append(trained(config, loaded, texts[:8])[0].state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *states)
    assert np.any(states[0]["heads"][0]["blocks"]["block_0"]["weight"])


def test_the_rate_rises_and_falls_and_steps_are_whole_updates() -> None:
    config = LearnConfig(epochs=2.5, batch=4, accumulate=3, lr=0.1, warmup=0.2)
    assert steps_of(config, 50) == 33
    rate = rate_of(config, 30, 0.1)
    assert [float(rate(update)) for update in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.05, 0.1, 0.05, 0])
    assert float(rate_of(config, 3, 0.1)(0)) == pytest.approx(0.1), "a single update is no warm-up"


@pytest.mark.usefixtures("unoptimised")
def test_a_loss_that_is_no_number_ends_the_run(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    weird = loaded._replace(params={**loaded.params, "embed": {"weight": loaded.params["embed"]["weight"] * np.nan}})
    with pytest.raises(JaxspecError, match=r"the loss is nan at step 10: set a lower lr .*there is no checkpoint yet"):
        trained(config_of(tmp_path, heads={"count": 1}, steps=20, batch=8), weird, texts[:8])


def test_batches_must_fit_the_devices(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    device = jax.devices()[0]
    with pytest.raises(ConfigError, match="batch must be a multiple of the 3 devices, not 8"):
        prepare(config_of(tmp_path), loaded, texts, lambda line: None, devices=[device] * 3)


@pytest.mark.usefixtures("unoptimised")
def test_a_state_taken_over_is_gone_and_what_is_frozen_stays(loaded: LoadedModel, texts, tmp_path: Path) -> None:
    """Medusa-2 begins with a copy of the model: donated buffers must not be the model's own."""
    config = config_of(tmp_path, {"hidden": "computed"}, {"count": 1}, method="medusa-2", steps=2, batch=8)
    prepared = prepare(config, loaded, texts[:8], lambda line: None)
    before = jax.tree.map(np.array, prepared.frozen)
    drawn, like = first_state(prepared.job, 0)
    state = drawn(prepared.frozen)
    step, _ = programs(prepared.job, like(prepared.frozen))
    rows = prepared.rows
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(rows[index] for index in range(8)))
    after, _ = step(state, prepared.frozen, prepared.job.feed(batch))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, prepared.frozen, before)
    assert int(after.step) == 1


@pytest.fixture
def write(tiny_model: Path, texts: list[Text], tmp_path: Path):
    rows = [{"prompt": "the sea", "answer_ids": text.tokens[:30]} for text in texts[:12]]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(method: str, more: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(
            f'model = "{tiny_model}"\noutput = "{tmp_path / "run"}"\n[data]\nfiles = ["{tmp_path / "texts.jsonl"}"]\n'
            f'row = 64\nheld_out = 0.2\nhidden = "computed"\n[heads]\ncount = 2\n[train]\nmethod = "{method}"\n{more}'
        )
        return path

    return config


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation has its own tests."""
    monkeypatch.setattr("train_medusa.__main__._evaluate", lambda *_: None)


@pytest.mark.usefixtures("unoptimised", "unmeasured")
def test_medusa_2_trains_the_model_and_saves_it(write, tiny_model: Path, tmp_path: Path, capsys) -> None:
    config = write("medusa-2", "steps = 10\nbatch = 4\nlr = 0.01\nbase_lr = 0.01\ndistill = 0.1\ncheckpoint_every = 5")
    assert main([str(config)]) == 0
    err = capsys.readouterr().err
    run = tmp_path / "run"
    assert f"model: {run / 'base'}" in err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    model = [row["model"] for row in rows if row["split"] == "train"]
    assert model[-1]["loss"] < model[0]["loss"]
    assert model[-1]["divergence"] > 0
    old, new = load_model(str(tiny_model)), load_model(str(run / "base"))
    assert new.spec == old.spec
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), old.params, new.params)
    assert all(0 < change < 0.2 for change in jax.tree.leaves(moved))
    spec, _ = load_heads(run / "heads", new.spec, jnp.float32)
    assert (spec.num_heads, spec.vocab) == (2, new.spec.vocab_size)
    about = json.loads((run / "heads" / "config.json").read_text())
    assert about["base_model"] == str(run / "base")


@pytest.mark.slow
def test_a_run_ends_in_an_evaluation(write, tmp_path: Path) -> None:
    assert main([str(write("medusa-1", "steps = 20\nbatch = 4\nlr = 0.01"))]) == 0
    report = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert len(report["heads"]) == 2
    assert min(report["tau"].values()) >= 1
    assert (tmp_path / "run" / "heads" / "tree.json").is_file()


@pytest.mark.usefixtures("unoptimised", "unmeasured")
def test_a_run_leaves_heads_metrics_and_a_figure(write, tmp_path: Path, loaded: LoadedModel, capsys) -> None:
    pytest.importorskip("matplotlib")
    config = write("medusa-1", "steps = 12\nbatch = 4\ncheckpoint_every = 12\n")
    assert main([str(config)]) == 0
    assert f"heads: {tmp_path / 'run' / 'heads'}" in capsys.readouterr().err
    run = tmp_path / "run"
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["split"]) for row in rows] == [(10, "train"), (12, "train"), (12, "held_out")]
    assert rows[0]["tokens_per_second"] > 0
    assert 0 < rows[1]["lr"] < 1e-3
    assert {"loss", "top1", "top3", "top5", "guessable"} == rows[0]["heads"][0].keys()
    spec, params = load_heads(run / "heads", loaded.spec, jnp.bfloat16)
    assert spec.num_heads == 2
    assert any(np.any(leaf) for leaf in jax.tree.leaves(params["heads"][1]["blocks"]))
    assert msgspec.json.decode((run / "heads" / "config.json").read_bytes())["training"]["train"]["steps"] == 12
    assert main([str(config)]) == 0, "a finished run says so and writes the same again"
    assert "going on from the checkpoint of step 12 of 12" in capsys.readouterr().err
