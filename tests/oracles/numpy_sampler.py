"""The distribution a request asked for, in float64, one position at a time, by the definitions in `SamplingParams`.

Filters sort and accumulate; penalties walk over the tokens themselves. Nothing here is shared with `jaxspec.sampling`.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import stats

from jaxspec.config import SamplingParams


def adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
    ordinal: int | None = None,
) -> np.ndarray:
    """Logits `[V]` of the token after `prompt + output` with penalties, bias and the ban on an early end."""
    result = np.array(logits, np.float64)
    for token in set(prompt) | set(output):
        seen = result[token]
        result[token] = seen / params.repetition_penalty if seen > 0 else seen * params.repetition_penalty
    for token, times in Counter(output).items():
        result[token] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias.items():
        result[token] += bias
    if (len(output) if ordinal is None else ordinal) < params.min_tokens:
        result[list(stop_ids)] = -np.inf
    return result


def kept(scaled: np.ndarray, params: SamplingParams, loosen: float = 0.0) -> np.ndarray:
    """Which of the tempered logits `[V]` survive top-k, top-p and min-p; `loosen` moves the cut-offs by that much."""
    alive = scaled > -np.inf
    if 0 < params.top_k < scaled.size:
        alive &= scaled >= np.sort(scaled)[-params.top_k] - max(loosen, 0.0)
    if params.top_p < 1:
        mass = softmax(np.where(alive, scaled, -np.inf))
        order = np.argsort(-mass, kind="stable")
        enough = np.cumsum(mass[order]) >= min(params.top_p + loosen, 1 - 1e-12)
        alive &= scaled >= scaled[order[np.argmax(enough)]]
    if params.min_p > 0:
        mass = softmax(scaled)
        alive &= mass >= params.min_p * (1 - loosen) * mass.max()
    return alive


def doubtful(scaled: np.ndarray, params: SamplingParams, margin: float = 1e-5) -> np.ndarray:
    """Tokens so close to a cut-off that float32 may decide either way."""
    return kept(scaled, params, margin) ^ kept(scaled, params, -margin)


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution `[V]` that adjusted logits are drawn from; one-hot where the temperature is 0."""
    if params.temperature == 0:
        return np.eye(logits.size)[np.argmax(logits)]
    scaled = logits / params.temperature
    return softmax(np.where(kept(scaled, params), scaled, -np.inf))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def p_value(draws: np.ndarray, expected: np.ndarray) -> float:
    """χ² of drawn ids against probabilities `[V]`; 0 where an impossible id was drawn. Rare ids share a cell."""
    observed = np.bincount(draws, minlength=expected.size).astype(np.float64)
    if observed.size > expected.size or observed[expected == 0].any():
        return 0.0
    wanted = expected * draws.size
    common = wanted >= 5
    cells = np.stack([np.append(x[common], x[~common].sum()) for x in (observed, wanted)])
    cells = cells[:, cells[1] > 0]
    if cells.shape[1] == 1:
        return 1.0
    return float(stats.chisquare(cells[0], cells[1] * (cells[0].sum() / cells[1].sum())).pvalue)
