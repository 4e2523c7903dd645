"""Which implementation a configuration gets on which device."""

import logging
from types import SimpleNamespace

import pytest

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.implementation import kernels_of
from pallas_kernels import XLA


def on(monkeypatch: pytest.MonkeyPatch, platform: str, kind: str = "") -> None:
    monkeypatch.setattr("jax.default_backend", lambda: platform)
    monkeypatch.setattr("jax.devices", lambda: [SimpleNamespace(platform=platform, device_kind=kind)])


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_xla_runs_anywhere(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    on(monkeypatch, platform)
    assert kernels_of("xla") == XLA


@pytest.mark.parametrize("implementation", ["auto", "pallas"])
def test_tpus_get_kernels_for_their_chip(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    on(monkeypatch, "tpu", "TPU v6 lite")
    found = kernels_of(implementation)
    assert (found.backend, found.interpret, found.chip.name) == ("tpu", False, "v6e")


def test_tpus_that_are_not_known_get_xla_and_a_warning(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    on(monkeypatch, "tpu", "TPU v99")
    with caplog.at_level(logging.WARNING):
        assert kernels_of("auto") == XLA
    assert "TPU v99 is not a kind of device in configs/chips.toml" in caplog.text
    with pytest.raises(ConfigError, match="TPU v99"):
        kernels_of("pallas")


def test_other_devices_get_xla_unless_kernels_are_asked_for(monkeypatch, caplog) -> None:
    on(monkeypatch, "cpu")
    assert kernels_of("auto") == XLA
    with caplog.at_level(logging.WARNING):
        assert kernels_of("pallas").interpret
    assert "very slow" in caplog.text
    on(monkeypatch, "gpu")
    assert kernels_of("auto") == XLA
    with pytest.raises(ConfigError, match="no kernels for gpu yet; take auto or xla"):
        kernels_of("pallas")


def test_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="implementation must be auto, pallas or xla, not 'cuda'"):
        EngineConfig(implementation="cuda")
