"""From a request's parameters to llguidance's notation."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from trioserve.grammars.free_text import after_free_text
from trioserve.grammars.json_schemas import JsonStyle, json_grammar
from trioserve.grammars.refusals import refusal
from trioserve.grammars.structural_tags import structural_tag_grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLTokenizer

    from trioserve.config import StructuredOutputsConfig
    from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["write_grammar"]

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
"""Lark's rules have a single colon."""

_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


def write_grammar(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, tokenizer: LLTokenizer
) -> str:
    """The grammar may still be wrong: compiling it will tell.

    Raises:
      InvalidRequestError: what can be seen to be wrong at once.
    """
    grammar = _write_form(params, config, tokenizer)
    if params.free_until is None:
        return grammar
    return after_free_text(grammar, tokenizer, start=params.free_from, end=params.free_until)


def _write_form(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, tokenizer: LLTokenizer
) -> str:
    style = JsonStyle.of(params, config)
    if params.json is not None:
        return json_grammar(_json(params.json), style)
    if params.json_object:
        return json_grammar({"type": "object"}, style)
    if params.regex is not None:
        # As in JSON schemas, digits are ASCII: nobody who writes \d wants others.
        return LLMatcher.grammar_from_regex(regex_to_lark(params.regex, use_ascii="d"))
    if params.choice is not None:
        return _choice_grammar(params.choice)
    if params.grammar is not None:
        return _text_grammar(params.grammar)
    assert params.structural_tag is not None
    return structural_tag_grammar(_json(params.structural_tag), style, tokenizer)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(f"it is not JSON: {error}") from None


def _choice_grammar(choices: Sequence[str]) -> str:
    """One regular expression: as alternatives of a rule, thousands of them would be slow."""
    escaped = (_REGEX_SYNTAX.sub(r"\\\g<0>", choice) for choice in choices)
    return LLMatcher.grammar_from_regex(f"(?:{'|'.join(escaped)})")


def _text_grammar(text: str) -> str:
    if not _GBNF_RULE.search(text):
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except Exception as error:  # the converter raises bare ones, for whatever is wrong with the text
        raise refusal(f"the GBNF grammar is not valid: {error}") from None
