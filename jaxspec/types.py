"""The pytrees that travel through jit, and the contract of a drafter.

Dimensions: B batch rows, T query tokens of a row, N draft nodes, `path` the depth of the draft tree plus 1, P pages,
V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.tree import Tree

Params = dict[str, Any]


class Models(NamedTuple):
    """Parameters of the target and, where it has some, of the drafter."""

    target: Params
    draft: Params


class Sequences(NamedTuple):
    """Where the batch's sequences live. Slots are not positions: eviction moves slots, RoPE needs positions."""

    page_table: Int[Array, "groups B P"]
    """Physical pages in order, one table a layer group."""
    length: Int[Array, "groups B"]
    """Committed slots in use."""
    dropped: Int[Array, "groups B"]
    """Slots given back by an eviction policy: a token behind them is so many slots before its position."""
    position: Int[Array, "B"]
    """RoPE position of the next token to be written."""


class Sampling(NamedTuple):
    """Every request's choices as arrays, so that one compiled program serves any mix of them."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition: Float[Array, "B"]
    frequency: Float[Array, "B"]
    presence: Float[Array, "B"]
    bias_ids: Int[Array, "B bias"]
    """Token ids with a logit bias; padding is -1."""
    bias_values: Float[Array, "B bias"]
    stop_ids: Int[Array, "B stop"]
    """End of sequence and stop ids; padding is -1."""
    min_tokens: Int[Array, "B"]
    max_tokens: Int[Array, "B"]
    seed: UInt32[Array, "B 2"]
    sample: Int[Array, "B"]
    """Index among the samples of one prompt."""
    logprobs: Int[Array, "B"]
    """Likeliest tokens to report; -1 for no log probabilities at all."""


class History(NamedTuple):
    """What penalties look at."""

    counts: Int[Array, "B V"]
    """Times each token was emitted."""
    in_prompt: Bool[Array, "B V"]


class Proposal(NamedTuple):
    """A drafter's guess for the nodes of its tree."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    """False where the drafter had nothing to say: such a node is never accepted."""
    q: Float[Array, "B N V"] | None = None
    """The distribution each token was drawn from; None where tokens were picked and not drawn."""
    chance: Float[Array, "B N"] | None = None
    """The drafter's estimate that each node will be accepted. Where it gives one, the round checks only as many of the
    batch's nodes as bring the most tokens for their time. Not for tokens that were drawn: whether one of them is
    checked must depend on its own request's history alone."""


class Verdict(NamedTuple):
    """What verification decided: the path that was walked and the tokens it emits."""

    tokens: Int[Array, "B path"]
    """Emitted tokens; entry i follows the i-th token of the path."""
    path: Int[Array, "B path"]
    """Row index of the i-th token of the path; entry 0 is the root. Meaningless from `count` on."""
    count: Int[Array, "B"]
    """Tokens emitted: accepted drafts and one more."""
    finite: Bool[Array, "B"]
    """False where the model gave no usable logit."""


class Logprobs(NamedTuple):
    """Log probabilities of emitted tokens under the model's own distribution."""

    chosen: Float[Array, "B path"]
    top_ids: Int[Array, "B path top"]
    top: Float[Array, "B path top"]


class Output(NamedTuple):
    """What a call of `decode.run` emitted, read by the host once; C is the capacity of a call."""

    count: Int[Array, "B"]
    tokens: Int[Array, "B C"]
    logprob: Float[Array, "B C"]
    top_ids: Int[Array, "B C top"]
    top_logprobs: Float[Array, "B C top"]
    stats: Int[Array, "B C 3"]
    """The row's steps, drafted and accepted tokens so far, as of each emitted token."""


class Progress(NamedTuple):
    """How far each row's request has come."""

    token: Int[Array, "B"]
    """The last committed token: its key and value are not written yet, it is the root of the next round."""
    ordinal: Int[Array, "B"]
    """Tokens emitted so far."""
    active: Bool[Array, "B"]
    finish: Int[Array, "B"]
    """Why a row stopped: see `program.Finish`."""
    steps: Int[Array, "B"]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]


class View(NamedTuple):
    """What a drafter may look at when it proposes."""

    sequences: Sequences
    progress: Progress
    sampling: Sampling
    history: History


class DecodeState(NamedTuple):
    """All that the device carries from round to round; donated at every call."""

    pool: dict[str, Array]
    draft_pool: dict[str, Array]
    """Keys and values of the drafter's own model, under the page ids of `pool`; empty where it has none."""
    sequences: Sequences
    progress: Progress
    sampling: Sampling
    history: History
    drafter: Any


class Drafter(NamedTuple):
    """A way to guess tokens: pure functions around a state whose arrays all have the batch first.

    `params` are the drafter's own; `pool` its keys and values, under the target's page ids.
    """

    tree: Tree
    widths: tuple[int, ...]
    """Tokens of a verify row that rounds are compiled for, ascending, the whole tree last: a round runs the least
    width that holds every valid node, so drafting nothing costs a plain step where 1 is among them."""
    init: Callable[[int, int], Any]
    """`(batch, context) -> state`; context is the most tokens that a request has in the cache. Its text may be longer
    where an eviction policy says so."""
    admit: Callable[..., Any]
    """`(state, row, prompt, length) -> state` when a request takes a row; `prompt` is padded."""
    propose: Callable[..., tuple[Proposal, Any, dict[str, Array]]]
    """`(params, state, pool, view, pool_spec) -> (Proposal, state, pool)`."""
    observe: Callable[..., Any]
    """`(state, proposal, verdict, emitted, hidden) -> state` after verification; `emitted` [B] tokens of the verdict
    count, and `hidden` [B, E] is the target's hidden state of the last token that was accepted."""
    model: Any = None
    """The ModelSpec of the model that drafts, where one does: it has a pool, which prompts are written to as well."""
    lag: int = 0
    """Tokens that the cache of that model may be behind the target's, where what they saw could go back meanwhile."""
    typical: bool = False
    """Whether drafts are judged by `verify_typical`, which is not exact."""
