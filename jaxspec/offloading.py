"""What an engine keeps pages in besides its pool, and what they are told apart by."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.config import EngineConfig
from jaxspec.errors import CapacityError
from jaxspec.host.offload import Offload
from jaxspec.host.tiers import Files, Memory
from jaxspec.models.loading.wheel import cache_folder
from jaxspec.worker import Worker

SAMPLES = 1024
"""Numbers of each parameter that go into a model's identity: a model that was trained further differs in all."""


def offload_of(config: EngineConfig, worker: Worker) -> Offload | None:
    """The tiers that a configuration asks for; None where it is none.

    CapacityError where one of them is less than a page, ConfigError where a folder cannot be used.
    """
    if not config.offload_memory and not config.offload_disk:
        return None
    program = worker.program
    state = jax.eval_shape(lambda: decode.init_state(program, 1, 1))
    page = decode.page_of(state, program)
    size = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(page))
    for name in ("offload_memory", "offload_disk"):
        if 0 < (room := getattr(config, name)) * 2**30 < size:
            raise CapacityError(
                f"{name} {room:g} GiB is less than one page: {program.pool.page_size} tokens take "
                f"{size / 2**20:.1f} MiB; raise it or lower page_size"
            )
    files = None
    if config.offload_disk:
        folder = Path(config.offload_folder).expanduser() if config.offload_folder else cache_folder() / "pages"
        files = Files(folder, int(config.offload_disk * 2**30), identity_of(config, worker, page))
    return Offload(worker, program.pool.page_size, Memory(int(config.offload_memory * 2**30)), files)


def identity_of(config: EngineConfig, worker: Worker, page: decode.Stored) -> str:
    """Of all that the bytes of a page depend on besides its text: shapes, options, and the weights that make it."""
    program = worker.program
    layout = jax.tree.map(lambda array: (array.shape, str(array.dtype)), page)
    options = {name: getattr(config, name) for name in config.__struct_fields__ if name.startswith("kv_")}
    del options["kv_memory"]
    draft = program.drafter.model if program.draft_pool is not None else None
    found = hashlib.blake2b(repr((program.model, draft, options, layout)).encode(), digest_size=20)
    params: Any = worker.params.target, worker.params.draft if draft is not None else ()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found.update(jax.tree_util.keystr(path).encode())
        found.update(_some_of(leaf))
    return found.hexdigest()


def _some_of(leaf: jax.Array) -> bytes:
    """Numbers from all over the first device's part of a parameter."""
    part = leaf.addressable_shards[0].data
    rows = part.reshape(-1)[:: max(part.size // SAMPLES, 1)]
    return np.asarray(rows).tobytes()
