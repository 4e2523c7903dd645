"""What a round costs, as far as the choice of how many drafts to check goes."""

from jaxspec.target import platform

COSTS = {
    "cpu": {
        1: {1: 1.0, 2: 1.38, 4: 1.42, 8: 1.66, 16: 2.2},
        8: {1: 1.0, 4: 1.4, 8: 2.65},
        32: {1: 1.0, 4: 1.79, 8: 2.81},
    }
}
"""Time of a round by batch and tokens of a row, over that of a plain round of the batch: readings on SmolLM2-135M,
which vary by a tenth. Other backends are assumed to take RIDGE tokens in the time of one; nobody has measured that."""
RIDGE = 256


def step_cost(batch: int, width: int) -> float:
    """Time of a round whose rows have `width` tokens over that of a plain round of the same `batch`."""
    tables = COSTS.get(platform())
    if tables is None:
        return _of_tokens(batch * width) / _of_tokens(batch)
    table = tables[next((known for known in tables if known >= batch), max(tables))]
    most = max(table)
    return next((cost for known, cost in table.items() if known >= width), table[most] * width / most)


def _of_tokens(tokens: int) -> float:
    return 1.0 + 0.1 * tokens / RIDGE + max(tokens / RIDGE - 1.0, 0.0)
