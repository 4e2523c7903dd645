"""Models to folders that `load_model` reads again: Hugging Face's layout of safetensors, or an orbax checkpoint."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.loading import DTYPES, ORBAX_FOLDER, Checkpoint, check_weights, chosen_scheme, located, open_model
from jaxspec.models.loading.stream import ProgressBar
from jaxspec.models.quantization import METHOD, get_scheme
from jaxspec.models.saving.leaves import Leaf, leaves_of
from jaxspec.models.saving.safetensors import write_safetensors
from jaxspec.models.saving.text import write_text_files

LAYOUTS = ("safetensors", "orbax")
GB = 10**9


class Converted(NamedTuple):
    """What was written."""

    tensors: int
    bytes: int
    """Of all tensors; an orbax checkpoint compresses them."""
    types: tuple[str, ...]
    """Theirs, the one that takes most bytes first."""


def convert(
    model: str,
    destination: Path,
    layout: str = "safetensors",
    weights: str = "auto",
    max_shard: float = 5.0,
    progress: bool = True,
) -> Converted:
    """Writes a model to a new folder, one array after the other: memory holds no more than two.

    Args:
        model: as `load_model` takes it.
        destination: the folder; it is there in one step when all is written, and not at all after a failure.
        layout: `safetensors` (Hugging Face's: config.json, tokenizer, tensors under their names) or `orbax` (the
            parameter tree as an orbax checkpoint in the folder `params`, config.json and tokenizer beside it).
        weights: float32, bfloat16 or a file in jaxspec/models/quantization; auto keeps what each tensor has, which is
            float32 for those of a GGUF file.
        max_shard: GB (10⁹ bytes) of a safetensors file at most; a larger tensor has one to itself.
        progress: allows a bar on stderr if that is a terminal.

    Raises ConfigError for a destination that exists and for options that cannot be; LoadError where the model cannot be
    read; JaxspecError where writing fails, as on a full disk.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"the format must be {' or '.join(LAYOUTS)}, not {layout!r}")
    if not max_shard > 0:
        raise ConfigError(f"a shard must be larger than 0 GB, not {max_shard}")
    check_weights(weights)
    with _new_folder(destination) as folder:
        found = open_model(model)
        with located(found.path):
            return _write(found, folder, layout, weights, max_shard, progress)


@contextmanager
def _new_folder(destination: Path) -> Iterator[Path]:
    """A folder that becomes `destination` at the end, in one step; else it vanishes with all that is in it."""
    if os.path.lexists(destination):
        raise ConfigError(f"{destination} exists already: name a new folder, or remove it first")
    if not destination.parent.is_dir():
        raise ConfigError(f"cannot write {destination}: there is no folder {destination.parent}")
    try:
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=destination.parent) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()  # open to others as the user has it, while the scratch folder is not
            yield folder
            folder.rename(destination)
    except OSError as error:
        raise JaxspecError(f"cannot write {destination}: {error.strerror or error}") from error


def _write(found: Checkpoint, folder: Path, layout: str, weights: str, max_shard: float, progress: bool) -> Converted:
    scheme = chosen_scheme(found, weights)
    quantise = None if scheme is None or found.stored else get_scheme(scheme)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        tree = leaves_of(found, DTYPES.get(weights), quantise, pool)
        leaves: list[Leaf] = jax.tree.leaves(tree)
        types, plain = Counter[str](), Counter[str]()
        for leaf in leaves:
            types[leaf.dtype.name] += leaf.nbytes
            plain[leaf.dtype.name] += 0 if leaf.quantised else leaf.nbytes
        settings = None if scheme is None else {"quant_method": METHOD, "weights": scheme}
        # torch_dtype is a name that every version of transformers knows; dtype would come before it.
        changes = {"quantization_config": settings, "dtype": None, "torch_dtype": plain.most_common(1)[0][0]}
        write_text_files(found, folder, changes)
        with ProgressBar("Writing weights", types.total(), progress) as bar:
            tree = jax.tree.map(lambda leaf: leaf.counted(bar.advance), tree)
            if layout == "orbax":
                from jaxspec.models.saving.orbax import write_orbax  # slow to import

                write_orbax(tree, folder / ORBAX_FOLDER)
            else:
                write_safetensors(jax.tree.leaves(tree), folder, max_shard * GB)
    ordered = tuple(name for name, _ in types.most_common())
    return Converted(sum(len(leaf.parameter.parts) for leaf in leaves), types.total(), ordered)
