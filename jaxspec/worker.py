"""What the host tells the devices: every call is a program that all of them run, its arguments host arrays.

An engine needs nothing else of the devices, so its calls can be sent to other processes as they are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxspec import decode
from jaxspec.host.offload import AT_ONCE
from jaxspec.program import Program
from jaxspec.target import platform
from jaxspec.types import Models, Output, Sampling
from pallas_kernels import Rows

PINNED = "pinned_host"
"""Memory of the host that devices copy to by themselves."""


class Worker:
    """Parameters and the state of decoding on the devices of a mesh, or on the default one; page tables have
    `table_width` pages, rows of prompts at most `row_width` tokens."""

    def __init__(
        self, program: Program, params: Models, table_width: int, row_width: int, mesh: Mesh | None = None
    ) -> None:
        self.program, self.params = program, params
        self.mesh, self._table_width, self._row_width = mesh, table_width, row_width
        self._saved: dict[str, decode.Saved] = {}
        """What requests that gave way go on from."""
        self.state: Any = None

    def start(self, batch: int) -> None:
        """An empty state of so many rows."""
        self.state = decode.init_state(self.program, batch, self._table_width, self.mesh)

    def select_rows(self, rows: np.ndarray) -> None:
        """Another batch: row i is the old row `rows[i]`."""
        self.state = decode.select_rows(self.state, jnp.asarray(rows))

    def admit(self, row: int, prompt: np.ndarray, length: int, sampling: Sequence[Any]) -> None:
        """A request takes a row; `sampling` are the fields of a `Sampling` row, and `prompt` is padded."""
        one = np.int32(row), prompt, np.int32(length), Sampling(*sampling)
        self.state = decode.admit(self.state, *one, program=self.program)

    def copy_page(self, source: int, target: int) -> None:
        """A page of every layer becomes another's."""
        self.state = decode.copy_page(self.state, np.int32(source), np.int32(target), program=self.program)

    def condense(self, row: int, source: np.ndarray, target: np.ndarray) -> None:
        """What stays of a row goes from some pages to others."""
        self.state = decode.condense_row(self.state, np.int32(row), source, target, program=self.program)

    def read_pages(self, pages: Sequence[int]) -> decode.Stored:
        """Begin to copy at most AT_ONCE pages to the host: what is written from now on does not touch the copy."""
        stored = decode.read_pages(self.state, _padded(pages, pages[0]), program=self.program)
        if platform() != "cpu":
            stored = jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind(PINNED)), stored)
        jax.tree.map(lambda a: a.copy_to_host_async(), stored)
        return stored

    def is_read(self, stored: decode.Stored) -> bool:
        """Whether the copy is whole, so that `take_pages` does not wait."""
        return all(a.is_ready() for a in jax.tree.leaves(stored))

    def take_pages(self, stored: decode.Stored, count: int) -> list[np.ndarray]:
        """The bytes of the first `count` pages of a copy, once it is whole."""
        arrays = [np.asarray(a) for a in jax.tree.leaves(stored)]
        return [np.concatenate([_bytes(a[at]) for a in arrays]) for at in range(count)]

    def write_pages(self, pages: Sequence[int], blocks: Sequence[np.ndarray]) -> None:
        """Give at most AT_ONCE pages the bytes that `take_pages` took of some."""
        targets = _padded(pages, np.iinfo(np.int32).max)
        page = decode.page_of(self.state, self.program)
        stored = jax.tree.map(lambda array: np.zeros((len(targets), *array.shape), array.dtype), page)
        begin = 0
        for leaf in jax.tree.leaves(stored):
            size = leaf[0].nbytes
            for at, block in enumerate(blocks):
                _bytes(leaf[at])[:] = block[begin : begin + size]
            begin += size
        if self.mesh is not None:
            specs = decode.specs_of_stored(*decode.partitions_of(self.program))
            stored = jax.device_put(stored, jax.tree.map(partial(NamedSharding, self.mesh), specs))
        self.state = decode.write_pages(self.state, targets, stored, program=self.program)

    def save(self, row: int, name: str) -> None:
        """Keep what a row knows besides its pages."""
        self._saved[name] = decode.save_row(self.state, np.int32(row))

    def restore(self, row: int, name: str, length: int) -> None:
        """Go on in a row from what was kept, once `length` slots are written again."""
        self.state = decode.restore_row(self.state, np.int32(row), np.int32(length), self._saved.pop(name))

    def forget(self, name: str) -> None:
        """Let go of what was kept."""
        self._saved.pop(name, None)

    def set_pages(self, table: np.ndarray, dropped: np.ndarray) -> None:
        """The pages of all rows, and how many slots were given back of each."""
        self.state = decode.set_pages(self.state, table, dropped)

    def prefill(self, rows: np.ndarray, tokens: np.ndarray, votes: bool) -> None:
        """Write chunks of prompts: `rows` are the fields of `Rows`, one after the other. Those that vote are rows of
        one token."""
        packed, width = (Rows(*rows), tokens), 1 if votes else self._row_width
        self.state = decode.prefill(self.params, self.state, *packed, program=self.program, width=width, votes=votes)
        self._let_end()

    def run(self, active: np.ndarray, rounds: int, least_active: int) -> Output:
        """Some rounds of the active rows."""
        self.state = decode.set_active(self.state, active)
        limits = np.int32(rounds), np.int32(least_active)
        self.state, output = decode.run(self.params, self.state, *limits, program=self.program)
        self._let_end()
        return output

    def _let_end(self) -> None:
        """XLA on the CPU has threads for one program in which devices wait for each other: two of them, of replicas,
        would wait for ever."""
        if self.mesh is not None and platform() == "cpu":
            self.wait()

    def wait(self) -> None:
        """Until the devices have done all that they were told."""
        jax.block_until_ready(self.state)

    @property
    def finish(self) -> np.ndarray:
        """Why each row has stopped."""
        return np.asarray(self.state.progress.finish)


def _padded(pages: Sequence[int], padding: int) -> np.ndarray:
    """One page or AT_ONCE, so that few programs are compiled."""
    size = 1 if len(pages) == 1 else AT_ONCE
    return np.array([*pages, *[padding] * (size - len(pages))], np.int32)


def _bytes(array: np.ndarray) -> np.ndarray:
    """The same memory as bytes."""
    return array.reshape(-1).view(np.uint8)
