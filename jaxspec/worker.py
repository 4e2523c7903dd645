"""What the host tells the devices: every call is a program that all of them run, its arguments host arrays.

An engine needs nothing else of the devices, so its calls can be sent to other processes as they are.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import decode
from jaxspec.program import Program
from jaxspec.target import platform
from jaxspec.types import Models, Output, Sampling
from pallas_kernels import Rows


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

    def prefill(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Write chunks of prompts: `rows` are the fields of `Rows`, one after the other."""
        packed = Rows(*rows), tokens
        self.state = decode.prefill(self.params, self.state, *packed, program=self.program, width=self._row_width)
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
