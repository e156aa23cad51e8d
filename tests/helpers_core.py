"""A model that is a hash function, a runner that keeps its KV cache in plain lists, and a driver for both."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from trioserve.config import SchedulerConfig
from trioserve.core.engine import EngineCore
from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.request import CoreRequest
from trioserve.core.scheduler import Scheduler
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.worker.batch import SampledToken, ScheduledSequence, StepBatch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trioserve.core.scheduler import StepPlan

VOCAB_SIZE = 40
EOS = 0
NOTHING = -1
"""What the paged memory holds where nobody has written."""


def next_token(history: Sequence[int], seed: int, barred: Collection[int] = ()) -> int:
    """The whole model: depends on every token before, and on the seed."""
    digest = hashlib.sha256(repr((list(history), seed)).encode()).digest()
    token = int.from_bytes(digest[:4], "big") % VOCAB_SIZE
    while token in barred:
        token = (token + 1) % VOCAB_SIZE
    return token


def generate_alone(
    prompt: Sequence[int], params: SamplingParams, seed: int, max_model_len: int
) -> tuple[list[int], FinishReason, int | None]:
    """What a request must give, worked out without any engine: tokens, finish reason, stop token id."""
    eos = set() if params.ignore_eos else {EOS}
    stops = eos | set(params.stop_token_ids)
    history = list(prompt)
    while True:
        num_generated = len(history) - len(prompt)
        token = next_token(history, seed, stops if num_generated < params.min_tokens else ())
        history.append(token)
        output = history[len(prompt) :]
        if token in eos:
            return output, FinishReason.STOP, None
        if token in stops:
            return output, FinishReason.STOP, token
        if len(output) == params.max_tokens or len(history) == max_model_len:
            return output, FinishReason.LENGTH, None


class PagedRunner:
    """Writes token ids where a real runner writes keys and values, and reads them back to sample.

    What a sequence's next token depends on comes from nothing but this memory, through the block table.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._memory = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.batches: list[list[tuple[int, int, bool]]] = []
        """Per step and sequence: request id, tokens computed, whether it sampled."""

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        assert batch.sequences
        self.batches.append([(s.request_id, len(s.token_ids), s.samples) for s in batch.sequences])
        _check_writes(batch, self._block_size)
        for sequence in batch.sequences:
            self._write(sequence)
        return [self._sample(sequence) for sequence in batch.sequences if sequence.samples]

    def _write(self, sequence: ScheduledSequence) -> None:
        for position, token in enumerate(sequence.token_ids, sequence.start):
            block, offset = divmod(position, self._block_size)
            self._memory[sequence.block_table[block]][offset] = token

    def _sample(self, sequence: ScheduledSequence) -> SampledToken:
        length = sequence.start + len(sequence.token_ids)
        assert length == len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        history = [
            self._memory[sequence.block_table[position // self._block_size]][position % self._block_size]
            for position in range(length)
        ]
        assert NOTHING not in history, "a position was never computed"
        barred = sequence.stop_token_ids if self._barred(sequence) else ()
        token = next_token(history, sequence.seed, barred)
        if sequence.params.logprobs is None:
            return SampledToken(token)
        return SampledToken(token, [token], [-float(length)], [1])

    def _barred(self, sequence: ScheduledSequence) -> bool:
        return len(sequence.output_token_ids) < sequence.params.min_tokens


def _check_writes(batch: StepBatch, block_size: int) -> None:
    """Within a step, nobody writes into a block that another sequence reads or writes."""
    request_ids = [sequence.request_id for sequence in batch.sequences]
    assert len(set(request_ids)) == len(request_ids)
    for writer in batch.sequences:
        assert writer.token_ids
        end = writer.start + len(writer.token_ids)
        written = set(writer.block_table[writer.start // block_size : -(-end // block_size)])
        for other in batch.sequences:
            assert other is writer or written.isdisjoint(other.block_table)


class Driver:
    """An engine core on a `PagedRunner`, and all that its client would have seen. Checks each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        model: str = "model",
    ) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.kv_cache = KVCacheManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, model=model
        )
        self.scheduler = Scheduler(config, self.kv_cache, max_model_len=max_model_len, eos_token_ids=[EOS])
        self.runner = PagedRunner(num_blocks, block_size)
        self.core = EngineCore(self.runner, self.scheduler)
        self.config = config
        self.max_model_len = max_model_len
        self.requests: dict[int, CoreRequest] = {}
        """All that were ever added. Ids count up, so the lowest live one is the oldest."""
        self.live: set[int] = set()
        """Neither finished nor aborted."""
        self.tokens: dict[int, list[int]] = {}
        """As reported."""
        self.finished: dict[int, tuple[FinishReason, int | None]] = {}
        self.num_cached: dict[int, int] = {}
        self.plan: StepPlan | None = None

    def add(
        self,
        prompt: Sequence[int],
        *,
        seed: int = 0,
        streams: bool = True,
        cache_salt: str | None = None,
        **params: object,
    ) -> int:
        request_id = len(self.requests)
        request = CoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),  # type: ignore[arg-type]
            seed=seed,
            streams=streams,
            cache_salt=cache_salt,
        )
        self.core.add(request)
        self.requests[request_id] = request
        self.live.add(request_id)
        self.tokens[request_id] = []
        return request_id

    def abort(self, *request_ids: int) -> None:
        self.core.abort(request_ids)
        self.live -= set(request_ids)

    def begin(self) -> None:
        assert self.plan is None
        self.plan = self.core.schedule()
        assert (self.plan is None) == (not self.live)
        if self.plan is not None:
            sequences = self.plan.batch.sequences
            assert sum(len(s.token_ids) for s in sequences) <= self.config.max_num_batched_tokens
            assert len(sequences) <= self.config.max_num_seqs
            assert sequences[0].request_id == min(self.live), "the oldest request is served in every step"

    def end(self) -> None:
        plan, self.plan = self.plan, None
        if plan is None:
            return
        result = self.core.finish(plan, self.core.execute(plan))
        columns = zip(
            result.request_ids,
            result.token_ids,
            result.sampled,
            result.finish_reasons,
            result.stop_token_ids,
            result.num_cached_tokens,
            strict=True,
        )
        for request_id, token_ids, sampled, reason, stop_token_id, num_cached in columns:
            assert request_id in self.live, "reported after its end or abort"
            assert [token.token_id for token in sampled] == token_ids
            self.tokens[request_id] += token_ids
            self.num_cached[request_id] = num_cached
            if reason is not None:
                self.finished[request_id] = reason, stop_token_id
                self.live.remove(request_id)
            self.verify(request_id)

    def verify(self, request_id: int) -> None:
        """What was reported so far is what the model gives without an engine."""
        request = self.requests[request_id]
        expected, reason, stop_token_id = generate_alone(
            request.prompt_token_ids, request.params, request.seed, self.max_model_len
        )
        tokens = self.tokens[request_id]
        assert tokens == expected[: len(tokens)]
        if request_id in self.finished:
            assert tokens == expected
            assert self.finished[request_id] == (reason, stop_token_id)

    def step(self) -> list[tuple[int, int, bool]]:
        """One whole step; what the runner got, per sequence: request id, tokens computed, samples."""
        self.begin()
        num_batches = len(self.runner.batches)
        self.end()
        self.scheduler.check()
        return self.runner.batches[num_batches] if len(self.runner.batches) > num_batches else []

    def drain(self, limit: int = 5000) -> None:
        """Step until nothing is left to do; every request must end within `limit` steps."""
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        assert not self.live
        assert self.num_held_blocks == 0

    @property
    def num_held_blocks(self) -> int:
        statistics = self.kv_cache.statistics()
        return statistics.num_blocks - statistics.num_free
