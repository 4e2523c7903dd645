"""Attention over paged key/value pools: one signature, one implementation per backend."""

from pallas_kernels.api import append_pages, commit_pages, paged_attention, writes_pages
from pallas_kernels.kernels import XLA, Kernels
from pallas_kernels.layout import Packing, Rows, Tail, Variant, pack, page_slots, visible_slots

__all__ = [
    "XLA",
    "Kernels",
    "Packing",
    "Rows",
    "Tail",
    "Variant",
    "append_pages",
    "commit_pages",
    "pack",
    "page_slots",
    "paged_attention",
    "visible_slots",
    "writes_pages",
]
