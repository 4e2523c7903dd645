"""What tests share."""

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# For meshes; what runs on the first device alone does not notice.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
if version("jaxlib").startswith("0.10."):
    # The older of its emitters compiles small programs in half the time. `.ci/run` has the newer for the real model,
    # and with the newest jax, which knows no other.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

import jax
import pytest

from tests.tiny import write_model

MOST_MAPPINGS = 20_000


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json, model.safetensors and a byte-level tokenizer with a chat template; context 256."""
    return write_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def unoptimised() -> Iterator[None]:
    """For programs that run so shortly that optimising them would take longer."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """Forget compiled programs once they are many: Linux lets a process map 65,530 regions, each program takes some
    dozens, and XLA does not survive the lack of them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
