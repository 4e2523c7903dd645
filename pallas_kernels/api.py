"""The one attention of jaxspec, and the writing of what it reads: decode, draft-tree verification and chunked prefill
are the same calls, whichever implementation serves them."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.kernels import XLA, Kernels, tell_fallback
from pallas_kernels.layout import PLAIN, Rows, Tail, Variant
from pallas_kernels.xla.paged_attention import paged_attention as xla_paged_attention

ReadPages = Callable[[dict[str, Array], Int[Array, "R"], int], Float[Array, "R K page D"]]
"""`read(arrays, pages, which)`: the keys (which 0) or values (1) stored in these physical pages."""
Mass = Float[Array, "R K S"]
"""Softmax weights of each row's first token at every slot of the page table, a mean over its queries of a head."""


def paged_attention(
    q: Float[Array, "R T K G D"],
    arrays: dict[str, Array],
    read: ReadPages,
    rows: Rows,
    page_table: Int[Array, "B P"],
    ancestors: Int[Array, "R T W"] | None,
    tail: Tail | None = None,
    sink_queries: Float[Array, "R T K G D"] | None = None,
    *,
    page: int,
    scale: float,
    variant: Variant = PLAIN,
    kernels: Kernels = XLA,
) -> Float[Array, "R T K G D"] | tuple[Float[Array, "R T K G D"], Mass]:
    """Softmax attention of every row's queries over what is stored in its sequence's pages; with `variant.mass` also
    the mass.

    The rows' own keys and values must have been written before. Queries are grouped by key/value head: K heads with G
    queries each. `page_table` holds physical pages of this layer; entries past a sequence's last page are never used.
    `ancestors` as in `visible_slots`. With a `tail`, slots from its start on are read from there. `sink_queries` score
    the variant's sinks in place of `q`: the same queries, turned to other positions (StreamingLLM, Xiao et al., 2024).
    Products accumulate in float32. Follows PagedAttention (Kwon et al., 2023), with the tree mask of SpecInfer (Miao et
    al., 2023).
    """
    if kernels != XLA:
        from pallas_kernels import tpu

        why = "values wait in tails apart from pages" if tail is not None else tpu.unsupported(q, arrays)
        if why is None:
            _, width, heads, group, dim = q.shape
            blocks = tpu.blocks_for(kernels.chip, arrays["kv"].dtype, page, heads, group, dim, width)
            return tpu.paged_attention(
                q,
                arrays["kv"],
                arrays.get("scale"),
                rows,
                page_table,
                ancestors,
                sink_queries,
                scale=scale,
                variant=variant,
                blocks=blocks,
                interpret=kernels.interpret,
            )
        tell_fallback("paged attention", why)
    return xla_paged_attention(
        q, arrays, read, rows, page_table, ancestors, tail, sink_queries, page=page, scale=scale, variant=variant
    )


def writes_pages(arrays: dict[str, Any], kernels: Kernels) -> bool:
    """Whether kernels write pages of such arrays, or of such shapes and types; where not, the log says why, once."""
    from pallas_kernels import tpu

    why = tpu.unsupported_pages(arrays, kernels.interpret)
    if why is not None:
        tell_fallback("the writing of pages", why)
    return why is None


def append_pages(
    arrays: dict[str, Array],
    rows: Rows,
    page_table: Int[Array, "B P"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K D"],
    *,
    distinct: bool,
    kernels: Kernels,
) -> dict[str, Array]:
    """The arrays with the rows' keys and values in their slots, written where they lie; `distinct` promises that no two
    rows are of one sequence."""
    from pallas_kernels import tpu

    return arrays | tpu.append(arrays, rows, page_table, k, v, distinct=distinct, interpret=kernels.interpret)


def commit_pages(
    arrays: dict[str, Array],
    page_table: Int[Array, "B P"],
    length: Int[Array, "B"],
    path: Int[Array, "B D"],
    count: Int[Array, "B"],
    *,
    num_layers: int,
    num_pages: int,
    kernels: Kernels,
) -> dict[str, Array]:
    """The arrays with accepted tree paths moved together: row index `path[b, i]` goes to index i, for i below
    `count[b]`, in every layer."""
    from pallas_kernels import tpu

    return arrays | tpu.commit(
        arrays, page_table, length, path, count, num_layers=num_layers, num_pages=num_pages, interpret=kernels.interpret
    )
