"""The best draft tree of heads: which nodes, from how often each guess is right, and how many, from what they cost.

`python -m train_medusa.select_tree HEADS --prompts FILE.jsonl` measures both for heads that were trained elsewhere.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from jaxspec import commandline
from jaxspec.bench.costs import measure_costs
from jaxspec.config import MAX_NODES, SamplingParams
from jaxspec.drafters._heads import TREE_FILE, TreeFile
from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.models.loading.heads import load_heads
from jaxspec.tree import grow
from train_medusa.config import DataConfig
from train_medusa.evaluate import accuracies, by_rank, engine_of, score
from train_medusa.loss import TOP, Tally
from train_medusa.texts import read_texts

SIZES = (1, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Numbers of nodes that are timed."""
CONTEXT = 256
"""Tokens of context that they are timed at."""


class Choice(NamedTuple):
    """A number of nodes: the tokens a step that it should bring, and what a round of it takes, in plain steps."""

    nodes: int
    tau: float
    verify: float
    draft: float

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tau / (self.verify + self.draft)


def best_nodes(accuracy: Sequence[Sequence[float]], size: int = MAX_NODES) -> TreeFile:
    """The most promising nodes, by `accuracy[k][i]`, the chance that the i-th guess of head k is right."""
    nodes, chances = zip(*grow(accuracy, size), strict=True)
    return TreeFile(nodes, [round(chance, 6) for chance in chances], accuracy=accuracy)


def write_tree(folder: Path, tree: TreeFile) -> None:
    """Where the drafter finds it, in one step that a crash cannot halve."""
    path = folder / f"{TREE_FILE}.tmp"
    path.write_bytes(msgspec.json.encode(tree) + b"\n")
    path.replace(folder / TREE_FILE)


def time_sizes(
    loaded: LoadedModel, folder: Path, tree: TreeFile, tell: Callable[[str], None], sizes: Sequence[int] = SIZES
) -> list[Choice]:
    """What trees of these sizes cost on this device, at batch 1, and what they should bring. The tree is written."""
    write_tree(folder, tree)
    choices = []
    for size in [size for size in sizes if size <= len(tree.nodes)]:
        tell(f"timing {size} nodes")
        engines = {
            "none": engine_of(loaded),
            "medusa": engine_of(
                loaded, drafter="medusa", medusa_heads=str(folder), draft_tokens=size, draft_adaptive=False
            ),
        }
        costs = measure_costs(engines, 1, CONTEXT, SamplingParams())["medusa"]
        choices.append(Choice(size, 1 + sum(tree.chances[:size]), costs.verify[size + 1], costs.draft))
    return choices


def choose(
    loaded: LoadedModel, folder: Path, tally: Tally, tell: Callable[[str], None], sizes: Sequence[int] = SIZES
) -> tuple[int, list[Choice]]:
    """The number of nodes that is fastest here, of the tree that is best by the tally of the heads, and all that were
    timed. The tree is written where the drafter finds it."""
    tree = best_nodes(by_rank(tally))
    choices = time_sizes(loaded, folder, tree, tell, sizes)
    best = max(choices, key=lambda choice: choice.speedup).nodes
    write_tree(folder, msgspec.structs.replace(tree, fastest={jax.default_backend(): best}))
    return best, choices


def heads_table(tally: Tally) -> Table:
    """How often each head is right."""
    table = Table("head", *(f"top {top}" for top in TOP), "can guess", title="Labels among a head's first guesses")
    for head, of_head in enumerate(accuracies(tally)):
        shares = *(of_head[f"top{top}"] for top in TOP), of_head["guessable"]
        table.add_row(str(head), *(f"{100 * share:.1f} %" for share in shares))
    return table


def table_of(choices: Sequence[Choice]) -> Table:
    """The sizes side by side."""
    table = Table("nodes", "τ expected", "verify", "draft", "speedup", title="Draft trees, costs in plain steps")
    for choice in choices:
        table.add_row(
            str(choice.nodes),
            f"{choice.tau:.2f}",
            f"{choice.verify:.2f}",
            f"{choice.draft:.2f}",
            f"{choice.speedup:.2f}",
        )
    return table


app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)


@app.command(no_args_is_help=True)
def select(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="Folder of the heads; tree.json is written there.")],
    prompts: Annotated[Path, typer.Option(metavar="FILE.jsonl", help='Rows of {"prompt": …} or conversations.')],
    model: Annotated[str, typer.Option(help="The model that the heads are for, as jaxspec takes it.")] = "smollm2-135m",
    limit: Annotated[int, typer.Option(metavar="N", help="Texts of the file to measure with.")] = 100,
) -> None:
    """Measure how often each guess of the heads is right and what trees cost here, and write the best tree."""
    console = Console(stderr=True)
    loaded = load_model(model, stacked=False)
    spec, params = load_heads(heads, loaded.spec, loaded.params["norm"]["weight"].dtype)
    texts = read_texts(DataConfig(files=[str(prompts)], limit=limit), loaded, heads / "select_tree", console.print)
    tally = score(spec, params, loaded, texts)
    Console().print(heads_table(tally))
    best, choices = choose(loaded, heads, tally, console.print)
    Console().print(table_of(choices), f"{heads / TREE_FILE} is written: {best} nodes are fastest here")


if __name__ == "__main__":
    sys.exit(commandline.run(app, "python -m train_medusa.select_tree"))
