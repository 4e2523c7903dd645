"""Guesses of a model's heads at the nodes of a static tree, and which of them a round should check."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from jaxtyping import Array, Bool, Float, Int

from jaxspec import noise, parallel, vocabulary
from jaxspec.config import DRAFT_TOKENS, MAX_NODES, EngineConfig, find_config
from jaxspec.errors import ConfigError
from jaxspec.models.heads import HeadsSpec, head_logits, of_base
from jaxspec.models.loading import LoadedModel
from jaxspec.models.loading.heads import load_heads
from jaxspec.models.spec import ModelSpec, padded_vocab
from jaxspec.parallel import MODEL, share_of
from jaxspec.sampling import distribution
from jaxspec.target import platform
from jaxspec.tree import Tree, grow
from jaxspec.types import Params, Proposal, Sampling, View

LOG = logging.getLogger(__name__)
TREE_FILE = "tree.json"
ASSUMED = tuple(tuple(0.5 * 0.8**k / (i + 1) ** 1.5 for i in range(10)) for k in range(16))
"""Accuracies of guesses of heads that nobody measured."""


class TreeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `tree.json` says, beside the files of heads."""

    nodes: Sequence[tuple[int, ...]]
    """Ranks on the way to each node, the most promising node first."""
    chances: Sequence[float]
    """Of each node to be right."""
    fastest: dict[str, int] = {}
    """How many of the nodes were found fastest, by backend."""
    accuracy: Sequence[Sequence[float]] = ()
    """Measured: the chance that the i-th guess of head k is right."""


class Level(NamedTuple):
    """The nodes of one depth, c of them, under n parents. Tokens are those of a verify row, the root being 0."""

    parents: np.ndarray
    """int [n] tokens."""
    paths: np.ndarray
    """int [n, depth] tokens from the root to each parent."""
    nodes: np.ndarray
    """int [c] draft nodes, the first token after the root being node 0."""
    parent: np.ndarray
    """int [c]: which of the parents."""
    rank: np.ndarray
    """int [c]: place among its siblings."""


class Guesses(NamedTuple):
    """What heads say at the nodes of a tree."""

    tokens: Int[Array, "B N"]
    chance: Float[Array, "B N"]
    """That the node and all above it are right, as the heads see it; 0 where they were not asked."""


class Heads(NamedTuple):
    """Heads made ready to draft."""

    spec: HeadsSpec
    model: ModelSpec
    tree: Tree
    chances: tuple[float, ...]
    """Of each draft node to be right, on average."""
    levels: tuple[Level, ...]


def load(
    config: EngineConfig, target: LoadedModel, change: Callable[[TreeFile], TreeFile] = lambda chosen: chosen
) -> tuple[Heads, Params]:
    """The heads that a configuration names, or those in configs/medusa of the model's name; and their parameters.

    `change` makes another tree of the one that lies beside them.
    ConfigError where there are none or their tree does not fit them, LoadError where they are not for this model.
    """
    folder = _folder(config, target)
    dtype = target.params["norm"]["weight"].dtype
    spec, params = load_heads(folder, target.spec, dtype)
    path = folder / TREE_FILE if folder.is_dir() else folder.with_name(TREE_FILE)
    chosen = change(read_tree(path, spec, config.draft_tokens))
    heads = with_tree(spec, target.local, chosen.nodes, chosen.chances)
    params = _shared(params, target)
    return heads, params | of_base(spec, params, target.spec, target.params)


def with_tree(spec: HeadsSpec, model: ModelSpec, nodes: Sequence[tuple[int, ...]], chances: Sequence[float]) -> Heads:
    """Heads with a tree of these nodes. ConfigError where a node has more children than there are guesses."""
    tree = Tree.of_paths(nodes)
    if tree.children.shape[1] > spec.vocab:
        raise ConfigError(f"a draft tree with {tree.children.shape[1]} siblings: the heads guess {spec.vocab} tokens")
    # As far down as there are heads: copies may go on.
    return Heads(spec, model, tree, tuple(chances), _levels(tree)[: spec.num_heads])


def _shared(params: Params, target: LoadedModel) -> Params:
    """Heads on the devices of the target: of projections of their own each has a slice of the vocabulary."""
    mesh, devices = target.mesh, share_of(target.mesh)
    if mesh is None:
        return params

    def one(path: tuple[Any, ...], array: Array) -> Array:
        if path[-1] != DictKey("output"):
            return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))
        missing = padded_vocab(len(array), devices) - len(array)
        return jax.device_put(np.pad(array, ((0, missing), (0, 0))), NamedSharding(mesh, PartitionSpec(MODEL)))

    return jax.tree.map_with_path(one, params)


def _folder(config: EngineConfig, target: LoadedModel) -> Path:
    if config.medusa_heads:
        return Path(config.medusa_heads)
    if Path(target.name).name == target.name:  # no path and no hub id
        with suppress(ConfigError):
            return find_config("medusa", target.name, "")
    raise ConfigError(f"no heads come with {target.name}: give medusa_heads, a folder that train_medusa made")


def read_tree(path: Path, spec: HeadsSpec, size: int | None) -> TreeFile:
    """The first `size` nodes of a file that `train_medusa` wrote; None is what it found fastest on this backend.

    Where there is no file, the nodes that would be best for heads of some common accuracies, and a warning.
    ConfigError where the file says something else.
    """
    if not path.is_file():
        LOG.warning(
            "%s: no such file, so the draft tree is a guess; python -m train_medusa.select_tree writes one", path
        )
        nodes, chances = zip(*grow(ASSUMED[: spec.num_heads], size or DRAFT_TOKENS), strict=True)
        return TreeFile(nodes, chances)
    try:
        said = msgspec.json.decode(path.read_bytes(), type=TreeFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    most = min(len(said.nodes), MAX_NODES) if size is None else size
    if size is None:
        most = said.fastest.get(platform(), most)
    if len(said.chances) != len(said.nodes) or most > len(said.nodes):
        raise ConfigError(f"{path} has {len(said.nodes)} nodes and {len(said.chances)} chances: {most} are asked for")
    deepest = max(map(len, said.nodes[:most]), default=0)
    if deepest > spec.num_heads:
        raise ConfigError(f"{path}: a tree of depth {deepest} needs as many heads, there are {spec.num_heads}")
    return msgspec.structs.replace(said, nodes=said.nodes[:most], chances=said.chances[:most])


def _levels(tree: Tree) -> tuple[Level, ...]:
    depths, parents = np.array(tree.depths), np.array([0, *tree.parents])
    rank = np.array([np.sum(parents[1:token] == parents[token]) for token in range(tree.width)])
    levels = []
    for depth in range(1, tree.max_depth + 1):
        tokens = np.flatnonzero(depths == depth)
        above, parent = np.unique(parents[tokens], return_inverse=True)
        levels.append(Level(above, tree.paths[above, :depth], tokens - 1, parent, rank[tokens]))
    return tuple(levels)


def guess(
    heads: Heads,
    params: Params,
    hidden: Float[Array, "B E"],
    root: Int[Array, "B"],
    wanted: Bool[Array, "B"],
    floor: float,
) -> Guesses:
    """The likeliest tokens of every head, depth by depth, in rows that want some, under nodes likelier than `floor`."""
    size = heads.tree.size
    guesses = Guesses(jnp.zeros((len(root), size), jnp.int32), jnp.zeros((len(root), size)))

    def deeper(level: Level, k: int, worth: Bool[Array, "B"], guesses: Guesses) -> Guesses:
        logits = _logits(heads, params, level, k, hidden, root, guesses.tokens)
        best, ids = vocabulary.top_k(logits, int(level.rank.max()) + 1)
        chance = jnp.exp(best - vocabulary.logsumexp(logits)[..., None])
        at = np.minimum(level.parent, logits.shape[1] - 1), level.rank
        ids, chance = ids[:, *at], chance[:, *at] * _above(guesses, level)[:, level.parent]
        tokens = params["token_map"][ids] if "token_map" in params else ids
        return Guesses(
            guesses.tokens.at[:, level.nodes].set(jnp.where(worth[:, None], tokens, 0).astype(jnp.int32)),
            guesses.chance.at[:, level.nodes].set(jnp.where(worth[:, None], chance, 0)),
        )

    for k, level in enumerate(heads.levels):
        # Rows of their own accord: whether a row goes on is not to depend on the others.
        worth = wanted & (jnp.max(_above(guesses, level), axis=1) > floor)
        guesses = jax.lax.cond(jnp.any(worth), partial(deeper, level, k, worth), lambda guesses: guesses, guesses)
    return guesses


def _above(guesses: Guesses, level: Level) -> Float[Array, "B n"]:
    """The chance of each parent."""
    return jnp.pad(guesses.chance, ((0, 0), (1, 0)), constant_values=1.0)[:, level.parents]


def _logits(heads: Heads, params: Params, level: Level, k: int, hidden, root, tokens) -> Float[Array, "B n vocab"]:
    """Logits under every parent of a level; of heads that see no path one row stands for all parents."""
    row = jnp.concatenate([root[:, None], tokens], axis=1)
    paths = level.paths if heads.spec.conditioned else level.paths[:1]
    hidden = jnp.broadcast_to(hidden[:, None], (len(root), len(paths), hidden.shape[-1]))
    logits = head_logits(heads.spec, params["heads"][k], params, hidden, row[:, paths])
    known = heads.spec.vocab if "token_map" in params else heads.model.valid_vocab
    if known == parallel.share() * logits.shape[-1]:
        return logits
    return jnp.where(vocabulary.ids(logits.shape[-1]) < known, logits, -jnp.inf)


def draw(heads: Heads, params: Params, hidden: Float[Array, "B E"], view: View, temperature: float | None) -> Proposal:
    """Tokens drawn without replacement among siblings, from what the heads say under each request's own filters.

    Greedy rows get the likeliest tokens, of which the target's own is then accepted: their q is 0.
    """
    batch, size, vocab = len(view.progress.token), heads.tree.size, vocabulary.columns(heads.model.vocab_size)

    def pick() -> Proposal:
        tokens, chance = guess(heads, params, hidden, view.progress.token, jnp.ones(batch, bool), 0.0)
        return Proposal(tokens, chance > 0, jnp.zeros((batch, size, vocab)))

    hot = view.sampling.temperature > 0
    return jax.lax.cond(jnp.any(hot), lambda: _draw(heads, params, hidden, view, temperature), pick)


def _draw(heads: Heads, params: Params, hidden: Float[Array, "B E"], view: View, temperature: float | None) -> Proposal:
    progress, size, vocab = view.progress, heads.tree.size, vocabulary.columns(heads.model.vocab_size)
    batch = len(progress.token)
    hot = view.sampling.temperature > 0
    sampling = view.sampling
    if temperature is not None:
        sampling = sampling._replace(temperature=jnp.where(hot, temperature, 0.0))
    tokens, valid = jnp.zeros((batch, size), jnp.int32), jnp.zeros((batch, size), bool)
    q = jnp.zeros((batch, size, vocab))
    for k, level in enumerate(heads.levels):
        logits = _logits(heads, params, level, k, hidden, progress.token, tokens)
        if "token_map" in params:
            nowhere = jnp.full((*logits.shape[:2], vocab), -jnp.inf)
            at = vocabulary.column(params["token_map"], vocab)
            logits = nowhere.at[..., at].set(parallel.gathered(logits)[..., : len(at)], mode="drop")
        logits = jnp.broadcast_to(logits, (batch, len(level.parents), vocab))
        p, order = _orders(logits, view, sampling, k, hot)
        best, ids = vocabulary.top_k(order, int(level.rank.max()) + 1)
        at = level.parent, level.rank
        tokens = tokens.at[:, level.nodes].set(ids[:, *at].astype(jnp.int32))
        valid = valid.at[:, level.nodes].set(jnp.isfinite(best[:, *at]))
        q = q.at[:, level.nodes].set(jnp.where(hot[:, None, None], _without_elder(p, ids, level), 0))
    return Proposal(tokens, valid, q)


def _orders(logits, view: View, sampling: Sampling, k: int, hot) -> tuple[Float[Array, "B n V"], Float[Array, "B n V"]]:
    """The distribution under each parent, and numbers whose order is a draw from it without replacement."""
    ordinal = view.progress.ordinal[:, None] + k
    p = distribution(logits, sampling, view.history, None, jnp.broadcast_to(ordinal, logits.shape[:2]))
    keys = noise.noise_keys(sampling.seed, sampling.sample, ordinal, noise.DRAFT)
    drawn = jnp.log(p) + noise.gumbel(keys, vocabulary.ids(logits.shape[-1]))
    return p, jnp.where(hot[:, None, None], drawn, logits)


def _without_elder(p: Float[Array, "B n V"], ids: Int[Array, "B n ranks"], level: Level) -> Float[Array, "B c V"]:
    """The distribution that each node was drawn from: without its elder siblings, and summing to 1 again."""
    of_node = p[:, level.parent]
    elder = jnp.arange(ids.shape[-1]) < level.rank[:, None]
    at = jnp.where(elder, vocabulary.column(ids[:, level.parent], p.shape[-1]), p.shape[-1])
    rows = jnp.arange(len(p))[:, None, None], jnp.arange(len(level.nodes))[None, :, None]
    left = of_node.at[*rows, at].set(0, mode="drop")
    return left / jnp.maximum(vocabulary.total(left)[..., None], 1e-30)
