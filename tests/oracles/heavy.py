"""The transformer with a cache of heavy hitters, in float64 and one token after the other (H2O, Zhang et al., 2023)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.models.spec import ModelSpec
from tests.oracles import dense


class Rule(NamedTuple):
    """What stays of a text."""

    heavy: int
    recent: int
    limit: int
    """Tokens at which all others go."""
    votes: int = 64


class _Layer:
    """Keys and values by place in the text; what each head has of them, and what it thinks of those."""

    def __init__(self, heads: int) -> None:
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.score: list[dict[int, float]] = [{} for _ in range(heads)]
        """By place, in order."""

    def condense(self, rule: Rule) -> None:
        for head, score in enumerate(self.score):
            places = list(score)
            old, recent = places[: -rule.recent], places[-rule.recent :]
            best = sorted(old, key=lambda place: (-score[place], place))[: rule.heavy]
            self.score[head] = {place: score[place] for place in sorted(best) + recent}


class _Text:
    """A text as it is written."""

    def __init__(self, params: dict[str, Any], spec: ModelSpec, stored: Callable[[np.ndarray], np.ndarray]) -> None:
        self.params, self.spec, self.stored = params, spec, stored
        self.layers = [_Layer(spec.num_kv_heads) for _ in params["layers"]]
        self.length = 0

    def write(self, token: int, votes: bool) -> np.ndarray:
        """Log probabilities of what follows."""
        x = dense.wide(self.params["embed"]["weight"])[[token]]
        for layer, params in zip(self.layers, self.params["layers"], strict=True):
            h = dense.normed(x, params["attention_norm"], self.spec)
            x = x + self._attention(layer, params, h, votes)
            h = dense.normed(x, params["mlp_norm"], self.spec)
            gate, up = np.einsum("se,cfe->csf", h, dense.wide(params["gate_up"]["weight"]))
            x = x + gate / (1 + np.exp(-gate)) * up @ dense.wide(params["down"]["weight"]).T
        self.length += 1
        head = self.params["embed" if self.spec.tied_embeddings else "lm_head"]["weight"]
        logits = (dense.normed(x, self.params["norm"], self.spec) @ dense.wide(head).T)[0, : self.spec.valid_vocab]
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def _attention(self, layer: _Layer, params, h: np.ndarray, votes: bool) -> np.ndarray:
        spec, place = self.spec, np.array([self.length])
        qkv = np.einsum("se,kgde->skgd", h, dense.wide(params["qkv"]["weight"]))
        q = dense.turned(qkv[:, :, : spec.group], place, spec)[0]
        layer.keys.append(self.stored(dense.turned(qkv[:, :, spec.group], place, spec)[0]))
        layer.values.append(self.stored(qkv[0, :, spec.group + 1]))
        mixed = []
        for head, score in enumerate(layer.score):
            score[self.length] = 0.0
            keys, values = (np.array([rows[p][head] for p in score]) for rows in (layer.keys, layer.values))
            logits = q[head] @ keys.T / np.sqrt(spec.head_dim)
            weight = np.exp(logits - logits.max(1, keepdims=True))
            weight /= weight.sum(1, keepdims=True)
            mixed.append(weight @ values)
            if votes:
                for p, w in zip(score, weight.mean(0), strict=True):
                    score[p] += w
        return np.concatenate(mixed).reshape(1, -1) @ dense.wide(params["o"]["weight"]).T

    def condense(self, rule: Rule) -> None:
        """Where there are too many tokens."""
        if len(self.layers[0].score[0]) >= rule.limit:
            for layer in self.layers:
                layer.condense(rule)


def logprobs(
    params: dict[str, Any],
    spec: ModelSpec,
    prompt: Sequence[int],
    emitted: Sequence[Sequence[int]],
    rule: Rule,
    stored: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Log probabilities [S, V] at the S tokens of a text, `emitted` in rounds, of each of which only the first token
    has a vote; `stored` is what becomes of key and value vectors."""
    text = _Text(params, spec, stored)
    *written, root = prompt
    for place, token in enumerate(written):
        text.write(token, place >= len(written) - rule.votes)
    found = []
    for tokens in emitted:
        text.condense(rule)
        found += [text.write(token, index == 0) for index, token in enumerate([root, *tokens[:-1]])]
        root = tokens[-1]
    return np.array(found)
