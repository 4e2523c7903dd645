"""`python -m train_medusa CONFIG.toml`: one run, from texts to heads."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jaxspec import commandline
from jaxspec.commands.meter import SECONDS_A_LINE, Meter
from jaxspec.commands.running import interruptible
from jaxspec.errors import ConfigError
from train_medusa.config import TrainConfig, read_config

if TYPE_CHECKING:
    from jaxspec.models.loading import LoadedModel
    from train_medusa.loop import Trainer
    from train_medusa.report import Journal, Row
    from train_medusa.texts import Text

TEXTS_DECODED = 24
"""Held-out texts that are decoded with the heads, one at a time."""
app = typer.Typer(
    rich_markup_mode="markdown", context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False
)


@app.command(no_args_is_help=True)
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file of the run.", show_default=False)],
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away the checkpoints in the output folder and begin anew.")
    ] = False,
) -> int:
    """Train Medusa heads for a model: heads that guess further tokens, which speculative decoding then verifies.

    The model answers the questions itself, the heads learn to guess these answers, and what they are worth is measured.
    A run that was ended, by whatever, goes on from its last checkpoint with the same command.

    A CONFIG with all that is needed, and some of what may be chosen (train_medusa/config.py explains each field):

        model = "smollm2-135m"
        output = "runs/smollm2"      # the folder of all that comes of it

        [data]
        files = ["prompts.jsonl"]    # rows {"prompt": ..} or {"messages": [..]}
        synthesize = 0               # questions that the model asks itself
        hidden = "cached"            # or "computed": no disk, more time

        [heads]
        count = 4
        conditioned = 1024           # see tokens guessed before (0: Medusa)
        vocab = 8192                 # guess only the commonest tokens

        [train]
        method = "medusa-1"          # or "medusa-2": the model is trained, too
        epochs = 4.0
        batch = 8                    # rows of a step
        lr = 1e-3

    Then: `jaxspec generate --drafter medusa --medusa-heads runs/smollm2/heads "Hello"`
    """
    chosen = read_config(config)
    with interruptible(lambda: f"the same command goes on from the last checkpoint in {chosen.output}"):
        _run(chosen, restart, _Stages(Console(stderr=True)))
    return 0


def _run(config: TrainConfig, restart: bool, stages: "_Stages") -> None:
    try:
        import grain  # noqa: F401
        import optax  # noqa: F401
    except ImportError as error:
        raise ConfigError("training needs optax and grain: pip install 'jaxspec[train]'") from error
    from jaxspec.models.loading import load_model
    from train_medusa.checkpoint import Checkpoints, discard
    from train_medusa.loop import Trainer, prepare
    from train_medusa.report import Journal
    from train_medusa.saving import write_base, write_heads
    from train_medusa.texts import read_texts

    output, joint = Path(config.output), config.train.method == "medusa-2"
    output.mkdir(parents=True, exist_ok=True)
    if restart:
        discard(output / "checkpoints")
    with stages:
        stages.begin(f"loading {config.model}")
        loaded = load_model(config.model, "float32" if joint else "auto", packed=False, stacked=False)
        texts = read_texts(config.data, loaded, output, stages.tell, stages.progress)
        prepared = prepare(config, loaded, texts, stages.tell, stages.progress)
    with Checkpoints(output / "checkpoints", prepared.about) as checkpoints:
        trainer = Trainer(config, prepared, checkpoints)
        journal = Journal(output / "metrics.jsonl", trainer.begun)
        _train(trainer, journal, output, stages)
    about = {
        "base_model": str(output / "base") if joint else config.model,
        "vocab_size": loaded.spec.vocab_size,
        "training": config.decisive(),
    }
    write_heads(prepared.job.spec, trainer.state.params | prepared.frozen.token_map, output / "heads", about)
    stages.tell(f"heads: {output / 'heads'}")
    if joint:
        write_base(config.model, trainer.state.params["base"], output / "base")
        stages.tell(f"model: {output / 'base'}")
        loaded = loaded._replace(params=trainer.state.params["base"])
    if prepared.held_texts:
        _evaluate(loaded, prepared.held_texts, output, stages)


def _train(trainer: "Trainer", journal: "Journal", output: Path, stages: "_Stages") -> None:
    """The steps, with a bar, and a figure and a line at each checkpoint."""
    from train_medusa.report import can_plot, line_of, plot

    steps, batch = trainer.job.steps, trainer.config.train.batch
    if trainer.begun:
        stages.tell(f"going on from the checkpoint of step {trainer.begun} of {steps} (--restart would begin anew)")
    if not can_plot():
        stages.tell("there will be no metrics.png: pip install 'jaxspec[train]' brings matplotlib")

    def milestone(row: "Row | None") -> None:
        if can_plot():
            plot(journal.rows, f"{trainer.config.model}, {trainer.config.train.method}", output / "metrics.png")
        if row is not None:
            stages.tell(line_of(row))

    def details() -> str:
        return line_of(journal.rows[-1]) if journal.rows else "compiling"

    with Meter(steps * batch, trainer.begun * batch, details) as meter:
        trainer.run(journal, meter.add, milestone)


def _evaluate(loaded: "LoadedModel", texts: "list[Text]", output: Path, stages: "_Stages") -> None:
    """How often the saved heads are right, their best tree, and the tokens a step that it brings, on held-out texts."""
    import msgspec

    from jaxspec.models.loading.heads import load_heads
    from train_medusa.evaluate import accuracies, runs_of, score
    from train_medusa.select_tree import choose, heads_table, table_of

    folder = output / "heads"
    spec, params = load_heads(folder, loaded.spec, loaded.params["norm"]["weight"].dtype)
    with stages:
        tally = score(spec, params, loaded, texts, progress=stages.progress)
        chosen, choices = choose(loaded, folder, tally, stages.tell)
        texts = texts[:TEXTS_DECODED]
        plain, runs = runs_of(loaded, folder, texts, sorted({chosen, choices[-1].nodes}), stages.progress)
    expected = next(choice for choice in choices if choice.nodes == chosen)
    report = {
        "heads": accuracies(tally),
        "trees": [{**choice._asdict(), "speedup": choice.speedup} for choice in choices],
        "fastest": chosen,
        "decoded": len(texts),
        "tau": {size: run.tau for size, run in runs.items()},
        "speedup": runs[chosen].speed / plain.speed,
        "predicted": runs[chosen].tau / (expected.verify + expected.draft),
    }
    (output / "evaluation.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    Console().print(heads_table(tally))
    Console().print(table_of(choices))
    for size, run in runs.items():
        stages.tell(f"{size} nodes: τ {run.tau:.2f}, {run.speed / plain.speed:.2f} times plain decoding")
    stages.tell(f"evaluation: {output / 'evaluation.json'}")


class _Stages:
    """What goes on before training, on stderr: a line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._said = console, 0.0
        self._status = console.status("")

    def begin(self, what: str) -> None:
        """Something without an end in sight."""
        self._status.update(what)

    def tell(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """How far something is (`texts.Progress`)."""
        self._status.update(f"{what}: {done} of {total}")
        wait = time.perf_counter() - self._said
        if not self._console.is_terminal and (wait >= SECONDS_A_LINE or done == total):
            self._said = time.perf_counter()
            self.tell(f"{what}: {done} of {total}")

    def __enter__(self) -> "_Stages":
        self._status.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._status.stop()


def main(arguments: list[str] | None = None) -> int:
    """Run it and return the exit code: 0 done, 2 bad usage or input, 130 interrupted."""
    return commandline.run(app, "python -m train_medusa", arguments)


if __name__ == "__main__":
    sys.exit(main())
