"""A memory plan as JSON fields, and as people read it. GB are 10⁹ bytes, GiB are 2³⁰."""

import math
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from jaxspec.plan.memory import AUTO, MemoryPlan

GB, GIB = 10**9, 2**30


def make_fields(plan: MemoryPlan, memory: int | None) -> dict[str, Any]:
    """The plan, and what `memory` bytes hold of it, as JSON fields; sizes are in bytes."""
    fields = {
        "model": plan.shape.name,
        "attention": plan.shape.attention,
        **plan.shape.sizes,
        "context": plan.context,
        "batch": plan.batch,
        "page_size": plan.cache.page_size,
        "kv_dtype": plan.kv_dtype,
        **_cache_fields(plan, plan.kv_dtype),
        "weights": plan.weights,
        "parameters": plan.parameters,
        "weight_bytes": plan.weight_bytes[plan.weights],
        "total_bytes": plan.total_bytes,
        "kv_formats": {name: _cache_fields(plan, name) for name in plan.caches},
        "weight_formats": plan.weight_bytes,
        "refused": plan.refused,
    }
    if memory is None:
        return fields
    return fields | {
        "memory_bytes": memory,
        "fits": plan.total_bytes <= memory,
        **plan.room(memory)._asdict(),
        "remedies": plan.remedies(memory),
    }


def _cache_fields(plan: MemoryPlan, kv_dtype: str) -> dict[str, Any]:
    cache = plan.caches[kv_dtype]
    return {
        "bytes_per_token": cache.token_bytes,
        "pages_per_sequence": cache.pages(plan.context),
        "tail_bytes": cache.tail_bytes,
        "bytes_per_sequence": cache.sequence_bytes(plan.context),
        "kv_bytes": plan.kv_bytes(kv_dtype),
    }


def make_report(plan: MemoryPlan, memory: int | None) -> Iterator[RenderableType]:
    """Tables and lines of text with rich's markup."""
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in plan.shape.sizes.items())
    yield f"[bold]{escape(plan.shape.name)}[/]: {plan.shape.attention}, {sizes}"
    yield _cache_table(plan)
    for name, cache in plan.caches.items():
        if cache.tail_bytes:
            tail = f"{short(cache.tail_bytes / GB)} GB"
            yield f"{name}: a sequence's tail, its newest tokens in full precision, takes {tail} of it."
    yield ""
    if plan.parameters:
        yield _weights_table(plan)
    else:
        yield "Latent attention cannot be run yet: its cache is counted, and no weights."
    yield from (escape(why) for why in plan.refused)
    yield ""
    yield _sum(plan)
    if memory is not None:
        yield from _verdict(plan, memory)


def _cache_table(plan: MemoryPlan) -> Table:
    cache = plan.cache
    title = f"Keys and values: {_sequences(plan.batch, plan.context)}"
    caption = f"A sequence takes {count(cache.pages(plan.context), 'page')} of {count(cache.page_size, 'token')}."
    table = new_table(
        title, caption, "kv_dtype", "bytes a token", "GB a sequence", "GB in all", "GiB in all", f"of {AUTO}"
    )
    for name, one in plan.caches.items():
        sequence, total = one.sequence_bytes(plan.context), plan.kv_bytes(name)
        share = total / plan.kv_bytes(AUTO)
        cells = f"{one.token_bytes:,}", short(sequence / GB), short(total / GB), short(total / GIB), f"{share:.3f}"
        add_row(table, name, name == plan.kv_dtype, *cells)
    return table


def _weights_table(plan: MemoryPlan) -> Table:
    caption = "Matrices are quantised; embedding, norms and biases stay in 16 bits."
    table = new_table(f"Weights: {count(plan.parameters, 'parameter')}", caption, "weights", "GB", "GiB", f"of {AUTO}")
    for name, size in plan.weight_bytes.items():
        cells = short(size / GB), short(size / GIB), f"{size / plan.weight_bytes[AUTO]:.3f}"
        add_row(table, name, name == plan.weights, *cells)
    return table


def new_table(title: str, caption: str, *columns: str) -> Table:
    """With numbers to the right, all but the first column."""
    layout: dict[str, Any] = {"title_justify": "left", "caption_justify": "left", "padding": (0, 1, 0, 0)}
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, **layout)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def add_row(table: Table, name: str, chosen: bool, *cells: str) -> None:
    """The row that is chosen stands out."""
    table.add_row(f"{'▸' if chosen else ' '} {name}", *cells, style="bold" if chosen else None)


def _sum(plan: MemoryPlan) -> str:
    parts = [f"keys and values {short(plan.kv_bytes(plan.kv_dtype) / GB)} GB in {plan.kv_dtype}"]
    if plan.parameters:
        parts.append(f"weights {short(plan.weight_bytes[plan.weights] / GB)} GB in {plan.weights}")
    return f"[bold]Together {both(plan.total_bytes)}[/]: {', '.join(parts)}"


def _verdict(plan: MemoryPlan, memory: int) -> Iterator[str]:
    room, over = plan.room(memory), plan.total_bytes - memory
    if over <= 0:
        yield f"[green]It fits into {both(memory)}[/], {both(-over)} to spare."
    else:
        yield f"[red]It does not fit into {both(memory)}[/], by {both(over)}."
    yield (
        f"There is room for {_sequences(room.max_batch, plan.context)}, or for "
        f"{_sequences(plan.batch, room.max_context)}, or for {room.max_tokens:,} tokens in all."
        if any(room)
        else "There is no room for keys and values beside the weights."
    )
    if over > 0:
        enough = {"memory": f"{math.ceil(10 * plan.total_bytes / GIB) / 10:g}"}
        yield (
            "It would fit with "
            + ", or with ".join(options(change) for change in [*plan.remedies(memory), enough])
            + "."
        )


def options(change: dict[str, Any]) -> str:
    """As they are given on the command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())


def _sequences(batch: int, context: int) -> str:
    return f"{count(batch, 'sequence')} of {count(context, 'token')}"


def count(number: int, what: str) -> str:
    """With its noun."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def both(size: int) -> str:
    """Bytes, in either unit."""
    return f"{short(size / GIB)} GiB ({short(size / GB)} GB)"


def short(number: float) -> str:
    """Two decimals, or three digits of what is less than 1."""
    return f"{number:,.2f}" if number >= 1 else f"{number:.3g}"
