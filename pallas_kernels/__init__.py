"""Attention over paged key/value pools: one signature, one implementation per backend."""

from pallas_kernels.api import paged_attention
from pallas_kernels.layout import Packing, Rows, Tail, pack, page_slots, visible_slots

__all__ = ["Packing", "Rows", "Tail", "pack", "page_slots", "paged_attention", "visible_slots"]
