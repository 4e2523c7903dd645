"""Flags cover every field, and win over the configuration, which wins over the defaults."""

from pathlib import Path

import pytest

from jaxspec.commands.options import ENGINE, SAMPLING, checked, read_settings
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.errors import ConfigError


def test_every_field_has_a_flag():
    assert set(SAMPLING) == set(SamplingParams.__struct_fields__)
    # Its name is taken by the requests' own seed, which is what a command needs.
    assert set(ENGINE) == set(EngineConfig.__struct_fields__) - {"seed"}


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "own.toml"
        path.write_text(text)
        return str(path)

    return write


def test_precedence(config):
    path = config(
        '[sampling]\ntemperature = 0.5\ntop_k = 7\nstop = "END"\nlogit_bias = {5 = 1.5}\n[engine]\nmax_batch = 3'
    )
    settings = read_settings(path, {"temperature": 0.0, "ignore_eos": False, "stop": [], "max_batch": None})
    assert settings.sampling.temperature == 0.0
    assert settings.sampling.top_k == 7
    assert settings.sampling.stop_strings == ("END",)
    assert settings.sampling.logit_bias == {5: 1.5}
    assert settings.sampling.top_p == 1.0
    assert settings.engine.max_batch == 3
    own = read_settings(path, {"top_k": 9}, top_k=5, top_p=0.5, max_batch=1, page_size=32)
    assert (own.sampling.top_k, own.sampling.top_p, own.engine.max_batch, own.engine.page_size) == (9, 0.5, 3, 32)
    assert read_settings(path, {"logit_bias": ["9:-2", "8:1"]}).sampling.logit_bias == {9: -2.0, 8: 1.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sampling]\ntemprature = 1", "unknown option 'temprature' (did you mean 'temperature'?)"),
        ("[sampler]\ntop_k = 1", "unknown option 'sampler' (did you mean 'sampling'?)"),
        ("[engine]\nfrob = 1", "unknown option 'frob'"),
        ("sampling = 3", "sampling must be a table"),
        ("[sampling]\ntop_p = 2.0", "top_p must be in (0, 1]"),
        ('[sampling]\ntop_k = "many"', "top_k: expected int, got str"),
        ("[engine]\nmax_batch = 0", "max_batch must be 1"),
    ],
)
def test_a_wrong_configuration_names_the_file_and_the_trouble(config, text, said):
    path = config(text)
    with pytest.raises(ConfigError) as error:
        read_settings(path, {})
    assert str(error.value).startswith(path)
    assert said in str(error.value)


def test_checked_wants_the_right_types():
    with pytest.raises(ConfigError, match=r"max_tokens: expected int, got float"):
        checked({"max_tokens": 2.5}, SamplingParams)
    assert checked({"temperature": 1, "logit_bias": {"3": 2}}, SamplingParams).logit_bias == {3: 2.0}
