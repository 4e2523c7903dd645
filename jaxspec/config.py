"""Frozen configuration: what a request may choose, and what an engine is built with. No jax here."""

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from jaxspec.errors import ConfigError, RequestError

DRAFT_TOKENS = 7
"""Tokens drafted a round where a configuration does not say."""
MAX_NODES = 63
"""Nodes of a draft tree: two ancestor words, less the root."""
MIN_TEMPERATURE = 1e-6
PREFILL_ROW = 64
"""Prompt tokens that attend together."""
MAX_STOP_IDS = 32
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one request draws its tokens. Names follow vLLM's; every field may differ within one batch.

    Filters act in the order penalties and bias, temperature, top_k, top_p, min_p, in float32; tokens that tie
    with the last one kept are kept. Raises RequestError when a value is out of range.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least this, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in prompt or output; above 0 (CTRL)."""
    frequency_penalty: float = 0.0
    """Subtract this times a token's count in the output; in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtract this from every token already in the output; in [-2, 2]."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    max_tokens: int = 256
    """Tokens to generate at most; also bounded by the model's context."""
    min_tokens: int = 0
    """No end of sequence, stop id or stop string ends the text before this many tokens."""
    stop: list[str] | str = []
    """Strings that end the text; they are not part of it."""
    stop_token_ids: list[int] = []
    """Further token ids that end the text."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    """Same seed, same text, whatever else is in the batch. None draws a fresh seed for each request."""
    n: int = 1
    """Samples of this prompt."""
    best_of: int | None = None
    """Draw so many samples and give the n whose tokens have the highest mean log probability by the model's own
    distribution, best first; it needs a temperature. None draws n and gives them all."""
    logprobs: int | None = None
    """Log probabilities of each emitted token and of this many likeliest ones, of the model's own distribution."""
    skip_special_tokens: bool = True
    priority: int = 0
    """A request may be overtaken by at most 64 later ones for each level that theirs is lower."""
    cache_salt: str = ""
    """Cached prefixes are shared between requests of the same salt only."""
    cache_ttl: float | None = None
    """Seconds for which the whole pages of this prompt stay in the prefix cache once it is written; None keeps them
    until the room is needed."""

    def __post_init__(self) -> None:
        for ok, what in self._checks():
            if not ok:
                raise RequestError(what)

    def _checks(self) -> list[tuple[bool, str]]:
        return [
            (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, not {self.temperature}",
            ),
            (self.top_k >= -1, f"top_k must be 0 (off) or more, not {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}"),
            (
                0 < self.repetition_penalty < float("inf"),
                f"repetition_penalty must be above 0, not {self.repetition_penalty}",
            ),
            (-2 <= self.frequency_penalty <= 2, f"frequency_penalty must be in [-2, 2], not {self.frequency_penalty}"),
            (-2 <= self.presence_penalty <= 2, f"presence_penalty must be in [-2, 2], not {self.presence_penalty}"),
            (self.max_tokens >= 1, f"max_tokens must be 1 or more, not {self.max_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must be 0 or more, not {self.min_tokens}"),
            (
                self.min_tokens <= self.max_tokens,
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
            ),
            (all(self.stop_strings), "stop must not hold an empty string"),
            (all(i >= 0 for i in self.stop_token_ids), "stop_token_ids must be 0 or more"),
            (
                len(self.stop_token_ids) <= MAX_STOP_IDS - 8,
                f"at most {MAX_STOP_IDS - 8} stop_token_ids, not {len(self.stop_token_ids)}",
            ),
            (len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} logit_bias entries"),
            (all(i >= 0 for i in self.logit_bias), "logit_bias token ids must be 0 or more"),
            (all(math.isfinite(v) for v in self.logit_bias.values()), "logit_bias must be finite"),
            (
                self.seed is None or -(2**63) <= self.seed < 2**64,
                f"seed must fit in 64 bits, not {self.seed}",
            ),
            (abs(self.priority) < 2**31, f"priority must fit in 32 bits, not {self.priority}"),
            (self.n >= 1, f"n must be 1 or more, not {self.n}"),
            (
                self.best_of is None or self.best_of >= self.n,
                f"best_of must be n ({self.n}) or more, not {self.best_of}",
            ),
            (
                self.temperature > 0 or self.best_of in (None, 1),
                f"best_of {self.best_of} of a greedy request are all the same: set a temperature or leave best_of out",
            ),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must be 0 to {MAX_LOGPROBS}, not {self.logprobs}",
            ),
            (
                self.cache_ttl is None or self.cache_ttl > 0,
                f"cache_ttl must be above 0 seconds, not {self.cache_ttl}",
            ),
        ]

    @property
    def samples(self) -> int:
        """Samples that are drawn: all of them, also those that `best_of` leaves out."""
        return self.best_of or self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine is built with. Raises ConfigError when a value is out of range."""

    model: str = "smollm2-135m"
    """A name in configs/models, a Hugging Face folder, a .gguf file, or a hub id."""
    drafter: str = "none"
    """A file in jaxspec/drafters: none decodes plainly."""
    draft_tokens: int | None = None
    """Tokens drafted a round at most, in a chain or a tree. None is 7, or for heads what was found fastest."""
    draft_adaptive: bool = True
    """Draft fewer, or none, where a request's own drafts keep being rejected."""
    draft_temperature: float | None = None
    """Drafts that are drawn: their temperature where the request has one; None is the request's own."""
    verify: str = "auto"
    """rejection: most drafts are accepted; coupled: a seed gives the text of plain decoding; auto: rejection where a
    drafter draws its drafts, as models do, else coupled. Both are exact. typical, for heads: any likely draft is
    accepted, which is NOT exact (Medusa)."""
    draft_model: str | None = None
    """draft_model: the model that drafts, given like `model`; it must have the same vocabulary."""
    draft_layers: int | None = None
    """layer_skip: first layers of the target that draft; None is a third of them."""
    medusa_heads: str | None = None
    """medusa, ngram_medusa: folder or file of the heads; None is those that come with the model, in configs/medusa."""
    ngram_max: int = 4
    """ngram: tokens that a match has at most."""
    ngram_min: int = 2
    """ngram: tokens that a match needs."""
    weights: str = "auto"
    """auto | float32 | bfloat16, or a file in jaxspec/models/quantization; auto is what a quantised checkpoint holds,
    else float32 on the CPU and bfloat16 elsewhere."""
    kv_dtype: str = "auto"
    """A file in jaxspec/kv/formats; auto is float32 on the CPU and bfloat16 elsewhere."""
    kv_policy: str = "full"
    """A file in jaxspec/kv/policies. full: every token sees all before it. window: the last ones only; sinks: the first
    few besides (StreamingLLM); h2o: the last ones and those that others looked at most, in each head its own. Then
    pages that no token will see go back while the request runs."""
    kv_window: int = 1024
    """window, sinks: tokens that one sees, itself and those just before it; h2o: last tokens that stay."""
    kv_heavy: int = 1024
    """h2o: tokens that stay for having been looked at. A text goes down to these and kv_window once it is a page longer
    than that."""
    kv_sinks: int = 4
    """sinks: tokens at the beginning that all see."""
    kv_positions: str = "cache"
    """sinks: how far away the first tokens seem. cache: as if what lies between them and the window had never been;
    text: as far as they are."""
    max_batch: int = 8
    """Sequences decoded at once."""
    max_context: int | None = None
    """Prompt and output tokens of one request at most; None is the model's own context. With kv_policy window or sinks
    it may be longer, for as long as no token sees more than that."""
    kv_memory: float = 1.0
    """GiB for the key/value pool, on each device."""
    prefill_chunk: int = 256
    """Prompt tokens written between two rounds at most: running requests wait no longer than for these."""
    prefix_cache: bool = True
    """Keep the pages of finished and running texts for requests that begin alike."""
    offload_memory: float = 0.0
    """GiB of the host's memory, for each replica, for pages that the prefix cache has to give up; 0 is none."""
    offload_disk: float = 0.0
    """GiB of files for them, which a later engine with the same model finds again; 0 is none."""
    offload_folder: str | None = None
    """Where the files are; None is pages in the cache folder."""
    page_size: int | None = None
    """Token slots a page; None is 64 on the CPU, elsewhere 128, or 256 of 8-bit numbers."""
    implementation: str = "auto"
    """Of attention: pallas (kernels, on TPUs), xla (any device), or auto: pallas on TPUs, else xla."""
    tensor_parallel: int = 1
    """Devices that share the model: heads, MLP, vocabulary and cache."""
    data_parallel: int = 1
    """Replicas of the model, with tensor_parallel devices and kv_memory of their own each."""
    draft_parallel: str = "sharded"
    """draft_model: the devices have a share of its layers each (sharded), or all of them (replicated)."""
    distributed: str | None = None
    """A job of several processes that run the same command: auto (Slurm, Kubernetes, TPU pods) or, for each process,
    HOST:PORT,PROCESSES,INDEX with the address of process 0, which leads. tensor_parallel counts the devices of all."""
    seed: int | None = None
    """Base of the seeds drawn for requests that bring none; None takes it from the operating system."""

    def __post_init__(self) -> None:
        for ok, what in (
            (self.max_batch >= 1, f"max_batch must be 1 or more, not {self.max_batch}"),
            (
                self.draft_tokens is None or 1 <= self.draft_tokens <= MAX_NODES,
                f"draft_tokens must be 1 to {MAX_NODES}, not {self.draft_tokens}",
            ),
            (
                self.draft_temperature is None or MIN_TEMPERATURE <= self.draft_temperature < float("inf"),
                f"draft_temperature must be at least {MIN_TEMPERATURE}, not {self.draft_temperature}",
            ),
            (
                self.verify in ("auto", "coupled", "rejection", "typical"),
                f"verify must be auto, coupled, rejection or typical, not {self.verify!r}",
            ),
            (
                self.implementation in ("auto", "pallas", "xla"),
                f"implementation must be auto, pallas or xla, not {self.implementation!r}",
            ),
            (
                1 <= self.ngram_min <= self.ngram_max,
                f"ngram_min must be 1 to ngram_max, not {self.ngram_min} of {self.ngram_max}",
            ),
            (
                self.draft_layers is None or self.draft_layers >= 1,
                f"draft_layers must be 1 or more, not {self.draft_layers}",
            ),
            (self.tensor_parallel >= 1, f"tensor_parallel must be 1 or more, not {self.tensor_parallel}"),
            (self.data_parallel >= 1, f"data_parallel must be 1 or more, not {self.data_parallel}"),
            (
                self.distributed is None or self.data_parallel == 1,
                "data_parallel needs one process: of several processes, run a job for each replica",
            ),
            (
                self.draft_parallel in ("sharded", "replicated"),
                f"draft_parallel must be sharded or replicated, not {self.draft_parallel!r}",
            ),
            (self.kv_window >= 1, f"kv_window must be 1 or more, not {self.kv_window}"),
            (self.kv_heavy >= 1, f"kv_heavy must be 1 or more, not {self.kv_heavy}: kv_policy window has none"),
            (self.kv_sinks >= 1, f"kv_sinks must be 1 or more, not {self.kv_sinks}: kv_policy window has none"),
            (
                self.kv_positions in ("cache", "text"),
                f"kv_positions must be cache or text, not {self.kv_positions!r}",
            ),
            (self.kv_memory > 0, f"kv_memory must be above 0 GiB, not {self.kv_memory}"),
            (
                self.max_context is None or 2 <= self.max_context < 2**30,
                f"max_context must be 2 or more and below 2**30, not {self.max_context}",
            ),
            (
                self.prefill_chunk >= 1 and self.prefill_chunk % PREFILL_ROW == 0,
                f"prefill_chunk must be a multiple of {PREFILL_ROW}, not {self.prefill_chunk}",
            ),
            *self._offload_checks(),
            (self.page_size is None or self.page_size >= 1, f"page_size must be 1 or more, not {self.page_size}"),
        ):
            if not ok:
                raise ConfigError(what)

    def _offload_checks(self) -> list[tuple[bool, str]]:
        offloads = self.offload_memory > 0 or self.offload_disk > 0
        return [
            (self.offload_memory >= 0, f"offload_memory must be 0 GiB or more, not {self.offload_memory}"),
            (self.offload_disk >= 0, f"offload_disk must be 0 GiB or more, not {self.offload_disk}"),
            (
                self.offload_folder is None or self.offload_disk > 0,
                "offload_folder is for offload_disk: say how many GiB",
            ),
            (
                not offloads or self.prefix_cache,
                "offload_memory and offload_disk keep pages of the prefix cache, which is off: leave them or that out",
            ),
            (
                not offloads or self.distributed is None,
                "offload_memory and offload_disk need one process: leave them or distributed out",
            ),
            (
                not self.offload_disk or self.data_parallel == 1,
                "offload_disk needs one replica: leave it or data_parallel out, or take offload_memory",
            ),
        ]


class DecodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A configs/decode/NAME.toml file: engine options under [engine], sampling under [sampling]."""

    engine: EngineConfig = EngineConfig()
    sampling: SamplingParams = SamplingParams()


def find_config(kind: str, name: str, suffix: str = ".toml") -> Path:
    """The file configs/KIND/NAME.toml, or of another suffix, or a folder, of the package or the checkout.

    ConfigError lists the names there are.
    """
    here = Path(__file__).resolve().parent
    folder = next((f for f in (here / "configs", here.parent / "configs") if f.is_dir()), here / "configs") / kind
    path = folder / f"{name}{suffix}"
    if not path.exists():
        names = ", ".join(sorted(p.name.removesuffix(suffix) for p in folder.glob(f"*{suffix}"))) or "none"
        raise ConfigError(f"no {kind} config named {name!r} (there are: {names})")
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict. ConfigError when it is missing or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
