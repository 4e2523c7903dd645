"""Exact speculative decoding and KV-cache optimisation for language models in pure-functional JAX."""

from typing import Any

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `jaxspec --help` must not wait for jax.
    if name == "LLM":
        from jaxspec.llm import LLM

        return LLM
    if name == "SamplingParams":
        from jaxspec.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
