"""What a round costs, as far as the choice of how many drafts to check goes."""

import jax

COSTS = {"cpu": {1: 1.0, 2: 1.38, 4: 1.42, 8: 1.66, 16: 2.2, 32: 3.2, 64: 4.8, 128: 8.0, 256: 14.0}}
"""Time of a step by the tokens in it, all rows together, over that of one token: rounded readings on SmolLM2-135M,
which vary by a tenth. Other backends are assumed to take RIDGE tokens in the time of one; nobody has measured that yet."""
RIDGE = 256


def step_cost(batch: int, width: int) -> float:
    """Time of a round whose rows have `width` tokens over that of a plain round of the same `batch`."""
    return _of_tokens(batch * width) / _of_tokens(batch)


def _of_tokens(tokens: int) -> float:
    table = COSTS.get(jax.default_backend())
    if table is None:
        return 1.0 + 0.1 * tokens / RIDGE + max(tokens / RIDGE - 1.0, 0.0)
    most = max(table)
    return next((table[known] for known in sorted(table) if known >= tokens), table[most] * tokens / most)
