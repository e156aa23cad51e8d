"""From the logits of a step to its tokens, all rows at once, each by its own parameters.

Speculation: a sequence has one row for its next token, and one more after each draft, drawn as if the drafts
before it had been the output. Its drafts are kept as long as the token drawn in a draft's place is that
draft; the first drawn token that differs ends the step's output, and where none does, the token drawn after
the last draft does. What comes out is what drawing token by token would have given:

- Each token that is kept was drawn by the ordinary rules from the distribution after exactly the tokens
  before it, with the same uniform number of (seed, position). So with a seed the output is identical with and
  without drafts, whoever proposes them and whether they are right.
- It is also rejection sampling, which accepts x, proposed with probability q(x), with probability
  min(1, p(x) / q(x)) and else draws from max(0, p - q), rescaled. A draft is a point mass, q(x) = 1: accept
  with probability p(x), else draw from p without x. Drawing from p and comparing with x is the same
  experiment: it gives x with probability p(x), and another token y with probability p(y).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.worker.batch import SampledToken, ScheduledSequence, SequenceOutput
from trioserve.worker.biases import apply_logit_bias, early_stop_tokens
from trioserve.worker.filters import draw_tokens
from trioserve.worker.greedy import NOT_FINITE, is_plain_greedy
from trioserve.worker.histories import Histories
from trioserve.worker.logits_processors import apply_processors
from trioserve.worker.logprobs import RawLogprobs
from trioserve.worker.masks import allowed_tokens, bar, keep_only
from trioserve.worker.penalties import apply_penalties
from trioserve.worker.rows import Row, accepted, drafts_of, rows_of
from trioserve.worker.thinking import apply_thinking_budgets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.worker.batch import LogprobRow
    from trioserve.worker.histories import History
    from trioserve.worker.logits_processors import LogitsProcessor
    from trioserve.worker.speech_rules import SpeechRules

__all__ = ["Sampler", "uniform"]

_NO_MASKS: dict[int, np.ndarray] = {}


class Sampler:
    """Draws the tokens of one step after the other.

    What it remembers of a request (`trioserve.worker.histories`) saves work and changes nothing.
    """

    def __init__(
        self,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        speech_rules: SpeechRules | None = None,
    ) -> None:
        self._histories = Histories(vocab_size)
        self._processors = processors
        self._speech_rules = speech_rules
        self._processes_greedy = any(not processor.is_argmax_invariant() for processor in processors)

    @property
    def num_remembered(self) -> int:
        """Requests that it remembers something of: at most those of the last step."""
        return len(self._histories)

    def needs_logits(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """False if all that matters of each row is its highest logit (`trioserve.worker.greedy`)."""
        if self._processes_greedy or self._speech_rules is not None:
            return True
        return not all(map(is_plain_greedy, sequences))

    def sample(
        self,
        logits: np.ndarray,
        sequences: Sequence[ScheduledSequence],
        grammar_masks: Mapping[int, np.ndarray] = _NO_MASKS,
    ) -> list[SequenceOutput]:
        """The next tokens of each sequence; their grammars are advanced by them.

        The order: a speech model's own rules bar tokens; raw logprobs are taken; grammar masks and
        allowed_token_ids, bad_words, min_tokens and logit_bias, penalties, custom processors and the thinking
        budget change the logits; greedy rows take the highest, the others go through temperature, min_p,
        top_k, top_p and a draw. A row's token depends on its own logits, parameters, history, seed and
        position only. `trioserve.worker.masks` says what happens where constraints contradict each other.
        Logits that are no finite numbers, as weights (an adapter's, say) may make them, are the failure of
        their own sequence.

        logits: fp32 [R, vocab], 1 + num_drafts rows per sequence; overwritten.
        grammar_masks: of the sequences with a grammar, as `GrammarMasks` fills them.
        """
        step = _Step.of(sequences, self._histories.of(sequences), grammar_masks)
        failures = dict.fromkeys(_mend(logits), NOT_FINITE)
        if self._speech_rules is not None:
            self._speech_rules.apply(logits, step.rows)
        logprobs = RawLogprobs.capture(logits, step.rows)
        logits, unusable = self._shape(logits, step)
        failures = dict.fromkeys(unusable, "A custom logits processor left no token to draw.") | failures
        return _outputs(_choose(logits, step.rows), step, logprobs, failures)

    def _shape(self, logits: np.ndarray, step: _Step) -> tuple[np.ndarray, set[int]]:
        """Everything between the raw logits and the choice; and the rows that processors made unusable."""
        rows, vocab_size = step.rows, logits.shape[1]
        keep_only(logits, step.allowed)
        bad = ((index, row.history.bad_words, row) for index, row in enumerate(rows))
        bar(logits, {index: words.completing(row) for index, words, row in bad if words is not None})
        bar(logits, {index: early_stop_tokens(row, vocab_size) for index, row in enumerate(rows)})
        apply_logit_bias(logits, rows)
        apply_penalties(logits, rows)
        broken: set[int] = set()
        if self._processors:
            logits = apply_processors(logits, rows, self._processors)
            keep_only(logits, step.allowed)
            broken = _mend(logits)
        apply_thinking_budgets(logits, rows, step.grammar_masks)
        return logits, broken


@attrs.frozen(eq=False)
class _Step:
    """The rows of all sequences, one after the other."""

    sequences: Sequence[ScheduledSequence]
    rows: list[Row]
    counting: list[range]
    """By sequence: its rows that count. The others are drawn as well, and ignored."""
    grammar_masks: dict[int, np.ndarray]
    """By row: what a grammar leaves, bool [vocab]."""
    allowed: dict[int, np.ndarray]
    """By row: what is left by that and `allowed_token_ids`."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[ScheduledSequence],
        histories: Sequence[History],
        masks: Mapping[int, np.ndarray],
    ) -> _Step:
        step = cls(sequences, [], [], {}, {})
        for index, sequence in enumerate(sequences):
            first = len(step.rows)
            step.rows.extend(rows_of(sequence, histories[index]))
            num_counting = 1 + sequence.num_drafts
            if sequence.grammar is not None:
                mask = masks.get(index, ())
                num_counting = len(mask)
                step.grammar_masks.update(enumerate(mask, first))
            step.counting.append(range(first, first + num_counting))
        for place, row in enumerate(step.rows):
            allowed = allowed_tokens(step.grammar_masks.get(place), row)
            if allowed is not None:
                step.allowed[place] = allowed
        return step


def _mend(logits: np.ndarray) -> set[int]:
    """The rows in which nothing can be drawn (all -inf, or a +inf or NaN among them); they become zeros."""
    broken = ~np.isfinite(logits.max(axis=-1))
    logits[broken] = 0.0
    return set(np.flatnonzero(broken).tolist())


def _choose(logits: np.ndarray, rows: Sequence[Row]) -> list[int]:
    greedy = [index for index, row in enumerate(rows) if row.params.is_greedy]
    random = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    chosen = {index: int(logits[index].argmax()) for index in greedy}
    drawing = [rows[index] for index in random]
    uniforms = [uniform(row.sequence.seed, row.position) for row in drawing]
    drawn = draw_tokens([logits[index] for index in random], [row.params for row in drawing], uniforms)
    chosen |= zip(random, drawn, strict=True)
    return [chosen[index] for index in range(len(rows))]


def _outputs(
    drawn: list[int], step: _Step, logprobs: RawLogprobs | None, failures: Mapping[int, str]
) -> list[SequenceOutput]:
    kept = [
        accepted(drawn[rows.start : rows.stop], drafts_of(sequence))
        for sequence, rows in zip(step.sequences, step.counting, strict=True)
    ]
    kept_rows = [rows[: len(tokens)] for rows, tokens in zip(step.counting, kept, strict=True)]
    reported = logprobs.report(drawn, kept_rows) if logprobs is not None else {}
    outputs = []
    for sequence, tokens, rows in zip(step.sequences, kept, kept_rows, strict=True):
        failure = _advance(sequence, tokens)
        failure = next((failures[row] for row in rows if row in failures), failure)
        outputs.append(
            _output(tokens, rows, reported) if failure is None else SequenceOutput(failure=failure)
        )
    return outputs


def _advance(sequence: ScheduledSequence, tokens: Sequence[int]) -> str | None:
    """Tell the sequence's grammar; and why it cannot go on, if it cannot."""
    grammar = sequence.grammar
    if grammar is None:
        return None
    if grammar.failure is None and not tokens:
        return "Its grammar allows no token."
    if grammar.failure is None:
        grammar.advance(tokens)
    return grammar.failure


def _output(tokens: Sequence[int], rows: Sequence[int], reported: Mapping[int, LogprobRow]) -> SequenceOutput:
    pairs = zip(tokens, rows, strict=True)
    return SequenceOutput([SampledToken(token, reported.get(row)) for token, row in pairs])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: Philox, keyed by one, counting by the other.

    A counter-based generator has no state that a preempted or restarted sequence could lose. 52 bits, so
    that the product with a sum of weights always stays below the sum.
    """
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return float(bits >> 12) / 2**52
