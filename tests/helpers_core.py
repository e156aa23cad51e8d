"""A runner that keeps its KV cache in plain lists, and a driver for it."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from hash_model import EOS, VOCAB_SIZE, GrammarForm, HashGrammar, generate_alone, next_token
from trioserve.audio_input import AudioInput
from trioserve.config import SchedulerConfig
from trioserve.core.admission import RequestLimits
from trioserve.core.engine import EngineCore
from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.proposer import Proposer
from trioserve.core.request import CoreRequest
from trioserve.core.scheduler import Scheduler
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.worker.batch import LogprobRow, SampledToken, ScheduledSequence, SequenceOutput, StepBatch
from trioserve.worker.kv_layout import KVCacheLayout

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trioserve.core.launch import StepPlan
    from trioserve.core.request import Request

NOTHING = -1
"""What the paged memory holds where nobody has written."""


class PagedRunner:
    """Writes token ids and adapters where a real runner writes keys and values, and reads them back to
    sample.

    A sequence's next token is right only if this memory, read through every group's block table as far back
    as the group's layers look, holds what was written for this sequence.
    """

    kernels = "a list in Python"

    def __init__(self, num_blocks: int, layout: KVCacheLayout) -> None:
        self.layout = layout
        self._memory: list[list[object]] = [[NOTHING] * layout.block_size for _ in range(num_blocks)]
        self.batches: list[list[tuple[int, int, bool]]] = []
        """Per step and sequence: request id, tokens computed, whether it sampled."""
        self.num_drafts = self.num_kept_drafts = 0

    def populate_kv_cache(self, first_block: int, end_block: int) -> None:
        assert 0 <= first_block < end_block

    def execute(self, batch: StepBatch) -> list[SequenceOutput]:
        assert batch.sequences
        self.batches.append([(s.request_id, len(s.token_ids), s.samples) for s in batch.sequences])
        self._check_writes(batch)
        for sequence in batch.sequences:
            self._write(sequence)
        return [self._output(sequence) for sequence in batch.sequences]

    def _write(self, sequence: ScheduledSequence) -> None:
        for position, token in enumerate(sequence.token_ids, sequence.start):
            block, offset = divmod(position, self.layout.block_size)
            for table in sequence.block_tables:
                self._memory[table[block]][offset] = token, sequence.lora

    def _output(self, sequence: ScheduledSequence) -> SequenceOutput:
        end = sequence.start + len(sequence.token_ids)
        truth = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        drafts = sequence.token_ids[len(sequence.token_ids) - sequence.num_drafts :]
        truth[end - sequence.num_drafts :] = drafts
        for position in range(sequence.start, end):
            self._check_reads(sequence, truth, position)
        tokens = self._sample(sequence, truth, list(drafts)) if sequence.samples else []
        grammar = sequence.grammar
        if grammar is not None:
            grammar.advance([token.token_id for token in tokens])
            if grammar.failure is not None:
                return SequenceOutput(failure=grammar.failure)
        return SequenceOutput(
            tokens=tokens,
            prompt_logprobs=[
                LogprobRow([sequence.prompt_token_ids[q]], [-float(q)], [1])
                for q in range(sequence.prompt_logprobs_start, len(sequence.prompt_token_ids))
                if sequence.start <= q - 1 < end
            ],
        )

    def _check_reads(self, sequence: ScheduledSequence, truth: list[int], position: int) -> None:
        for table, window in zip(sequence.block_tables, self.layout.windows, strict=True):
            for seen in range(0 if window is None else max(0, position - window + 1), position + 1):
                block, offset = divmod(seen, self.layout.block_size)
                assert table[block] >= 0, "a block that is looked at was given back"
                assert self._memory[table[block]][offset] == (truth[seen], sequence.lora)

    def _sample(self, sequence: ScheduledSequence, truth: list[int], drafts: list[int]) -> list[SampledToken]:
        num_known = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        assert sequence.start + len(sequence.token_ids) - len(drafts) == num_known
        tokens: list[SampledToken] = []
        for place, barred in enumerate(_barred_by_grammar(sequence, drafts)):
            length = num_known + place
            if len(sequence.output_token_ids) + place < sequence.params.min_tokens:
                both = barred | sequence.stop_token_ids
                barred = both if len(both) < VOCAB_SIZE else barred  # noqa: PLW2901
            token = next_token(truth[:length], sequence.seed, barred)
            wants = sequence.params.logprobs is not None
            tokens.append(SampledToken(token, LogprobRow([token], [-float(length)], [1]) if wants else None))
            if place == len(drafts) or drafts[place] != token:
                break
        self.num_drafts += len(drafts)
        self.num_kept_drafts += max(0, len(tokens) - 1)
        return tokens

    def _check_writes(self, batch: StepBatch) -> None:
        """Within a step, nobody writes into a block that another sequence reads or writes."""
        request_ids = [sequence.request_id for sequence in batch.sequences]
        assert len(set(request_ids)) == len(request_ids)
        held = {s.request_id: {b for t in s.block_tables for b in t} for s in batch.sequences}
        for writer in batch.sequences:
            assert writer.token_ids
            first = writer.start // self.layout.block_size
            last = -(-(writer.start + len(writer.token_ids)) // self.layout.block_size)
            written = {block for table in writer.block_tables for block in table[first:last]}
            for request_id, blocks in held.items():
                assert request_id == writer.request_id or written.isdisjoint(blocks)


def _barred_by_grammar(sequence: ScheduledSequence, drafts: Sequence[int]) -> list[frozenset[int]]:
    """For the next token, and for that after each draft up to one that completes the match."""
    grammar = sequence.grammar
    if grammar is None:
        return [frozenset()] * (1 + len(drafts))
    assert isinstance(grammar, HashGrammar)
    assert grammar.taken == list(sequence.output_token_ids)
    assert grammar.count_fitting(drafts) == len(drafts)
    found = [grammar.barred()]
    for count, draft in enumerate(drafts, 1):
        grammar.advance([draft])
        if grammar.failure is not None:
            return []
        if grammar.is_complete:
            grammar.roll_back(count)
            return found
        found.append(grammar.barred())
    grammar.roll_back(len(drafts))
    return found


class HintingProposer(Proposer):
    """Knows the model, and lies now and then."""

    def __init__(self) -> None:
        super().__init__(jump_ahead=True)

    def _guess(self, request: Request, limit: int) -> list[int]:
        history = request.tokens(0, request.num_known_tokens)
        drafts: list[int] = []
        while len(drafts) < min(limit, 4):
            token = next_token(history, request.seed)
            lies = next_token(history, request.seed, [token]) % 3 == 0
            drafts.append((token + lies) % VOCAB_SIZE)
            history.append(drafts[-1])
        return drafts


class Driver:
    """An engine core on a `PagedRunner`, and all that its client would have seen. Checks each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 64,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 1000,
        prefill_beside_decodes: int = 1000,
        max_long_partial_prefills: int = 1,
        enable_prefix_caching: bool = True,
        model: str = "model",
        drafts: bool = False,
        plan_ahead: bool = True,
        eos_token_ids: Collection[int] = (EOS,),
        max_loras: int | None = None,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,  # type: ignore[arg-type]
            long_prefill_token_threshold=long_prefill_token_threshold,
            prefill_beside_decodes=prefill_beside_decodes,
            max_long_partial_prefills=max_long_partial_prefills,
            plan_ahead=plan_ahead,
            max_loras=max_loras,
        )
        layout = KVCacheLayout(block_size=block_size, windows=tuple(windows))
        self.now = 0.0
        self.kv_cache = KVCacheManager(
            num_blocks, layout, enable_prefix_caching=enable_prefix_caching, model=model
        )
        self.scheduler = Scheduler(
            self.config,
            self.kv_cache,
            RequestLimits(max_model_len=max_model_len, eos_token_ids=frozenset(eos_token_ids)),
            proposer=HintingProposer() if drafts else Proposer(),
            clock=lambda: self.now,
        )
        self.runner = PagedRunner(num_blocks, layout)
        self.core = EngineCore(self.runner, self.scheduler)
        self.max_model_len = max_model_len
        self.requests: dict[int, CoreRequest] = {}
        """All that were ever added, in the order of their ids."""
        self.live: set[int] = set()
        """Neither finished nor aborted."""
        self.tokens: dict[int, list[int]] = {}
        """As reported."""
        self.prompt_logprobs: dict[int, list[LogprobRow]] = {}
        self.finished: dict[int, tuple[FinishReason, int | str | None]] = {}
        """Finish reason, and what stopped it: a stop token, "grammar", or neither."""
        self.forms: dict[int, GrammarForm] = {}
        self.num_cached: dict[int, int] = {}
        self.aborted: Counter[int] = Counter()
        """How often each id was aborted and not reported as free."""
        self.plan: StepPlan | None = None

    def add(
        self,
        prompt: Sequence[int],
        *,
        seed: int = 0,
        streams: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline: float = math.inf,
        grammar: GrammarForm | None = None,
        lora: str | None = None,
        audio: str | None = None,
        **params: object,
    ) -> int:
        """audio: its digest."""
        request_id = len(self.requests)
        if grammar is not None:
            self.forms[request_id] = grammar
        request = CoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),  # type: ignore[arg-type]
            seed=seed,
            streams=streams,
            cache_salt=cache_salt,
            priority=priority,
            deadline=deadline,
            grammar=None if grammar is None else HashGrammar(grammar),
            audio=None if audio is None else AudioInput(digest=audio, samples=b""),
            lora=lora,
        )
        self.core.add(request)
        self.requests[request_id] = request
        self.live.add(request_id)
        self.tokens[request_id] = []
        self.prompt_logprobs[request_id] = []
        return request_id

    def abort(self, *request_ids: int) -> None:
        self.core.abort(request_ids)
        self.aborted.update(request_ids)
        self.live -= set(request_ids)

    def rank(self, request_id: int) -> tuple[float, int]:
        request = self.requests[request_id]
        first = {"fcfs": 0, "priority": request.priority, "deadline": request.deadline}[self.config.policy]
        return first, request_id

    def begin(self) -> None:
        assert self.plan is None
        self.plan = self.core.schedule()
        self.report()
        if self.plan is None:
            assert self.core.is_held or not self.live
            return
        sequences = self.plan.batch.sequences
        assert sum(len(s.token_ids) for s in sequences) <= self.config.max_num_batched_tokens
        assert len(sequences) <= self.config.max_num_seqs
        assert len({s.lora for s in sequences} - {None}) <= (self.config.max_loras or 0)
        for s in sequences:
            limit = min(len(s.prompt_token_ids) + (s.params.max_tokens or 0), self.max_model_len)
            assert s.start + len(s.token_ids) < limit, "beyond what it may still say"
        if self.config.policy == "deadline":
            assert all(self.requests[s.request_id].deadline > self.now for s in sequences)

    def end(self) -> None:
        plan, self.plan = self.plan, None
        if plan is not None:
            self.core.finish(plan, self.core.execute(plan))
            self.report()

    def report(self) -> None:
        result = self.core.take_result()
        self._take_freed(result.freed)
        columns = zip(
            result.request_ids,
            result.token_ids,
            result.sampled,
            result.finish_reasons,
            result.stop_token_ids,
            result.num_cached_tokens,
            result.prompt_logprobs,
            strict=True,
        )
        for request_id, token_ids, sampled, reason, stop_token_id, num_cached, prompt_logprobs in columns:
            assert request_id in self.live, "reported after its end or abort"
            assert [token.token_id for token in sampled] == token_ids
            self._verify_logprobs(request_id, sampled)
            self.tokens[request_id] += token_ids
            self.prompt_logprobs[request_id] += prompt_logprobs
            self.num_cached[request_id] = num_cached
            if reason is not None:
                by_grammar = "grammar" if request_id in result.completed_grammars else None
                assert stop_token_id is None or by_grammar is None
                self.finished[request_id] = reason, by_grammar or stop_token_id
                self.live.remove(request_id)
            self.verify(request_id)

    @property
    def computed_now(self) -> set[int]:
        """The requests that the step in flight is made of."""
        return set() if self.plan is None else {s.request_id for s in self.plan.batch.sequences}

    def take_freed(self) -> None:
        """Take only the reports of freed requests, which may be done at any time."""
        self._take_freed(self.core.take_freed().freed)

    @property
    def unfreed(self) -> set[int]:
        """Aborted, and not reported as free yet, although everything was taken."""
        self.take_freed()
        return {request_id for request_id, count in self.aborted.items() if count}

    def _take_freed(self, request_ids: Sequence[int]) -> None:
        """Each is reported as often as it was aborted, and when it holds nothing."""
        for request_id in request_ids:
            assert self.aborted[request_id] > 0, "freed, and not aborted"
            assert request_id not in self.computed_now, "the step in flight still writes to its blocks"
            self.aborted[request_id] -= 1

    def _verify_logprobs(self, request_id: int, sampled: Sequence[SampledToken]) -> None:
        """Called before the tokens are noted."""
        request = self.requests[request_id]
        start = len(request.prompt_token_ids) + len(self.tokens[request_id])
        for position, token in enumerate(sampled, start):
            if request.params.logprobs is None:
                assert token.logprobs is None
            else:
                assert (token.logprobs.token_ids, token.logprobs.logprobs) == ([token.token_id], [-position])

    def verify(self, request_id: int) -> None:
        """What was reported so far is what the model gives without an engine."""
        request = self.requests[request_id]
        form = self.forms.get(request_id)
        expected, reason, stopped_by = generate_alone(request, form, self.max_model_len)
        tokens = self.tokens[request_id]
        assert tokens == expected[: len(tokens)]
        ended = self.finished.get(request_id)
        if ended is not None and ended[0] is FinishReason.ERROR:
            assert form is not None
            assert form.fails_after is not None
        elif ended is not None and ended[0] is not FinishReason.DEADLINE:
            assert tokens == expected
            assert ended == (reason, stopped_by)
        if tokens and request.params.prompt_logprobs is not None:
            rows = self.prompt_logprobs[request_id]
            assert [row.token_ids[0] for row in rows] == list(request.prompt_token_ids[1:])

    def step(self, *, ahead: bool = False) -> list[tuple[int, int, bool]]:
        """One whole step; what the runner got, per sequence: request id, tokens computed, samples."""
        self.begin()
        if ahead and self.plan is not None:
            self.core.plan_ahead()
        num_batches = len(self.runner.batches)
        self.end()
        self.scheduler.check()
        return self.runner.batches[num_batches] if len(self.runner.batches) > num_batches else []

    def drain(self, limit: int = 5000, *, ahead: bool = False) -> None:
        """Step until nothing is left to do; every request must end within `limit` steps."""
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step(ahead=ahead)
        assert not self.core.has_work
        self.report()
        assert not self.live
        assert not any(self.aborted.values()), "aborted, and never reported as free"
        assert self.num_held_blocks == 0

    @property
    def num_held_blocks(self) -> int:
        statistics = self.kv_cache.statistics()
        return statistics.num_blocks - statistics.num_free
