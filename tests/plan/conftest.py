"""Shapes are read once: building the tree of a large model takes a while where types are checked."""

from collections.abc import Iterator
from functools import cache

import pytest

from jaxspec.plan import setup


@pytest.fixture(autouse=True, scope="session")
def shapes_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "read_shape", cache(setup.read_shape))
        yield
