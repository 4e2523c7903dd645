"""The tiny checkpoints of tests/models/loading, to be written again."""

from tests.models.loading.conftest import folder, fused, gguf_file, random_tensors, tiny_config

__all__ = ["folder", "fused", "gguf_file", "random_tensors", "tiny_config"]
