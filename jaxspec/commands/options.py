"""Options that commands share: the flags of sampling and engine, the configuration file, and how they add up."""

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import typer

from jaxspec.config import DecodeConfig, EngineConfig, SamplingParams, find_config, read_toml
from jaxspec.errors import ConfigError, RequestError

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Flag(NamedTuple):
    """One command-line option: the type that typer parses, and its help."""

    kind: Any
    help: str


SAMPLING = {
    "temperature": Flag(float, "0 takes the likeliest token; 0.7 to 1.0 varies the text."),
    "top_k": Flag(int, "Draw from the K likeliest tokens only; 0 is off. Example: --top-k 40."),
    "top_p": Flag(float, "Draw from the likeliest tokens that hold this share of probability. Example: --top-p 0.95."),
    "min_p": Flag(float, "Drop tokens less likely than this fraction of the likeliest. Example: --min-p 0.05."),
    "repetition_penalty": Flag(
        float, "Above 1 disfavours tokens of prompt and output. Example: --repetition-penalty 1.1."
    ),
    "frequency_penalty": Flag(float, "Subtracted once for each time a token was written; -2 to 2."),
    "presence_penalty": Flag(float, "Subtracted from every token written before; -2 to 2."),
    "logit_bias": Flag(
        list[str], "Add VALUE to the logit of token ID, as ID:VALUE; may be repeated. Example: --logit-bias 42:-5."
    ),
    "max_tokens": Flag(int, "Tokens to write at most."),
    "min_tokens": Flag(int, "Tokens to write before anything may end the text."),
    "stop": Flag(list[str], "Text that ends the answer and is not shown; may be repeated. Example: --stop END."),
    "stop_token_ids": Flag(list[int], "Token id that ends the answer; may be repeated."),
    "include_stop_str_in_output": Flag(bool, "Show the stop text that ended the answer."),
    "ignore_eos": Flag(bool, "Go on to --max-tokens past the end-of-sequence token."),
    "seed": Flag(int, "Same seed, same text, whatever else runs; a fresh one if not given."),
    "n": Flag(int, "Samples of each prompt."),
    "best_of": Flag(int, "Draw so many samples and show the --n whose tokens are likeliest on average."),
    "logprobs": Flag(int, "Log probabilities of each token and of this many likeliest ones, 0 to 20, in JSON output."),
    "skip_special_tokens": Flag(bool, "Leave special tokens out of the text."),
    "priority": Flag(int, "Place in line: a level lower may overtake up to 64 requests that came before."),
    "cache_salt": Flag(str, "Share cached prefixes only with requests of the same salt."),
    "cache_ttl": Flag(float, "Seconds to keep a prompt in the cache for those that begin alike, needed or not."),
}

ENGINE = {
    "model": Flag(str, "A name in configs/models, a Hugging Face folder, a .gguf file or a hub id."),
    "drafter": Flag(
        str,
        "Who drafts tokens for the model to check: ngram copies from the text, medusa has trained heads, ngram_medusa "
        "both; none decodes plainly.",
    ),
    "draft_tokens": Flag(int, "Tokens drafted a round at most, in a chain or a tree; 7, or what suits the heads."),
    "draft_adaptive": Flag(bool, "Draft fewer, or none, where a request's own drafts keep being rejected."),
    "draft_temperature": Flag(
        float, "Temperature of drafts that are drawn where the request has one; the request's if not given."
    ),
    "verify": Flag(
        str,
        "rejection accepts most; coupled keeps a seed's text that of plain decoding; auto: as the drafter needs; "
        "typical, for medusa, is not exact.",
    ),
    "draft_model": Flag(str, "draft_model: the model that drafts, given like --model; of the same vocabulary."),
    "draft_layers": Flag(int, "layer_skip: first layers of the model that draft; a third of them if not given."),
    "medusa_heads": Flag(str, "medusa: folder or file of the heads; those that come with the model if not given."),
    "ngram_max": Flag(int, "ngram: look up where up to this many of the last tokens stood before."),
    "ngram_min": Flag(int, "ngram: draft nothing where fewer than this many of the last tokens stood before."),
    "weights": Flag(
        str,
        "float32, bfloat16, int8, int4, int4_symmetric, fp8 or fp8_block; auto is what a quantised checkpoint holds, "
        "else float32 on the CPU, bfloat16 elsewhere.",
    ),
    "kv_dtype": Flag(
        str,
        "Format of the key/value cache: float32, bfloat16, int8, fp8 or int4; auto is float32 on the CPU, bfloat16 "
        "elsewhere.",
    ),
    "kv_policy": Flag(
        str,
        "What stays in the cache: full, all of it; window, the last tokens; sinks, the first few besides "
        "(StreamingLLM), for texts without end; h2o, the last and those that others looked at most.",
    ),
    "kv_window": Flag(
        int, "window, sinks: tokens that one sees, itself and those just before it; h2o: last tokens that stay."
    ),
    "kv_heavy": Flag(int, "h2o: tokens that stay because others looked at them, in each head of each layer its own."),
    "kv_sinks": Flag(int, "sinks: tokens at the beginning that all see."),
    "kv_positions": Flag(str, "sinks: how far away the first tokens seem, by their place in the cache or the text."),
    "max_batch": Flag(int, "Samples decoded at once."),
    "max_context": Flag(
        int,
        "Tokens of prompt and output together at most; the model's own if not given; more with --kv-policy window or "
        "sinks.",
    ),
    "kv_memory": Flag(float, "GiB of memory for the key/value cache, on each device."),
    "prefill_chunk": Flag(int, "Prompt tokens written between two rounds; running answers pause no longer than that."),
    "prefix_cache": Flag(bool, "Keep what was computed for requests that begin alike."),
    "offload_memory": Flag(
        float, "GiB of the host's memory for cache that does not fit: it comes back faster than it is computed."
    ),
    "offload_disk": Flag(float, "GiB of files for the same, which later runs of the same model find again."),
    "offload_folder": Flag(str, "Where these files are; pages in the cache folder if not given."),
    "page_size": Flag(
        int, "Tokens a cache page; if not given 64 on the CPU, elsewhere 128, or 256 where the cache is int8 or fp8."
    ),
    "tensor_parallel": Flag(int, "Devices that share the model; of a CPU, JAX_NUM_CPU_DEVICES says how many it is."),
    "data_parallel": Flag(int, "Replicas of the model, each on --tensor-parallel devices of its own."),
    "draft_parallel": Flag(str, "draft_model: sharded over the devices as the model is, or replicated on each."),
    "distributed": Flag(
        str,
        "Several processes that all run this command: auto (Slurm, Kubernetes, TPU pods), or "
        "HOST:PORT,PROCESSES,INDEX with the address of process 0. Example: --distributed 10.0.0.1:8476,2,0",
    ),
    "implementation": Flag(
        str, "Of attention: pallas (kernels for TPUs; interpreted, so very slow, on a CPU), xla, or auto."
    ),
}

ConfigOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.toml",
        help="Options from configs/decode/NAME.toml or a file of your own; flags win. Example: --config creative",
    ),
]


METAVARS = {float: "X", int: "N", str: "TEXT", bool: " ", list[int]: "N", list[str]: "TEXT"}


def _parameters(flags: dict[str, Flag], defaults: msgspec.Struct, panel: str) -> list[inspect.Parameter]:
    """One keyword parameter a flag. Its value is None where the flag was not given: a configuration may then decide."""
    found = []
    for name, flag in flags.items():
        default = getattr(defaults, name)
        told = "" if default is None or default in ([], {}) else f" Default: {str(default).lower()}."
        option = typer.Option(help=flag.help + told, metavar=METAVARS[flag.kind], rich_help_panel=panel)
        annotation = Annotated[flag.kind | None, option]
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return found


def with_engine_and_sampling(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Give a command `**options` a flag for every field of SamplingParams and EngineConfig.

    A parameter that the command declares itself stands in for the flag of that name.
    """

    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> int | None:
        return command(*args, **options)

    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    flags = [
        *_parameters(SAMPLING, SamplingParams(), "Sampling"),
        *_parameters(ENGINE, EngineConfig(), "Model, drafting and memory"),
    ]
    declared = {p.name for p in own}
    added = [p for p in flags if p.name not in declared]
    wrapped.__signature__ = inspect.Signature([*own, *added])  # pyright: ignore[reportAttributeAccessIssue]
    wrapped.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
    return wrapped


def read_settings(config: str | None, options: dict[str, Any], **defaults: Any) -> DecodeConfig:
    """Flags over the configuration over a command's own defaults over those of all.

    Raises ConfigError or RequestError for what cannot work.
    """
    engine, sampling = _given(ENGINE, defaults), _given(SAMPLING, defaults)
    if config is not None:
        path = Path(config) if config.endswith(".toml") else find_config("decode", config)
        own_engine, own_sampling = _read_config(path)
        engine, sampling = engine | own_engine, sampling | own_sampling
    engine |= _given(ENGINE, options)
    sampling |= _given(SAMPLING, options)
    if isinstance(sampling.get("logit_bias"), list):
        sampling["logit_bias"] = dict(_bias(text) for text in sampling["logit_bias"])
    return DecodeConfig(engine=checked(engine, EngineConfig), sampling=checked(sampling, SamplingParams))


def _given(flags: dict[str, Flag], options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in flags if options.get(name) not in (None, [])}


def _bias(text: str) -> tuple[int, float]:
    token, colon, value = text.partition(":")
    try:
        if colon:
            return int(token), float(value)
    except ValueError:
        pass
    raise ConfigError(f"--logit-bias takes ID:VALUE, such as 42:-5, not {text!r}")


def _read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    tables = read_toml(path)
    try:
        _refuse_unknown(tables, DecodeConfig)
        for name, kind in (("engine", EngineConfig), ("sampling", SamplingParams)):
            if not isinstance(tables.setdefault(name, {}), dict):
                raise ConfigError(f"{name} must be a table: [{name}]")
            checked(tables[name], kind)
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return tables["engine"], tables["sampling"]


def checked(fields: dict[str, Any], kind: type[Struct]) -> Struct:
    """The struct with these fields. Raises ConfigError or RequestError that names the field and the trouble."""
    _refuse_unknown(fields, kind)
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $.")
        raise ConfigError(f"{where}: {what[:1].lower()}{what[1:]}") from error


def _refuse_unknown(fields: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    known = kind.__struct_fields__
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r} ({hint})")
