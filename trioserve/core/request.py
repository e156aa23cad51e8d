"""One sequence, from its arrival in the core to its end."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.worker.batch import SampledToken

__all__ = ["CoreRequest", "Request", "RequestStatus"]


@attrs.frozen(kw_only=True, eq=False)
class CoreRequest:
    """What a client asks for: one sequence. `params.n` is 1 and `params.max_tokens` is set."""

    request_id: int
    """Unique among the requests of the core, whoever sent them."""
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    streams: bool = True
    """False: nothing is reported before the end."""
    priority: int = 0
    cache_salt: str | None = None
    """Requests with different salts never share a block."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Not scheduled yet; holds no block."""
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """Was running, waits again; holds no block, its tokens are computed anew."""
    FINISHED = enum.auto()
    ABORTED = enum.auto()
    """Nobody wants it. Only a step in flight may still keep it, and its blocks, alive."""


@attrs.define(kw_only=True, eq=False)
class Request:
    """The state of one sequence; the scheduler owns it and is the only one to change it.

    There is no prefill phase and no decode phase. There are known tokens (prompt and output) and computed
    ones, and each step lets the second number chase the first:

        positions   0 ................. num_computed_tokens ................. num_known_tokens
                    in the KV cache     | to be computed, as far as budget goes |

    When it catches up, the step samples, and one more token is known.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    streams: bool
    priority: int
    cache_salt: str | None
    arrival: int
    """Counts up in the order in which requests were added."""
    eos_token_ids: frozenset[int]
    """Empty if the request ignores EOS."""
    stop_token_ids: frozenset[int]
    """`eos_token_ids` and the request's own."""
    max_known_tokens: int
    """It ends with this many: its `max_tokens` are there, or the context window is full."""

    output_token_ids: list[int] = attrs.field(factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    """Invariant: set if and only if the status is FINISHED."""
    stop_token_id: int | None = None
    """The stop token that ended it; EOS is none."""

    num_computed_tokens: int = 0
    """Invariants: below num_known_tokens between steps, and at most len(block_table) * block_size."""
    block_table: list[int] = attrs.field(factory=list)
    """Block of each block_size positions. Only appended to, or replaced whole: a step may hold the list."""
    block_hashes: list[bytes] = attrs.field(factory=list)
    """Of the leading full blocks of known tokens, as far as somebody asked."""
    num_published_blocks: int = 0
    """Leading blocks of the table that the prefix cache has seen."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    in_flight: bool = False
    """A step that has not come back computes it: its blocks must not be given to anyone."""
    unreported: list[SampledToken] = attrs.field(factory=list)
    """Tokens that the client has not been told of. Small beside the KV cache that each of them takes."""

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def has_ended(self) -> bool:
        return self.status is RequestStatus.FINISHED or self.status is RequestStatus.ABORTED

    def take_unreported(self) -> list[SampledToken]:
        tokens, self.unreported = self.unreported, []
        return tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens of the positions [start, stop)."""
        prompt_length = len(self.prompt_token_ids)
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : stop - prompt_length]
        if stop <= prompt_length:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt_length]
