"""GGUF files: every tensor type against the gguf package's own reader, the header against any damage."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec.errors import LoadError
from jaxspec.models.loading import load_model
from jaxspec.models.loading.gguf import GGUFFile, read_header

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 470}
"""Rows that are whole blocks of every type."""


def _expected(path: Path, fused: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters by gguf's reader and dequantiser, with llama.cpp's row order of Q and K undone."""
    back = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output.": "lm_head.",
        "blk.": "model.layers.",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    back |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    back |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    d = config["hidden_size"] // config["num_attention_heads"]
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            values = values.reshape(-1, d // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        name = tensor.name
        for old, new in sorted(back.items(), key=lambda pair: -len(pair[0])):
            if old in name:
                name = name.replace(old, new)
                break
        if name.startswith("blk."):
            name = name.replace("blk.", "model.layers.")
        tensors[name] = values
    return fused(tensors, config)


def _random_blocks(tensors: dict[str, np.ndarray], kind: Kind) -> dict[str, np.ndarray]:
    """Matrices as random blocks of a type; the mask keeps every half-precision scale in them finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    return {
        name: tensor
        if tensor.ndim == 1
        else rng.integers(0, 256, (len(tensor), tensor.shape[1] // block * size), np.uint8) & np.uint8(0x3B)
        for name, tensor in tensors.items()
    }


QUANTISED = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
BLOCKS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS]


@pytest.mark.parametrize("kind", QUANTISED + BLOCKS, ids=lambda kind: kind.name)
def test_types(kind: Kind, gguf_file: Any, tiny_config: Any, random_tensors: Any, fused: Any) -> None:
    config = tiny_config | WIDE
    tensors = random_tensors(config)
    path = gguf_file(tensors if kind in QUANTISED else _random_blocks(tensors, kind), kind, **WIDE)
    expected = _expected(path, fused, config)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    params = load_model(str(path)).params
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("kind", [Kind.F64, Kind.I32, Kind.Q8_K], ids=lambda kind: kind.name)
def test_types_without_a_dequantiser_are_named(
    kind: Kind, gguf_file: Any, tiny_config: Any, random_tensors: Any
) -> None:
    path = gguf_file(_random_blocks(random_tensors(tiny_config | WIDE), kind), kind, **WIDE)
    with pytest.raises(LoadError, match=rf"tensor \S+\.weight is of type {kind.name}, which cannot be dequantised"):
        load_model(str(path))


@pytest.fixture
def plain(gguf_file: Any, tiny_config: Any, random_tensors: Any) -> Path:
    return gguf_file(random_tensors(tiny_config))


def _end(file: GGUFFile) -> int:
    return max(tensor.end for tensor in file.tensors.values())


def test_header_equals_that_of_the_gguf_package(gguf_file: Any, tiny_config: Any, random_tensors: Any) -> None:
    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_bool("x.bool", True)
        for i, add in enumerate((writer.add_int8, writer.add_int16, writer.add_int32, writer.add_int64)):
            add(f"x.i{i}", -1 - i)
        for i, add in enumerate((writer.add_uint8, writer.add_uint16, writer.add_uint32, writer.add_uint64)):
            add(f"x.u{i}", 200 + i)
        writer.add_float32("x.f32", 0.1)
        writer.add_float64("x.f64", 0.1)
        writer.add_string("x.text", "naïve ☕")
        writer.add_array("x.floats", [0.5, -1.5])
        writer.add_array("x.bools", [True, False])

    path = gguf_file(random_tensors(tiny_config), Kind.Q8_0, metadata)
    file, reader = read_header(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == fields
    assert len(fields) > 20
    assert {
        name: (list(tensor.shape[::-1]), tensor.kind, tensor.offset, tensor.end - tensor.offset)
        for name, tensor in file.tensors.items()
    } == {
        tensor.name: (tensor.shape.tolist(), tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        for tensor in reader.tensors
    }


def test_any_cut_is_seen(plain: Path, tmp_path: Path) -> None:
    data, file = plain.read_bytes(), read_header(plain)
    start, end = min(tensor.offset for tensor in file.tensors.values()), _end(file)
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, start, 37), *range(start, end, 4099), end - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(LoadError, match=r"cut\.gguf.*(cut short|not a GGUF file)"):
            read_header(cut)
    cut.write_bytes(data[:end])  # only padding is gone
    assert read_header(cut).tensors == file.tensors


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_raises_nothing_else(changes: list[tuple[float, int]], plain: Path, tmp_path: Path) -> None:
    data = bytearray(plain.read_bytes())
    header = min(tensor.offset for tensor in read_header(plain).tensors.values())
    for place, value in changes:
        data[int(place**3 * header)] = value  # more often near the start, where counts and lengths are
    (tmp_path / "damaged.gguf").write_bytes(data)
    try:
        read_header(tmp_path / "damaged.gguf")
    except LoadError as error:
        assert "damaged.gguf" in str(error)  # noqa: PT017 (most damage, not all, can be seen)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"PK\3\4", "does not begin with the letters GGUF"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian file is not supported"),
        (b"GGUF" + struct.pack("<I", 1), "version 1 is not supported"),
        (b"GGUF" + struct.pack("<I", 4), "version 4 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), "damaged or cut short"),
    ],
)
def test_other_files(head: bytes, message: str, plain: Path) -> None:
    plain.write_bytes(head + plain.read_bytes()[len(head) :])
    with pytest.raises(LoadError, match=message):
        load_model(str(plain))


def test_a_file_cut_short_after_its_header_was_read(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = read_header(plain)
    plain.write_bytes(plain.read_bytes()[: file.tensors["output.weight"].offset])
    monkeypatch.setattr("jaxspec.models.loading.gguf.read_header", lambda _: file)
    with pytest.raises(LoadError, match="is cut short: tensor"):
        load_model(str(plain))


def test_two_tensors_of_one_name(plain: Path) -> None:
    plain.write_bytes(plain.read_bytes().replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(LoadError, match="two tensors of one name"):
        read_header(plain)


def test_version_2(plain: Path) -> None:
    data = bytearray(plain.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    before = load_model(str(plain)).params
    plain.write_bytes(data)
    jax.tree.map(np.testing.assert_array_equal, load_model(str(plain)).params, before)


Metadata = Callable[[gguf.GGUFWriter], object]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN) or w.add_rope_scaling_factor(4.0), "type 'yarn'"),
        (lambda w: w.add_expert_count(8), r"mixture-of-experts models are not supported \(8 experts\)"),
        (lambda w: w.add_key_length(8) or w.add_rope_dimension_count(4), "partial_rotary_factor 4 of 8"),
    ],
)
def test_settings_that_cannot_be_served(
    metadata: Metadata, message: str, gguf_file: Any, tiny_config: Any, random_tensors: Any
) -> None:
    with pytest.raises(LoadError, match=message):
        load_model(str(gguf_file(random_tensors(tiny_config), metadata=metadata)))


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR) or w.add_rope_scaling_factor(4.0), 4),
        (lambda w: w.add_rope_scaling_factor(4.0), 4),
        (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), 2),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE) or w.add_rope_scaling_factor(4.0), 1),
        (lambda w: w.add_rope_dimension_count(8), 1),
    ],
)
def test_rope_scaling(metadata: Metadata, factor: int, gguf_file: Any, tiny_config: Any, random_tensors: Any) -> None:
    model = load_model(str(gguf_file(random_tensors(tiny_config), metadata=metadata)))
    np.testing.assert_allclose(model.spec.inv_freq, 10000.0 ** (-np.arange(4) / 4) / factor, rtol=1e-6)


def test_rope_factors(gguf_file: Any, tiny_config: Any, random_tensors: Any) -> None:
    """Llama 3.1's scaling comes as a tensor."""
    factors = np.array([1, 2, 4, 8], np.float32)
    model = load_model(
        str(
            gguf_file(
                {"rope_freqs.weight": factors} | random_tensors(tiny_config),
                metadata=lambda w: w.add_rope_freq_base(5e5),
            )
        )
    )
    np.testing.assert_allclose(model.spec.inv_freq, 5e5 ** (-np.arange(4) / 4) / factors, rtol=1e-6)


@pytest.mark.parametrize("factors", [[1, 2, 4], [1, 2, 0, 8]])
def test_rope_factors_that_do_not_fit(
    factors: list[int], gguf_file: Any, tiny_config: Any, random_tensors: Any
) -> None:
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)} | random_tensors(tiny_config)
    with pytest.raises(LoadError, match=r"rope_freqs\.weight does not hold 4 factors"):
        load_model(str(gguf_file(tensors)))


def test_an_unexpected_tensor(gguf_file: Any, tiny_config: Any, random_tensors: Any) -> None:
    tensors = random_tensors(tiny_config) | {"blk.0.extra.weight": np.ones(3, np.float32)}
    with pytest.raises(LoadError, match=r"blk\.0\.extra\.weight is unexpected"):
        load_model(str(gguf_file(tensors)))


def test_a_missing_setting(plain: Path) -> None:
    plain.write_bytes(plain.read_bytes().replace(b"llama.embedding_length", b"llama.embedding_lengtX"))
    with pytest.raises(LoadError, match="hidden_size"):
        load_model(str(plain))


def test_no_architecture(plain: Path) -> None:
    plain.write_bytes(plain.read_bytes().replace(b"general.architecture", b"general.architecturX"))
    with pytest.raises(LoadError, match=r"general\.architecture is missing"):
        load_model(str(plain))
