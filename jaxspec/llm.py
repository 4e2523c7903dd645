"""The Python door: load a model, generate."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxspec import leading, multihost, parallel
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.host.request import CompletionOutput, RequestOutput
from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.models.loading.wheel import cache_folder
from jaxspec.replicas import Replicas
from jaxspec.sizes import check

Message = dict[str, Any]
Serving = Engine | Replicas
"""What serves requests: an engine, or several as one."""


class LLM:
    """A loaded model that answers prompts.

    `model` is a name in configs/models, a Hugging Face folder, a .gguf file or a hub id; the other options are those of
    `EngineConfig`. Raises ConfigError, LoadError or CapacityError.
    """

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        try:
            config = msgspec.convert({"model": model, **options}, EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine options: {error}") from error
        multihost.join(config.distributed)
        loaded = _load(config)
        self.tokenizer = loaded.tokenizer
        self.engine = _engine(loaded, config)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts of text or token ids; one result a prompt, in order.

        `sampling_params` is one for all or one a prompt; the default is greedy, 256 tokens. `progress` shows a bar
        where stderr is a terminal. Raises RequestError before any work when a prompt cannot be served.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._run(listed, sampling_params, progress, self.engine.add)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; each is a list of {"role", "content"} messages."""
        listed = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self._run(listed, sampling_params, progress, self.engine.add_chat)

    def pin(self, prompt: str | Sequence[int] | Sequence[Message], ttl: float = 3600.0, cache_salt: str = "") -> int:
        """Keep the beginning of prompts to come in the cache, computed now if it is not there, for `ttl` seconds.

        A text, token ids, or the messages that conversations begin with. Prompts with the same `cache_salt` that begin
        with it find it there, however many others come between. Returns how many of its tokens are kept: whole pages
        are. A second pin of the same prefix can only prolong the first; `math.inf` keeps it until `unpin`. Raises
        RequestError where pins would leave too few pages for the largest request there may be.
        """
        params = SamplingParams(max_tokens=1, cache_ttl=ttl, cache_salt=cache_salt)
        engines = self.engine.engines if isinstance(self.engine, Replicas) else [self.engine]
        outputs = [self._run([self._beginning(prompt)], params, False, engine.add)[0] for engine in engines]
        return min(output.stats.pinned_tokens or 0 for output in outputs)

    def unpin(self, prompt: str | Sequence[int] | Sequence[Message], cache_salt: str = "") -> int:
        """Let go of the longest pinned prefix of a prompt; returns how many tokens it had, 0 where there is none."""
        return self.engine.lift(self._beginning(prompt), cache_salt)

    def _beginning(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        """The tokens of a prompt; those of messages end where the next message begins."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        given = list(prompt)
        if given and isinstance(given[0], dict):
            text = self.tokenizer.apply_chat_template(given, add_generation_prompt=False)
            return self.tokenizer.encode(text, add_special_tokens=False)
        return cast(list[int], given)

    def metrics(self) -> dict[str, Any]:
        """How the engine has done since it was made: speed, times, prompt tokens and memory, as `batch --summary` has.

        `Engine.figures` and `Metrics.as_dict` say what each figure is.
        """
        return self.engine.figures()

    def _run(self, prompts: list, params, progress: bool, add: Callable) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(params)} sampling_params: give one, or one a prompt")
        ids = [f"{index}" for index in range(len(prompts))]
        try:
            for request_id, prompt, chosen in zip(ids, prompts, params, strict=True):
                add(request_id, prompt, chosen)
            done = self._drain(sum(p.n for p in params), progress)
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return [
            RequestOutput(
                request_id,
                prompt if isinstance(prompt, str) else None,
                done[request_id][0],
                sorted(done[request_id][1], key=lambda output: output.index),
            )
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]

    def _drain(self, samples: int, progress: bool) -> dict[str, tuple[list[int], list[CompletionOutput]]]:
        done: dict[str, tuple[list[int], list[CompletionOutput]]] = {}
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        console = Console(file=sys.stderr)
        with Progress(*columns, console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
            task, tokens = bar.add_task("generating", total=samples), 0
            start = bar.get_time()
            while self.engine.has_work:
                for news in self.engine.step():
                    tokens += news.tokens
                    if news.finished is not None:
                        done.setdefault(news.request_id, (news.prompt_ids, []))[1].append(news.finished)
                        bar.advance(task)
                speed = tokens / max(bar.get_time() - start, 1e-9)
                bar.update(task, description=f"generating, {speed:.0f} tok/s")
        return done


def load(config: EngineConfig) -> LoadedModel:
    """The model of a configuration for engines that are made by hand, its weights in the type asked for; compiled
    programs are kept from here on.

    ConfigError for what no model could make right, before it is read, and for what takes an `LLM`.
    """
    for option, wanted in (("data_parallel", config.data_parallel > 1), ("distributed", config.distributed)):
        if wanted:
            raise ConfigError(f"{option} is for answering requests (generate, batch): a benchmark measures one engine")
    return _load(config)


def _load(config: EngineConfig) -> LoadedModel:
    check(config)
    _keep_compiled_programs()
    mesh = parallel.mesh_of(config.tensor_parallel, config.data_parallel)
    return load_model(config.model, config.weights, mesh=mesh)


def _engine(loaded: LoadedModel, config: EngineConfig) -> Serving:
    """The engine, or one for each replica. Of a job's processes all but the first stay here, and then exit."""
    engines = [Engine(loaded.replica(mesh), config) for mesh in parallel.meshes_of(loaded.mesh)]
    if jax.process_index() > 0:
        leading.follow(engines[0].device)
        sys.exit(0)
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _keep_compiled_programs() -> None:
    """Persist compiled programs in the cache folder, unless the user has chosen a place already."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
