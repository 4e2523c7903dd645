"""What heads are worth: how often each is right, and the tokens a step that they bring in the engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import RequestError
from jaxspec.models.heads import HeadsSpec
from jaxspec.models.loading import LoadedModel
from jaxspec.types import Params
from train_medusa.base import dense_hidden
from train_medusa.data import pack, spans_of, stack
from train_medusa.loss import TOP, Batch, Tally, heads_loss, shared_of
from train_medusa.texts import Progress, Text, no_progress

CALL_ROWS = 4
CHUNK = 512


class Run(NamedTuple):
    """What an engine made of some prompts."""

    token_ids: list[list[int]]
    seconds: float
    """From the first token of each to its last, all together."""
    steps: int
    drafted: int
    accepted: int

    @property
    def tau(self) -> float:
        """Tokens a step."""
        return 1 + self.accepted / max(self.steps, 1)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.token_ids)) / self.seconds


def score(
    spec: HeadsSpec,
    params: Params,
    loaded: LoadedModel,
    texts: Sequence[Text],
    row: int = 512,
    progress: Progress = no_progress,
) -> Tally:
    """How the heads guess the answers of these texts, each head being told all tokens before its guess."""
    rows = pack(spans_of(texts, "answers", "computed"), row)
    shared = shared_of(spec, params, loaded.spec, loaded.params)

    @jax.jit
    def of_rows(batch: Batch) -> Tally:
        hidden = dense_hidden(loaded.params, loaded.spec, batch.tokens, batch.segment, batch.position)
        return heads_loss(spec, params["heads"], shared, batch, hidden, decay=1.0, soft=0.0, chunk=CHUNK)[1]

    total = None
    for begin in range(0, len(rows), CALL_ROWS):
        progress("scoring", begin, len(rows))
        part = stack([rows[i] for i in range(begin, min(begin + CALL_ROWS, len(rows)))])
        missing = CALL_ROWS - len(part.tokens)
        part = jax.tree.map(lambda a, missing=missing: np.pad(a, ((0, missing), (0, 0))), part)
        tally = of_rows(jax.tree.map(jnp.asarray, part))
        total = tally if total is None else jax.tree.map(jnp.add, total, tally)
    progress("scoring", len(rows), len(rows))
    return total if total is not None else jax.tree.map(jnp.zeros_like, of_rows(rows[0]))


def accuracies(tally: Tally) -> list[dict[str, float]]:
    """Of each head: the share of labels among its first guesses, and the mean loss of those it can guess, in nats."""
    labels, guessable = np.maximum(np.asarray(tally.labels), 1), np.maximum(np.asarray(tally.guessable), 1)
    return [
        {f"top{top}": float(tally.hits[k, i] / labels[k]) for i, top in enumerate(TOP)}
        | {"loss": float(tally.loss[k] / guessable[k]), "guessable": float(tally.guessable[k] / labels[k])}
        for k in range(len(labels))
    ]


def by_rank(tally: Tally) -> list[list[float]]:
    """The chance that the i-th guess of head k is right, for `jaxspec.tree.grow`."""
    return (np.asarray(tally.ranks) / np.maximum(np.asarray(tally.labels), 1)[:, None]).tolist()


def play(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, progress: Progress = no_progress) -> Run:
    """Answer prompts on an idle engine. RequestError where a text ends in an error."""
    for index, ids in enumerate(prompts):
        engine.add(str(index), ids, params)
    outputs = {}
    while engine.has_work:
        for news in engine.step():
            if (output := news.finished) is not None:
                if output.finish_reason == "error":
                    raise RequestError(str(output.stop_reason))
                outputs[int(news.request_id)] = output
                progress("decoding", len(outputs), len(prompts))
    stats = [output.stats for output in outputs.values()]
    return Run(
        [outputs[index].token_ids for index in range(len(prompts))],
        sum(s.seconds for s in stats),
        *(sum(getattr(s, name) for s in stats) for name in ("steps", "drafted", "accepted")),
    )


def engine_of(loaded: LoadedModel, **options: object) -> Engine:
    """An engine for one text at a time that remembers none of them."""
    config = EngineConfig(model=loaded.name, max_batch=1, kv_memory=0.25, prefix_cache=False)
    return Engine(loaded, msgspec.structs.replace(config, **options))


def runs_of(
    loaded: LoadedModel, folder: Path, texts: Sequence[Text], sizes: Sequence[int], progress: Progress = no_progress
) -> tuple[Run, dict[int, Run]]:
    """Plain decoding of the texts' prompts, and decoding with the first so many nodes of the tree beside the heads.

    Greedy, one text at a time, as many tokens as the longest answer has.
    """
    params = SamplingParams(max_tokens=max(len(text.tokens) - text.start for text in texts))
    prompts = [text.tokens[: text.start] for text in texts]
    heads = {"drafter": "medusa", "medusa_heads": str(folder), "draft_adaptive": False}
    runs = []
    for options in ({}, *(heads | {"draft_tokens": size} for size in sizes)):
        engine = engine_of(loaded, **options)
        play(engine, prompts[:1], params)
        runs.append(play(engine, prompts, params, progress))
    return runs[0], dict(zip(sizes, runs[1:], strict=True))
