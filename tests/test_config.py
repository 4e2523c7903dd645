"""What a request and an engine may be asked for, and the configurations that come along."""

from pathlib import Path

import msgspec
import pytest

from jaxspec.commands.options import read_settings
from jaxspec.config import EngineConfig, SamplingParams, find_config, read_toml
from jaxspec.errors import ConfigError, RequestError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": INF},
        {"temperature": NAN},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": NAN},
        {"min_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": INF},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: NAN}},
        {"logit_bias": {1: INF}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": list(range(25))},
        {"seed": 2**64},
        {"n": 0},
        {"n": 2, "best_of": 1, "temperature": 1.0},
        {"best_of": 2},
        {"best_of": 0, "temperature": 1.0},
        {"cache_ttl": 0.0},
        {"cache_ttl": NAN},
        {"logprobs": 21},
        {"logprobs": -1},
    ],
)
def test_sampling_out_of_range_is_a_one_line_error_that_names_the_field(fields):
    with pytest.raises(RequestError, match=r"^[^\n]+$") as error:
        SamplingParams(**fields)
    assert any(name in str(error.value) for name in fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 1.0},
        {"stop": "end"},
        {"logit_bias": {0: -100.0}, "stop_token_ids": list(range(24))},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"min_tokens": 8, "max_tokens": 8, "logprobs": 0},
        {"n": 3, "best_of": 3, "temperature": 1.0},
        {"best_of": 1, "cache_ttl": INF},
    ],
)
def test_sampling_takes_the_edges_of_each_range(fields):
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


def test_stop_is_one_string_or_several():
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize("fields", [{"max_batch": 0}, {"kv_memory": 0.0}, {"max_context": 1}, {"page_size": 0}])
def test_engine_options_out_of_range(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        EngineConfig(**fields)


@pytest.mark.parametrize("name", sorted(p.stem for p in find_config("decode", "greedy").parent.glob("*.toml")))
def test_every_decode_configuration_says_what_it_sets(name):
    tables = read_toml(find_config("decode", name))
    settings = msgspec.to_builtins(read_settings(name, {}), str_keys=True)
    assert tables
    assert all(settings[table][option] == value for table in tables for option, value in tables[table].items())


def test_a_missing_configuration_lists_those_there_are():
    with pytest.raises(ConfigError, match="creative, greedy"):
        find_config("decode", "gredy")


@pytest.mark.parametrize("content", [b"[sampling", b"\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        read_toml(path)
