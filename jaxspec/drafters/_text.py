"""A request's last tokens, prompt and output, on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.types import Verdict


class Text(NamedTuple):
    """One row a request. Token i of a text is at `i % S`: of longer ones the last S are known."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    """Of the whole text."""


def new_text(batch: int, context: int) -> Text:
    """No tokens yet, and room for `context`."""
    return Text(jnp.zeros((batch, context), jnp.int32), jnp.zeros(batch, jnp.int32))


def begin(text: Text, row: Int[Array, ""], prompt: Int[Array, "S"], length: Int[Array, ""]) -> Text:
    """A request takes the row; `prompt` is padded."""
    size, index = text.tokens.shape[1], jnp.arange(prompt.shape[0])
    place = jnp.where((index < length) & (index >= length - size), index % size, size)
    return Text(text.tokens.at[row, place].set(prompt, mode="drop"), text.length.at[row].set(length))


def extend(text: Text, verdict: Verdict, emitted: Int[Array, "B"]) -> Text:
    """The text with the first `emitted` tokens of a verdict."""
    batch, path = verdict.tokens.shape
    index, size = jnp.arange(path), text.tokens.shape[1]
    place = jnp.where(index < emitted[:, None], (text.length[:, None] + index) % size, size)
    tokens = text.tokens.at[jnp.arange(batch)[:, None], place].set(verdict.tokens, mode="drop")
    return Text(tokens, text.length + emitted)


def read(text: Text, start: Int[Array, "B"], count: int) -> Int[Array, "B count"]:
    """`count` tokens of every row from `start` on; past the end, and of those that are not known, any."""
    at = (start[:, None] + jnp.arange(count)) % text.tokens.shape[1]
    return jnp.take_along_axis(text.tokens, at, axis=1)
