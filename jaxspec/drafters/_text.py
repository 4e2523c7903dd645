"""A request's tokens so far, prompt and output, on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.types import Verdict


class Text(NamedTuple):
    """One row a request."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]


def new_text(batch: int, context: int) -> Text:
    """No tokens yet."""
    return Text(jnp.zeros((batch, context), jnp.int32), jnp.zeros(batch, jnp.int32))


def begin(text: Text, row: Int[Array, ""], prompt: Int[Array, "S"], length: Int[Array, ""]) -> Text:
    """A request takes the row; `prompt` is padded."""
    return Text(text.tokens.at[row, : prompt.shape[0]].set(prompt), text.length.at[row].set(length))


def extend(text: Text, verdict: Verdict, emitted: Int[Array, "B"]) -> Text:
    """The text with the first `emitted` tokens of a verdict."""
    batch, path = verdict.tokens.shape
    index = jnp.arange(path)
    place = jnp.where(index < emitted[:, None], text.length[:, None] + index, text.tokens.shape[1])
    tokens = text.tokens.at[jnp.arange(batch)[:, None], place].set(verdict.tokens, mode="drop")
    return Text(tokens, text.length + emitted)


def read(text: Text, start: Int[Array, "B"], count: int) -> Int[Array, "B count"]:
    """`count` tokens of every row from `start` on; past the end, any."""
    at = jnp.minimum(start[:, None] + jnp.arange(count), text.tokens.shape[1] - 1)
    return jnp.take_along_axis(text.tokens, at, axis=1)
