"""Pallas TPU kernels: paged attention and the writing of pages."""

from pallas_kernels.tpu.blocks import Blocks, blocks_for
from pallas_kernels.tpu.paged_attention import paged_attention, unsupported
from pallas_kernels.tpu.pages import append, commit
from pallas_kernels.tpu.pages import unsupported as unsupported_pages

__all__ = ["Blocks", "append", "blocks_for", "commit", "paged_attention", "unsupported", "unsupported_pages"]
