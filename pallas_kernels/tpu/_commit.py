"""Moving accepted tree paths together in the pages of all layers, in place."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.layout import WORD
from pallas_kernels.tpu._windows import (
    Stored,
    each_window,
    interpreted,
    narrow,
    padded_bytes,
    pinned,
    seen,
    stored,
    unsupported,
    widen,
)

MOST_NODES = 2 * WORD
"""Of a tree."""
ITEM_BYTES = 2 * 2**20
"""Memory for the windows of one sequence in as many layers as find room."""


class _Item(NamedTuple):
    """The static shape of what is moved at once: one sequence's slots in some layers."""

    layers: int
    parts: int
    """Items that all layers make."""
    kinds: dict[str, Stored]
    depth: int

    def read(self, name: str) -> int:
        """Windows that the sequence's nodes touch at most."""
        return self.kinds[name].most(MOST_NODES)

    def written(self, name: str) -> int:
        """Windows that the path touches at most."""
        return min(self.kinds[name].most(self.depth), self.read(name))

    def buffer(self, name: str, pool: Array) -> tuple[int, ...]:
        """Shape of the windows of an item of an array `[layers, pages, K, 2, ..]`."""
        return self.read(name), self.layers, *self.kinds[name].shape(pool.shape[2:])


def commit(
    arrays: dict[str, Array],
    page_table: Int[Array, "B P"],
    length: Int[Array, "B"],
    path: Int[Array, "B D"],
    count: Int[Array, "B"],
    *,
    num_layers: int,
    num_pages: int,
    interpret: Any = False,
) -> dict[str, Array]:
    """The pool's arrays with each sequence's node `path[b, i]` moved to place i, for i below `count[b]`, in all layers.

    Node j of a sequence lies in its slot `length[b] + j`; no node moves to a later place. There are at most 64 of them.
    `page_table` holds the pages of the first layer; those of layer l come `l * num_pages` after them. Arrays as in
    `append`; donated ones are changed where they are. NotImplementedError for pools that `unsupported` names.
    """
    reason = unsupported(arrays, interpret)
    if reason is not None:
        raise NotImplementedError(reason)
    place = jnp.arange(path.shape[1])
    page = arrays["kv"].shape[3]
    count = jnp.clip(page_table.shape[1] * page - length, 0, count)
    real = place < count[:, None]
    moves = jnp.any(real & (path != place), axis=1)
    reach = jnp.where(moves, jnp.max(jnp.where(real, path + 1, 0), axis=1), 0)
    scalars = [a.astype(jnp.int32) for a in (page_table, length, path, count, reach)]
    kinds = stored(arrays)
    pools = {name: a.reshape(num_layers, num_pages, *a.shape[1:]) for name, a in seen(arrays, kinds).items()}
    item = _item(pools, kinds, path.shape[1])
    everywhere = dict.fromkeys(pools, pl.BlockSpec(memory_space=pltpu.HBM))
    moved = pl.pallas_call(
        partial(_kernel, item),
        out_shape={name: pltpu.HBM(pool.shape, pool.dtype) for name, pool in pools.items()},
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[everywhere],
            out_specs=everywhere,
            scratch_shapes=[
                {name: pltpu.VMEM((2, *item.buffer(name, pool)), pool.dtype) for name, pool in pools.items()},
                pltpu.VMEM((item.layers, item.read("kv") * kinds["kv"].size, pools["kv"].shape[-1]), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        input_output_aliases={len(scalars) + i: i for i in range(len(pools))},
        interpret=interpreted(interpret),
        name="commit",
    )(*scalars, pinned(pools, interpret))
    return seen({name: pool.reshape(-1, *pool.shape[2:]) for name, pool in moved.items()}, kinds)


def _item(pools: dict[str, Array], kinds: dict[str, Stored], depth: int) -> _Item:
    """As many layers at once as find room and divide all layers."""
    layers = pools["kv"].shape[0]

    def room(item: _Item) -> int:
        return sum(padded_bytes(item.buffer(name, pool), pool.dtype.itemsize) for name, pool in pools.items())

    items = [_Item(n, layers // n, kinds, depth) for n in range(1, layers + 1) if layers % n == 0]
    return max((item for item in items if room(item) <= ITEM_BYTES), key=lambda item: item.layers, default=items[0])


class _Moves(NamedTuple):
    """What is to move, in the scalar memory."""

    table: Any
    length: Any
    path: Any
    count: Any
    reach: Any
    """Nodes up to the last of the path; 0 where none moves, and nothing is read."""


class _Move(NamedTuple):
    """What one item moves."""

    buffer: Int[Array, ""]
    """0 or 1."""
    begin: Int[Array, ""]
    """The sequence's slot of node 0."""
    count: Int[Array, ""]
    reach: Int[Array, ""]
    node: Any
    """`node(i)`: which one goes to place i."""


def _kernel(item: _Item, table, length, path, count, reach, _, pages, buffers, wide, semaphores):
    """Items one after the other; the next one's windows are on their way while one is moved."""
    moves = _Moves(table, length, path, count, reach)
    items = length.shape[0] * item.parts
    read, write = (partial(_transfer, item, moves, pages, buffers, semaphores, reading) for reading in (True, False))

    def one(index, _):
        pl.when(index > 0)(lambda: write(index - 1, _wait))
        pl.when(index + 1 < items)(lambda: read(index + 1, _start))
        read(index, _wait)
        sequence = index // item.parts
        move = _Move(index % 2, length[sequence], count[sequence], reach[sequence], lambda i: path[sequence, i])

        @pl.when(move.reach > 0)
        def _():
            for name, buffer in buffers.items():
                if item.kinds[name].in_lanes:
                    _move_in_lanes(item, name, move, buffer)
                else:
                    _move_in_rows(item, move, buffer, wide)

        write(index, _start)

    read(0, _start)
    jax.lax.fori_loop(0, items, one, None)
    write(items - 1, _wait)


def _start(copy) -> None:
    copy.start()


def _wait(copy) -> None:
    copy.wait()


def _transfer(item: _Item, moves: _Moves, pages, buffers, semaphores, reading: bool, index, act) -> None:
    """Start, or wait for, the copies of an item's windows: all up to the last node of the path, or its places."""
    sequence, buffer = index // item.parts, index % 2
    layers = pl.ds(index % item.parts * item.layers, item.layers)
    begin, reach = moves.length[sequence], moves.reach[sequence]
    end = begin + (reach if reading else jnp.where(reach > 0, moves.count[sequence], 0))

    def copy(name: str, slot, window):
        kind, pool = item.kinds[name], pages[name]
        page = moves.table[sequence, jnp.minimum(slot // kind.page, moves.table.shape[1] - 1)]

        @pl.when((page >= 0) & (page < pool.shape[1]))
        def _():
            ends = pool.at[layers, page, *kind.window(slot % kind.page)], buffers[name].at[buffer, window]
            source, target = ends if reading else ends[::-1]
            act(pltpu.make_async_copy(source, target, semaphores.at[buffer, int(reading)]))

        return window + 1

    for name in pages:
        each_window(begin, end, item.kinds[name].size, partial(copy, name), 0)


def _move_in_rows(item: _Item, move: _Move, buffer, wide) -> None:
    """Node after node in float32, in which single rows can be moved. Later nodes come from later places, so that none
    is overwritten before it was read."""
    size = item.kinds["kv"].size
    base = move.begin % size

    def one_kind(kind, _):
        def of_window(window: int):
            return (move.buffer, window, slice(None), kind // 2, kind % 2), pl.ds(window * size, size)

        def widened(window: int) -> None:
            place, rows = of_window(window)
            wide[:, rows, :] = widen(buffer[place])

        def one_node(i, _):
            wide[:, pl.ds(base + i, 1), :] = wide[:, pl.ds(base + move.node(i), 1), :]

        for window in range(item.read("kv")):
            pl.when(window * size < base + move.reach)(partial(widened, window))
        jax.lax.fori_loop(0, move.count, one_node, None)
        for window in range(item.written("kv")):
            place, rows = of_window(window)
            buffer[place] = narrow(wide[:, rows, :], buffer.dtype)

    jax.lax.fori_loop(0, 2 * buffer.shape[3], one_kind, None)


def _move_in_lanes(item: _Item, name: str, move: _Move, buffer) -> None:
    """Lanes cannot be moved one by one: a node's number is the sum over all lanes but for the others."""
    size, vectors = item.kinds[name].size, buffer.ndim == 7
    base = move.begin % size
    lane = jax.lax.broadcasted_iota(jnp.int32, (item.layers, buffer.shape[-2], size), 2)

    def one_kind(kind, _):
        which = (kind // 2, kind % 2) if vectors else (kind,)

        def one_node(i, _):
            numbers = jnp.zeros((*lane.shape[:2], 1), jnp.float32)
            for w in range(item.read(name)):
                found = lane + w * size == base + move.node(i)
                old = widen(buffer[move.buffer, w, :, *which])
                numbers += jnp.sum(jnp.where(found, old, 0), axis=-1, keepdims=True)
            for w in range(item.written(name)):
                place = move.buffer, w, slice(None), *which
                new = jnp.where(lane + w * size == base + i, numbers, widen(buffer[place]))
                buffer[place] = narrow(new, buffer.dtype)

        jax.lax.fori_loop(0, move.count, one_node, None)

    jax.lax.fori_loop(0, buffer.shape[3] * (2 if vectors else 1), one_kind, None)
