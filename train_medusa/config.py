"""The configuration of a training run: one TOML file. No jax here."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxspec.config import read_toml
from jaxspec.errors import ConfigError


def _check(section: str, checks: list[tuple[bool, str]]) -> None:
    for ok, what in checks:
        if not ok:
            raise ConfigError(f"[{section}] {what}")


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """[data]: what is learned from. Raises ConfigError when a value is out of range."""

    files: list[str] = []
    """JSONL files of prompts or conversations."""
    limit: int | None = None
    """Rows of all files together that are used; None uses all."""
    synthesize: int = 0
    """Further questions, that the chat model asks itself."""
    max_answer: int = 128
    """Tokens of an answer that the model gives, at most."""
    temperature: float = 0.0
    """Of the answers that the model gives; 0 is greedy."""
    row: int = 512
    """Tokens of a packed row."""
    hidden: Literal["cached", "computed"] = "cached"
    """Hidden states of the model: computed once and kept on disk, or computed anew in each step."""
    learn: Literal["answers", "all"] = "answers"
    """Which tokens heads learn to guess."""
    held_out: float = 0.02
    """Fraction of the texts that is only measured on."""

    def __post_init__(self) -> None:
        _check(
            "data",
            [
                (bool(self.files) or self.synthesize > 0, "names no texts: give files, or synthesize some questions"),
                (self.limit is None or self.limit >= 1, f"limit must be 1 or more, not {self.limit}"),
                (self.synthesize >= 0, f"synthesize must be 0 or more, not {self.synthesize}"),
                (self.max_answer >= 1, f"max_answer must be 1 or more, not {self.max_answer}"),
                (self.temperature >= 0, f"temperature must be 0 or more, not {self.temperature}"),
                (self.row >= 4, f"row must be 4 or more, not {self.row}"),
                (0 <= self.held_out < 1, f"held_out must be in [0, 1), not {self.held_out}"),
            ],
        )


class HeadsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """[heads]: their shape. Raises ConfigError when a value is out of range."""

    count: int = 4
    layers: int = 1
    """Residual blocks of a head."""
    own_output: bool = False
    """Whether each head trains an output projection of its own; else all use the model's."""
    conditioned: int = 0
    """Width of the first block of heads that also see the tokens guessed before (Hydra); 0 is plain Medusa."""
    vocab: int | None = None
    """Guess only so many tokens, the commonest among those to be learned; None guesses all."""

    def __post_init__(self) -> None:
        _check(
            "heads",
            [
                (self.count >= 1, f"count must be 1 or more, not {self.count}"),
                (self.layers >= 1, f"layers must be 1 or more, not {self.layers}"),
                (self.conditioned >= 0, f"conditioned must be 0 (off) or a width, not {self.conditioned}"),
                (self.vocab is None or self.vocab >= 1, f"vocab must be 1 or more, not {self.vocab}"),
            ],
        )


class LearnConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """[train]: how it is learned. A step is one batch. Raises ConfigError when a value is out of range."""

    method: Literal["medusa-1", "medusa-2"] = "medusa-1"
    """medusa-1 trains the heads alone; medusa-2 the model too, kept close to what it was."""
    epochs: float = 2.0
    """How often each row is seen, where `steps` does not say how long to train."""
    steps: int | None = None
    batch: int = 8
    """Rows of a step."""
    accumulate: int = 1
    """Steps whose mean gradient makes one update."""
    lr: float = 1e-3
    """Highest learning rate of the heads."""
    base_lr: float = 2.5e-4
    """medusa-2: that of the model."""
    warmup: float = 0.1
    """Fraction of the updates over which the rates rise to their highest; they then fall to 0 as a cosine."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Gradients of a larger norm, all parameters together, are scaled to this one."""
    decay: float = 0.8
    """Each further head's loss counts by this factor less."""
    soft: float = 0.0
    """How much of a label is the model's own distribution; 0 is the token alone."""
    chunk: int = 512
    """Places whose logits are held at once."""
    heads_weight: float = 0.2
    """medusa-2: of the heads' loss, where the model's own counts 1."""
    distill: float = 1.0
    """medusa-2: of the divergence from the untouched model."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; the held-out loss is measured then."""
    fsdp: bool = False
    """Split parameters and optimiser over all devices (ZeRO-3); else each device holds all of them."""

    def __post_init__(self) -> None:
        counts = ("batch", "accumulate", "chunk", "checkpoint_every")
        above = ("epochs", "lr", "base_lr", "clip", "decay")
        least = ("weight_decay", "heads_weight", "distill")
        value = {name: getattr(self, name) for name in (*counts, *above, *least)}
        _check(
            "train",
            [
                (self.steps is None or self.steps >= 1, f"steps must be 1 or more, not {self.steps}"),
                *[(value[name] >= 1, f"{name} must be 1 or more, not {value[name]}") for name in counts],
                *[(0 < value[name] < float("inf"), f"{name} must be above 0, not {value[name]}") for name in above],
                *[(0 <= value[name] < float("inf"), f"{name} must be 0 or more, not {value[name]}") for name in least],
                (0 <= self.warmup <= 1, f"warmup must be in [0, 1], not {self.warmup}"),
                (0 <= self.soft <= 1, f"soft must be in [0, 1], not {self.soft}"),
            ],
        )


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole run. Raises ConfigError where sections do not go together."""

    model: str = "smollm2-135m"
    """A name in configs/models, a Hugging Face folder, a .gguf file, or a hub id."""
    output: str
    """The folder of the run: answers, hidden states, checkpoints, metrics and the trained heads."""
    seed: int = 0
    """Of the first parameters, the order of the rows and the choice of the held-out texts."""
    data: DataConfig
    heads: HeadsConfig = HeadsConfig()
    train: LearnConfig = LearnConfig()

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output must name a folder")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must fit in 32 bits, not {self.seed}")
        if self.train.method == "medusa-2" and self.data.hidden != "computed":
            raise ConfigError('medusa-2 changes the hidden states as it trains: set [data] hidden = "computed"')

    def decisive(self) -> dict[str, Any]:
        """All that the trained parameters depend on, as JSON: a run may go on only where it is the same. Of the files
        these are the names: what is in them is looked at by itself."""
        fields = msgspec.to_builtins(self)
        fields["data"]["files"] = [Path(file).name for file in self.data.files]
        del fields["output"], fields["train"]["checkpoint_every"]
        return fields


def read_config(path: Path) -> TrainConfig:
    """A run's TOML file. ConfigError, which names it, for one that is missing, damaged, or has a field or value that
    cannot be."""
    fields = read_toml(path)
    try:
        return msgspec.convert(fields, TrainConfig)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
