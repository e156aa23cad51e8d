"""One sequence, from its arrival in the core to its end."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import attrs

from trioserve.audio_input import AudioInput
from trioserve.core.drafting import Drafter
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import TokenConstraints
from trioserve.worker.batch import LogprobRow, SampledToken
from trioserve.worker.grammar import GrammarMatcher

__all__ = ["CoreRequest", "MultimodalKey", "Request", "RequestStatus", "Share"]


@attrs.frozen(kw_only=True)
class MultimodalKey:
    """An image or sound within a prompt: its placeholder tokens mean what its content says."""

    position: int
    """Of its first placeholder."""
    length: int
    """Placeholders, in tokens."""
    digest: str
    """Of its content."""


@attrs.frozen(kw_only=True, eq=False)
class CoreRequest:
    """What a client asks for: one sequence. `params.n` is 1 and `params.max_tokens` is set."""

    request_id: int
    """Unique among the requests of the core, whoever sent them."""
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    constraints: TokenConstraints = attrs.field(factory=TokenConstraints)
    seed: int
    streams: bool = True
    """False: nothing is reported before the end."""
    priority: int = 0
    deadline: float = math.inf
    """Of the scheduler's clock, in seconds."""
    grammar: GrammarMatcher | None = None
    cache_salt: str | None = None
    """Requests with different salts never share a block; neither do those of different `lora`."""
    lora: str | None = None
    """The key of its adapter, which no other adapter ever has, not even a newer one of the same name."""
    multimodal_keys: Sequence[MultimodalKey] = ()
    """Sorted by position."""
    audio: AudioInput | None = None
    """What a speech model hears; `multimodal_keys` keeps its blocks apart from those of other audio."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Not scheduled yet; holds no block."""
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """Was running, waits again; holds no block, its tokens are computed anew."""
    FINISHED = enum.auto()
    ABORTED = enum.auto()
    """Nobody wants it. Only a step in flight may still keep it, and its blocks, alive."""


@attrs.define(eq=False)  # not frozen: one is made per sequence and step, at half the cost
class Share:
    """What one step computes of a request: positions [start, start + num_tokens)."""

    start: int
    num_tokens: int
    num_drafts: int
    """The last ones of `num_tokens`."""
    samples: bool


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
    constraints: TokenConstraints
    seed: int
    streams: bool
    priority: int
    deadline: float
    grammar: GrammarMatcher | None
    cache_salt: str | None
    lora: str | None
    multimodal_keys: Sequence[MultimodalKey]
    audio: AudioInput | None
    arrival: int
    """Counts up in the order in which requests were added."""
    eos_token_ids: frozenset[int]
    """Empty if the request ignores EOS."""
    stop_token_ids: frozenset[int]
    """`eos_token_ids` and the request's own."""
    max_known_tokens: int
    """It ends with this many: its `max_tokens` are there, or the context window is full."""

    drafter: Drafter | None = None
    """Guesses what comes next; None where nobody does."""
    output_token_ids: list[int] = attrs.field(factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    """Invariant: set if and only if the status is FINISHED."""
    stop_token_id: int | None = None
    """The stop token that ended it; EOS is none."""
    has_completed_grammar: bool = False
    """It ended because its grammar lets nothing follow. Its last token is a part of the text then, unlike one
    that stops."""
    failure: str | None = None
    """What went wrong, if the finish reason is ERROR."""

    num_computed_tokens: int = 0
    """Invariants: below num_known_tokens between steps, and covered by the block tables."""
    block_tables: list[list[int]] = attrs.field(factory=list)
    """Per group of layers, the block of each block_size positions; empty while it holds none. Entries that a
    window has left behind are NULL_BLOCK."""
    block_hashes: list[bytes] = attrs.field(factory=list)
    """Of the leading full blocks of known tokens, as far as somebody asked."""
    num_published_blocks: int = 0
    """Leading blocks of the tables that the prefix cache has seen."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    num_overtaken: int = 0
    """Requests with an adapter that were admitted while it was the first to wait for a place for its own."""
    share: Share | None = None
    """What the step in flight computes of it. Until that is back, its blocks must not be given to anyone."""
    unreported: list[SampledToken] = attrs.field(factory=list)
    """Tokens that the client has not been told of. Small beside the KV cache that each of them takes."""
    unreported_prompt_logprobs: list[LogprobRow] = attrs.field(factory=list)
    prompt_logprobs_start: int
    """The first prompt position whose logprobs have not come yet; the prompt's length if none are wanted."""

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_search(self) -> bool:
        """Its output is provisional until it is whole, and its blocks hold nothing that others could use."""
        return self.audio is not None and self.audio.search is not None

    @property
    def has_ended(self) -> bool:
        return self.status is RequestStatus.FINISHED or self.status is RequestStatus.ABORTED

    @property
    def in_flight(self) -> bool:
        """A step that has not come back computes it."""
        return self.share is not None

    def expected_progress(self) -> tuple[int, int]:
        """How many tokens will be computed at most, and how many known ones will be lacking at least, when
        the step in flight is back; (what is, what lacks) if there is none.

        Lacking is 0 if the request is bound to end in that step.
        """
        if self.share is None:
            return self.num_computed_tokens, self.num_known_tokens - self.num_computed_tokens
        num_computed = self.share.start + self.share.num_tokens
        if not self.share.samples:
            return num_computed, self.num_known_tokens - num_computed
        return num_computed, int(self.num_known_tokens + 1 < self.max_known_tokens)

    def take_unreported(self) -> list[SampledToken]:
        tokens, self.unreported = self.unreported, []
        return tokens

    def take_unreported_prompt_logprobs(self) -> list[LogprobRow]:
        rows, self.unreported_prompt_logprobs = self.unreported_prompt_logprobs, []
        return rows

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens of the positions [start, stop)."""
        prompt_length = len(self.prompt_token_ids)
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : stop - prompt_length]
        if stop <= prompt_length:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt_length]
