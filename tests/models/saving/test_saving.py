"""What `convert` writes loads again as it was: every array bit for bit, spec, tokenizer. Or there is nothing."""

import json
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from jaxspec.errors import ConfigError, JaxspecError, LoadError
from jaxspec.models import saving
from jaxspec.models.loading import load_model
from jaxspec.models.quantization import scheme_names
from jaxspec.models.saving import convert, leaves
from jaxspec.models.saving.leaves import Leaf

LAYOUTS = saving.LAYOUTS
VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "num_key_value_heads": 8},
    {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
]


def name_of(changes: dict[str, Any]) -> str:
    return "-".join(changes) or "plain"


def assert_bits_equal(found: Any, expected: Any) -> None:
    """Also where numbers would compare equal: the type, the sign of a zero."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for mine, theirs in ((np.asarray(one), np.asarray(other)) for one, other in pairs):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.tobytes() == theirs.tobytes()


def assert_loads_as(written: Path, source: Path, weights: str = "float32") -> None:
    ours, theirs = (load_model(str(path), weights, packed=True) for path in (written, source))
    assert_bits_equal(ours.params, theirs.params)
    assert ours.spec == theirs.spec
    assert ours.tokenizer.vocabulary == theirs.tokenizer.vocabulary
    for name in ("bos_id", "eos_ids", "special_ids", "chat_template"):
        assert getattr(ours.tokenizer, name) == getattr(theirs.tokenizer, name)
    text = "the sea <|im_start|> é 12"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", VARIANTS, ids=name_of)
def test_a_folder(layout: str, changes: dict[str, Any], folder: Any, tmp_path: Path) -> None:
    source = folder(**changes)
    convert(str(source), tmp_path / "out", layout)
    assert_loads_as(tmp_path / "out", source)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", VARIANTS, ids=name_of)
def test_a_gguf_file(
    layout: str, changes: dict[str, Any], gguf_file: Any, tiny_config: Any, random_tensors: Any, tmp_path: Path
) -> None:
    source = gguf_file(random_tensors(tiny_config | changes), **changes)
    convert(str(source), tmp_path / "out", layout)
    assert_loads_as(tmp_path / "out", source)


def test_from_layout_to_layout_and_back(folder: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path) -> None:
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in random_tensors(tiny_config).items()}
    source = folder(tensors)
    for step, layout in enumerate(("orbax", "orbax", "safetensors")):
        path = tmp_path / f"out-{step}"
        convert(str(source), path, layout)
        source = path
    assert_bits_equal(load_file(source / "model.safetensors"), tensors)


def test_safetensors_are_those_of_the_checkpoint(
    folder: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path
) -> None:
    tensors = random_tensors(tiny_config)
    written = convert(str(folder(tensors)), tmp_path / "out")
    assert_bits_equal(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert written == (len(tensors), sum(tensor.nbytes for tensor in tensors.values()), ("float32",))


def test_orbax_restores_the_tree(
    folder: Any, random_tensors: Any, tiny_config: Any, fused: Any, tmp_path: Path
) -> None:
    tensors = random_tensors(tiny_config)
    convert(str(folder(tensors)), tmp_path / "out", "orbax")
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "out" / "params")
    assert_bits_equal(jax.tree.leaves(restored), jax.tree.leaves(fused(tensors, tiny_config)))


# Types.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
def test_auto_keeps_the_type(
    layout: str, stored: Any, folder: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path
) -> None:
    source = folder({name: tensor.astype(stored) for name, tensor in random_tensors(tiny_config).items()})
    assert convert(str(source), tmp_path / "out", layout).types == (np.dtype(stored).name,)
    assert_loads_as(tmp_path / "out", source)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == np.dtype(stored).name


def test_auto_keeps_the_type_of_each_tensor(folder: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config)
    kinds = {"norm.weight": np.float64, "q_proj.weight": np.float16, "mlp": np.float32}
    for name, tensor in tensors.items():
        kind = next((kind for part, kind in kinds.items() if part in name), jnp.bfloat16)
        tensors[name] = tensor.astype(kind)
    convert(str(folder(tensors)), tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        # Queries, keys and values are one array, which float32 alone can hold; float64 is never of use.
        narrow = tensors[name].dtype == jnp.bfloat16 and "self_attn.k" not in name and "self_attn.v" not in name
        assert tensor.dtype == (jnp.bfloat16 if narrow else np.float32)
        np.testing.assert_array_equal(tensor, tensors[name].astype(np.float32).astype(tensor.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_type_of_choice(layout: str, weights: str, folder: Any, tmp_path: Path) -> None:
    source = folder()
    assert convert(str(source), tmp_path / "out", layout, weights).types == (weights,)
    convert(str(tmp_path / "out"), tmp_path / "again", layout)
    assert_loads_as(tmp_path / "again", source, weights)


@pytest.mark.parametrize("scheme", scheme_names())
def test_quantised(scheme: str, folder: Any, tmp_path: Path) -> None:
    source = folder(attention_bias=True, num_hidden_layers=1)
    expected = load_model(str(source), scheme, packed=True)
    for layout in LAYOUTS:
        written = convert(str(source), tmp_path / layout, layout, scheme)
        assert {"int8", "uint8", "float8_e4m3fn"} & set(written.types)
        convert(str(tmp_path / layout), tmp_path / f"again-{layout}", LAYOUTS[layout == "safetensors"])
        for name in (layout, f"again-{layout}"):
            found = load_model(str(tmp_path / name), packed=True)
            assert_bits_equal(found.params, expected.params)
            assert found.spec == expected.spec


def test_a_quantised_folder_says_how(folder: Any, tmp_path: Path) -> None:
    written = convert(str(folder(intermediate_size=1024)), tmp_path / "out", weights="int8")
    assert written.types == ("int8", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "jaxspec", "weights": "int8"}
    assert config["torch_dtype"] == "float32"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("self_attn.k_proj", "mlp.up_proj"):
        values, scale = (tensors[f"model.layers.1.{name}.weight{suffix}"] for suffix in ("", "_scale"))
        assert (values.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, values.shape[:1])
    with pytest.raises(ConfigError, match="out holds int8 weights: ask for these or auto, not float32"):
        convert(str(tmp_path / "out"), tmp_path / "again", weights="float32")
    assert not (tmp_path / "again").exists()


# Files.


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_shards(weights: str, folder: Any, random_tensors: Any, tiny_config: Any, tmp_path: Path) -> None:
    source = folder()
    limit = 40_000  # the embedding is larger
    convert(str(source), tmp_path / "out", weights=weights, max_shard=limit / saving.GB)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    held = {file: load_file(tmp_path / "out" / file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    sizes = {file: [tensor.nbytes for tensor in tensors.values()] for file, tensors in held.items()}
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert all(sum(of) <= limit or len(of) == 1 for of in sizes.values())
    assert_loads_as(tmp_path / "out", source, "float32" if weights == "auto" else weights)


def test_tensors_lie_at_multiples_of_their_width(folder: Any, tmp_path: Path) -> None:
    """torch maps the file and cannot view it otherwise. An odd number of int8 values would push float32 ones aside."""
    odd = {"hidden_size": 6, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 33}
    convert(str(folder(**odd)), tmp_path / "out", weights="int8")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    width = {"F32": 4, "I8": 1}
    assert all(entry["data_offsets"][0] % width[entry["dtype"]] == 0 for entry in header.values())


def test_the_text_files_of_a_folder_are_copied(folder: Any, tmp_path: Path) -> None:
    source = folder()
    texts = {
        "tokenizer_config.json": '{"eos_token":  "<|im_end|>", "legacy": true}',
        "chat_template.jinja": "{{ messages[0].content }}\n",
        "generation_config.json": '{"eos_token_id": [2, 0], "temperature": 0.6}',
    }
    for name, text in texts.items():
        (source / name).write_text(text)
    for name in ("README.md", "pytorch_model.bin", "optimizer.json"):
        (source / name).write_text("{}")
    convert(str(source), tmp_path / "out")
    for name in (*texts, "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (source / name).read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *texts, "tokenizer.json", "config.json", "model.safetensors"
    }  # fmt: skip
    assert_loads_as(tmp_path / "out", source)


def test_config_keeps_what_it_said(folder: Any, tmp_path: Path) -> None:
    source = folder(dtype="float16", transformers_version="5.0", rope_scaling={"type": "linear", "factor": 2.0})
    convert(str(source), tmp_path / "out", weights="bfloat16")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    assert before.pop("dtype") == "float16"
    assert after == before | {"torch_dtype": "bfloat16"}


# GGUF files and RoPE.


def test_a_scaled_rope(gguf_file: Any, tiny_config: Any, random_tensors: Any, tmp_path: Path) -> None:
    source = gguf_file(random_tensors(tiny_config), metadata=lambda w: w.add_rope_scaling_factor(4.0))
    convert(str(source), tmp_path / "out")
    assert_loads_as(tmp_path / "out", source)


def llama3_factors(dim: int, theta: float, factor: float) -> np.ndarray:
    """What the converter of llama.cpp writes for Llama 3.1 and later."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = (8192 / wavelength - 1) / (4 - 1)
    blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < 8192 / 4, 1, np.where(wavelength > 8192, factor, blended)).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors(factor: float, gguf_file: Any, tiny_config: Any, random_tensors: Any, tmp_path: Path) -> None:
    factors = llama3_factors(64, 5e5, factor)
    assert len({1, factor, *factors.tolist()}) > 3
    tensors = {"rope_freqs.weight": factors} | random_tensors(tiny_config | {"head_dim": 64})
    source = gguf_file(tensors, metadata=lambda w: w.add_rope_freq_base(5e5), head_dim=64)
    convert(str(source), tmp_path / "out")
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert (rope["rope_type"], rope["factor"]) == ("llama3", factor)
    ours, theirs = (load_model(str(path)) for path in (tmp_path / "out", source))
    np.testing.assert_allclose(ours.spec.inv_freq, theirs.spec.inv_freq, rtol=3e-7)
    assert_bits_equal(ours.params, theirs.params)


def test_other_factors_are_refused(gguf_file: Any, tiny_config: Any, random_tensors: Any, tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)} | random_tensors(tiny_config)
    with pytest.raises(LoadError, match=r"model\.gguf: its RoPE factors are not those of Llama 3\.1"):
        convert(str(gguf_file(tensors)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


# What goes wrong leaves nothing behind.


@pytest.fixture
def untouched(folder: Any, tmp_path: Path) -> Any:
    """A model, and a folder to write to, which must be empty in the end."""
    place = tmp_path / "place"
    place.mkdir()
    yield str(folder()), place / "out"
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "pickle"}, "format must be safetensors or orbax, not 'pickle'"),
        ({"weights": "int3"}, "weights must be auto, float32, .* or int8, not 'int3'"),
        ({"max_shard": 0.0}, "larger than 0 GB, not 0.0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str, untouched: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(*untouched, **options)


def test_a_destination_that_exists(folder: Any, tmp_path: Path) -> None:
    source = folder()
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "model"):
        with pytest.raises(ConfigError, match=rf"/{name} exists already"):
            convert(str(source), tmp_path / name)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_destination_in_no_folder(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*/none/out: there is no folder .*/none$"):
        convert(str(folder()), tmp_path / "none" / "out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_source(layout: str, folder: Any, untouched: Any) -> None:
    source = Path(untouched[0])
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged"):
        convert(*untouched, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("error", [LoadError("torn"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way(layout: str, error: BaseException, untouched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def read(self: Leaf, advance: Callable[[int], None]) -> Leaf:
        def fail_at_the_fifth() -> np.ndarray:
            reads.append(self)
            if len(reads) == 5:
                raise error
            return self.read()

        return Leaf(self.parameter, self.dtype, fail_at_the_fifth)

    monkeypatch.setattr(Leaf, "counted", read)
    expected = JaxspecError if isinstance(error, OSError) else type(error)
    message = "cannot write .*/place/out: No space left" if isinstance(error, OSError) else str(error) or None
    with pytest.raises(expected, match=message):
        convert(*untouched, layout)
    assert len(reads) == 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_takes_no_more(layout: str, untouched: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(JaxspecError, match=r"cannot write .*/place/out: .*[Ff]ile too large") as caught:
            convert(*untouched, layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)


# Memory and progress.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_memory_holds_one_matrix(
    layout: str, weights: str, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[np.ndarray]] = []

    def watched(reader: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*args: Any) -> Any:
            alive = [array.shape for array in (reference() for reference in read) if array is not None]
            assert len(alive) <= (3 if weights == "int8" else 1)  # values and scale, and a norm or the embedding
            found = reader(*args)
            read.extend(map(weakref.ref, jax.tree.leaves(found)))
            return found

        return reading

    for name in ("read_array", "read_quantised"):
        monkeypatch.setattr(leaves, name, watched(getattr(leaves, name)))
    convert(str(folder()), tmp_path / "out", layout, weights)
    assert len(read) == len(jax.tree.leaves(load_model(str(tmp_path / "out"), packed=True).params))


def test_a_bar_shows_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("jaxspec.models.loading.stream.QUIET_SECONDS", 0.0)
    source = str(folder())
    convert(source, tmp_path / "silent")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    convert(source, tmp_path / "out")
    shown = capsys.readouterr()
    assert "Writing weights" in shown.err
    assert shown.out == ""
