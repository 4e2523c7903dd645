"""Copies of pages into the attention kernel's ring of buffers: while one block is in use, those after it are under way,
of the next work items too, so that the memory is never idle."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu._attention_work import Item, Plan, block_at, for_each, item_at, wanted_pages

NEXT_ITEM, NEXT_BLOCK, NEXT_SLOT, SLOT = range(4)
"""What `refs.cursor` holds: the block to be fetched next, the buffer it goes to, and the buffer to be used next."""


def start(plan: Plan, refs: SimpleNamespace) -> None:
    """Begin to fill all buffers but one."""
    for i in range(4):
        refs.cursor[i] = 0
    for_each(0, plan.blocks.buffers - 1, lambda _: fetch_next(plan, refs))


def fetch_next(plan: Plan, refs: SimpleNamespace) -> None:
    """Begin to copy the pages wanted of the next block, if there is one, into the buffer that is free.

    No branches and no loops, only conditions of single copies: the compiler then lays all of it beside the arithmetic
    of the block in use.
    """
    index, block_index, slot = refs.cursor[NEXT_ITEM], refs.cursor[NEXT_BLOCK], refs.cursor[NEXT_SLOT]
    more = index < pl.num_programs(0)
    item = item_at(plan, refs, jnp.minimum(index, pl.num_programs(0) - 1))
    block = block_at(plan, item, block_index)
    sinks, low, high = wanted_pages(plan, item, block)
    for j in range(plan.blocks.fetch_pages):
        wanted = j < high
        if plan.variant.window is not None:
            wanted &= (j < sinks) | (j >= low)

        @pl.when(more & wanted)
        def _(j: int = j) -> None:
            for copy in _copies(plan, refs, item, block, j, slot):
                copy.start()

    done = block_index + 1 == item.blocks
    refs.cursor[NEXT_BLOCK] = jnp.where(done, 0, block_index + 1)
    refs.cursor[NEXT_ITEM] = index + (more & done).astype(jnp.int32)
    refs.cursor[NEXT_SLOT] = _after(plan, slot)


def wait_whole(plan: Plan, refs: SimpleNamespace):
    """Wait for a block of which all pages are wanted, and tell its buffer."""
    slot = _take_slot(plan, refs)
    for _, buffer in _pairs(refs):
        # A semaphore counts bytes: one wait serves all pages.
        pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], refs.arrived.at[slot]).wait()
    return slot


def wait(plan: Plan, refs: SimpleNamespace, item: Item, block):
    """Wait for any block of the item, and tell its buffer. Values of pages there that were not copied, and yet take
    part in a step of the softmax, become zero: so is their weight, but what the buffer still holds may be no number."""
    slot = _take_slot(plan, refs)

    def wait_page(j) -> None:
        for copy in _copies(plan, refs, item, block, j, slot):
            copy.wait()

    def clear_page(j) -> None:
        for _, buffer in _pairs(refs):
            for head in range(buffer.shape[2]):
                buffer[slot, j, head, 1:] = jnp.zeros((1, *buffer.shape[4:]), buffer.dtype)

    step = plan.masked_tokens // plan.page
    sinks, low, high = wanted_pages(plan, item, block)
    if plan.variant.window is not None:
        for_each(0, sinks, wait_page)
        for_each(sinks, low, clear_page)
    for_each(low, high, wait_page)
    for_each(high, jax.lax.div(high + (step - 1), step) * step, clear_page)
    return slot


def _take_slot(plan: Plan, refs: SimpleNamespace):
    slot = refs.cursor[SLOT]
    refs.cursor[SLOT] = _after(plan, slot)
    return slot


def _after(plan: Plan, slot):
    """The buffer after this one."""
    return jnp.where(slot + 1 == plan.blocks.buffers, 0, slot + 1)


def _pairs(refs: SimpleNamespace) -> list:
    """Arrays of pages and the buffers they are copied to: keys and values, and their scales."""
    pairs = [(refs.kv, refs.kv_buffer)]
    return [*pairs, (refs.scale, refs.scale_buffer)] if hasattr(refs, "scale") else pairs


def _copies(plan: Plan, refs: SimpleNamespace, item: Item, block, j, slot) -> list:
    logical = block * plan.blocks.fetch_pages + j
    page = refs.table[item.sequence * plan.table_width + logical]
    return [
        pltpu.make_async_copy(array.at[page], buffer.at[slot, j], refs.arrived.at[slot])
        for array, buffer in _pairs(refs)
    ]
