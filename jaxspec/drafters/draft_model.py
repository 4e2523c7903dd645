"""A smaller model of the same vocabulary drafts (Leviathan et al., 2023; Chen et al., 2023)."""

from jaxspec.config import EngineConfig
from jaxspec.drafters._model import model_drafter
from jaxspec.errors import ConfigError
from jaxspec.kv.policies import get_policy
from jaxspec.models.loading import LoadedModel, load_model
from jaxspec.types import Drafter, Params

RULES = ("coupled", "rejection")


def build(config: EngineConfig, target: LoadedModel) -> tuple[Drafter, Params]:
    """Loads `draft_model`. ConfigError where it is not given or cannot follow the target."""
    if config.draft_model is None:
        raise ConfigError("the drafter draft_model needs draft_model, a model with the vocabulary of the target")
    draft = load_model(
        config.draft_model,
        config.weights,
        mesh=target.mesh,
        vocab_size=target.spec.vocab_size,
        replicated=config.draft_parallel == "replicated",
    )
    if draft.tokenizer.vocabulary != target.tokenizer.vocabulary:
        raise ConfigError(f"{draft.name} has another vocabulary than {target.name}: it cannot draft for it")
    context = get_policy(config).most_seen(config.max_context or target.spec.max_context)
    if draft.spec.max_context < context:
        raise ConfigError(
            f"{draft.name} was trained for {draft.spec.max_context} tokens, fewer than the context of {context}: "
            f"set max_context to {draft.spec.max_context} or take another draft_model"
        )
    return model_drafter(draft.local, target.local, config), draft.params
