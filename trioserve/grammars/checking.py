"""Whether a grammar can be used, found out by using it.

Schemas of a few kB can overflow the stack of llguidance's compiler, or keep it busy for minutes: no limit of
its own covers chains of $ref, rules nested thousands deep, or {"multipleOf": 10000019}. A thread could not be
stopped, and a crash ends the process. So `check` runs in a child process that may die or be killed. What
passed is compiled once more where it is needed: the same work, which is then known to end well.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.config import ResolvedModel, StructuredOutputsConfig
from trioserve.errors import InvalidRequestError
from trioserve.grammars.compiled import compile_grammar
from trioserve.grammars.refusals import refusal
from trioserve.grammars.writing import write_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from trioserve.grammars.matcher import Matcher
    from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["Setup", "Verdict", "check"]

_MAX_COMPILE_SECONDS = 1.0
"""Of processor time. The engine core will spend it again, beside the steps of others."""

_NUM_WALKS = 2
_WALK_LENGTH = 24
"""Tokens: enough to meet most of what is costly at all; a mask that fails later fails its own sequence."""


@attrs.frozen(kw_only=True)
class Setup:
    """What all checks have in common."""

    model: ResolvedModel
    config: StructuredOutputsConfig


@attrs.frozen(kw_only=True)
class Verdict:
    """Exactly one of the two is set."""

    grammar: str | None = None
    """In llguidance's notation: it compiles, and its first masks stay within the limits."""
    refused: str | None = None
    """Why it cannot be used, for the client."""


def check(setup: Setup, tokenizer: LLTokenizer, params: StructuredOutputsParams) -> Verdict:
    """Blocking, of any duration, and it may end the process."""
    try:
        grammar = write_grammar(params, setup.config, tokenizer)
        started = time.thread_time()
        compiled = compile_grammar(tokenizer, grammar, setup.model.vocab_size)
        if (seconds := time.thread_time() - started) > _MAX_COMPILE_SECONDS:
            raise refusal(
                f"it is too complex: {seconds:.1f} s to compile, {_MAX_COMPILE_SECONDS:g} are allowed."
            )
        for seed in range(_NUM_WALKS):
            _walk(compiled.new_matcher(), setup.model.vocab_size, random.Random(seed))
    except InvalidRequestError as error:
        return Verdict(refused=str(error))
    return Verdict(grammar=grammar)


def _walk(matcher: Matcher, vocab_size: int, choice: random.Random) -> None:
    """Match some text.

    Raises:
      InvalidRequestError: a limit was reached, or there is nothing to say, or it cannot be unsaid.
    """
    mask = np.empty(-(-vocab_size // 32), dtype=np.int32)
    for _ in range(_WALK_LENGTH):
        matcher.fill_mask(mask)
        matcher.forced_tokens(1)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        _raise_failure(matcher)
        if matcher.is_complete or not len(allowed):
            return
        token = int(choice.choice(allowed))
        matcher.advance([token])
        matcher.roll_back(1)  # some of llguidance's own options make it impossible
        matcher.advance([token])
        _raise_failure(matcher)


def _raise_failure(matcher: Matcher) -> None:
    if matcher.failure is not None:
        raise refusal(matcher.failure)
