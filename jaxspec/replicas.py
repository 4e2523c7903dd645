"""Several engines with the same model, each on devices of its own, as one: data parallelism."""

from collections.abc import Sequence
from typing import Any

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.host.metrics import Metrics, Status
from jaxspec.host.request import TextDelta


class Replicas:
    """Serves requests as an `Engine` does. Each goes to the engine that has least to do, its cache included."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.tokenizer = engines[0].tokenizer
        for engine in engines:  # no two requests get the same seed
            engine.seeds = engines[0].seeds

    @property
    def has_work(self) -> bool:
        """Whether any sample waits or runs."""
        return any(engine.has_work for engine in self.engines)

    @property
    def samples(self) -> int:
        """Samples that wait or run."""
        return sum(engine.samples for engine in self.engines)

    def status(self) -> Status:
        """What goes on in all engines together."""
        return Status(*(sum(parts) for parts in zip(*(engine.status() for engine in self.engines), strict=True)))

    def figures(self) -> dict[str, Any]:
        """As of `Engine.figures`, of all engines together."""
        each = [engine.figures() for engine in self.engines]
        more = {name: value for name, value in each[0].items() if name.startswith("kv_")}
        if "offload" in each[0]:
            more["offload"] = {name: sum(one["offload"][name] for one in each) for name in each[0]["offload"]}
        return Metrics.of_all([engine.metrics for engine in self.engines]).as_dict() | more

    def add(self, request_id: str, prompt: str | list[int], params: SamplingParams) -> None:
        """As of `Engine.add`."""
        self._idlest().add(request_id, prompt, params)

    def add_chat(self, request_id: str, messages: list[dict], params: SamplingParams) -> None:
        """As of `Engine.add_chat`."""
        self._idlest().add_chat(request_id, messages, params)

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more is heard of it."""
        for engine in self.engines:
            engine.abort(request_id)

    def lift(self, prompt: list[int], cache_salt: str) -> int:
        """As of `Engine.lift`, in all engines."""
        return max(engine.lift(prompt, cache_salt) for engine in self.engines)

    def step(self) -> list[TextDelta]:
        """A step of each engine that has work: while one's news are read, the others' devices go on."""
        return [delta for engine in self.engines if engine.has_work for delta in engine.step()]

    def _idlest(self) -> Engine:
        return min(self.engines, key=lambda engine: engine.samples)
