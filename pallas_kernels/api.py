"""The one attention of jaxspec: decode, draft-tree verification and chunked prefill are the same call."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Rows, Tail
from pallas_kernels.xla.paged_attention import paged_attention as xla_paged_attention

ReadPages = Callable[[dict[str, Array], Int[Array, "R"], int], Float[Array, "R K page D"]]
"""`read(arrays, pages, which)`: the keys (which 0) or values (1) stored in these physical pages."""


def paged_attention(
    q: Float[Array, "R T K G D"],
    arrays: dict[str, Array],
    read: ReadPages,
    rows: Rows,
    page_table: Int[Array, "B P"],
    ancestors: Int[Array, "R T W"] | None,
    tail: Tail | None = None,
    *,
    page: int,
    scale: float,
) -> Float[Array, "R T K G D"]:
    """Softmax attention of every row's queries over what is stored in its sequence's pages.

    The rows' own keys and values must have been written before. Queries are grouped by key/value head: K heads with G
    queries each. `page_table` holds physical pages of this layer; entries past a sequence's last page are never used.
    `ancestors` as in `visible_slots`. With a `tail`, slots from its start on are read from there. Products accumulate
    in float32. Follows PagedAttention (Kwon et al., 2023), with the tree mask of SpecInfer (Miao et al., 2023).
    """
    return xla_paged_attention(q, arrays, read, rows, page_table, ancestors, tail, page=page, scale=scale)
