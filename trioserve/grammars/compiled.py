"""A grammar made ready for a model's vocabulary, and how much work it may cause."""

from __future__ import annotations

import attrs
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trioserve.grammars.matcher import Matcher
from trioserve.grammars.refusals import refusal

__all__ = ["CompiledGrammar", "compile_grammar"]

# What one step of one sequence may cost; beyond it that sequence fails, and no other. The worst that we could
# make a step take with 50,000 of fuel is 22 ms (49 k tokens), against 140 ms under llguidance's own limits
# (200,000 and 50,000); an ordinary mask takes 0.05 ms. Of the fuel, a pattern within a length of 200 needs
# 50,000 at its first mask; of the items, the largest tools need 250.
_LIMITS = LLParserLimits(
    step_lexer_fuel=64_000,
    step_max_items=20_000,
    max_items_in_row=4_000,  # an optional property takes four: objects may have a thousand of them
    max_lexer_states=100_000,  # 1 to 2 kB each, kept as long as the grammar
    verbose_errors=False,
)


@attrs.define(eq=False, kw_only=True)
class CompiledGrammar:
    """Makes matchers at their start. A copy costs 10 us, large grammars up to 500."""

    _template: LLMatcher
    _tokenizer: LLTokenizer
    _vocab_size: int
    is_spoiled: bool = False
    """A matcher reached a limit of the automaton that all share: no further one would work."""

    def new_matcher(self) -> Matcher:
        return Matcher(
            self._template.deep_copy(),
            eos_token_ids=frozenset(self._tokenizer.eos_tokens),
            tokenizer_size=self._tokenizer.vocab_size,
            vocab_size=self._vocab_size,
            on_spoiled=self._spoil,
        )

    def _spoil(self) -> None:
        self.is_spoiled = True


def compile_grammar(tokenizer: LLTokenizer, grammar: str, vocab_size: int) -> CompiledGrammar:
    """Blocking, with the GIL released: 1 to 30 ms, but seconds for some; and some end the process by
    overflowing its stack. `trioserve.grammars.checking` tells which.

    grammar: in llguidance's notation, as `write_grammar` returns it.

    Raises:
      InvalidRequestError: it is not valid, cannot be matched by anything, or is over a limit.
    """
    template = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if template.is_error():
        raise refusal(template.get_error())
    return CompiledGrammar(template=template, tokenizer=tokenizer, vocab_size=vocab_size)
