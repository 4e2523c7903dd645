"""The target's own first layers as an untrained draft model: little speed, but a real two-model path anyone can run."""

from dataclasses import replace

from jaxspec.config import EngineConfig
from jaxspec.drafters._model import model_drafter
from jaxspec.errors import ConfigError
from jaxspec.models.loading import LoadedModel
from jaxspec.types import Drafter, Params

RULES = ("coupled", "rejection")


def build(config: EngineConfig, target: LoadedModel) -> tuple[Drafter, Params]:
    """Drafts with the first `draft_layers` layers, the target's norm and its output projection."""
    spec = target.local
    layers = config.draft_layers or max(1, spec.num_layers // 3)
    if layers >= spec.num_layers:
        raise ConfigError(f"draft_layers must be below the model's {spec.num_layers} layers, not {layers}")
    draft = replace(spec, num_layers=layers)
    first = target.params["layers"]
    params = {**target.params, "layers": first[:layers] if isinstance(first, tuple) else first}
    return model_drafter(draft, spec, config), params
