"""Grammars over the vocabulary of the default model, and random texts that they allow."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from helpers_model_sources import model_config
from trioserve.config import StructuredOutputsConfig
from trioserve.grammars.compiled import CompiledGrammar, compile_grammar
from trioserve.grammars.tokenizer import load_tokenizer
from trioserve.grammars.writing import write_grammar
from trioserve.model_sources import SilentProgress, resolve_model
from trioserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from trioserve.config import ResolvedModel
    from trioserve.grammars.matcher import Matcher

_CLOSING = ("}", "]", '"')
_NUM_FREE = 12
"""Tokens drawn freely, before a walk is drawn to its end."""
_MAX_TOKENS = 1500


@cache
def smollm2() -> ResolvedModel:
    return resolve_model(model_config("smollm2-135m", dtype="float32"), SilentProgress())


@cache
def tokenizer() -> LLTokenizer:
    return load_tokenizer(smollm2())


@cache
def _texts() -> list[str]:
    """By token."""
    return [tokenizer().decode_str([token]) for token in range(smollm2().vocab_size)]


@cache
def _closing_tokens() -> np.ndarray:
    """Whether a token begins with what ends a value, by token."""
    return np.array([text.startswith(_CLOSING) for text in _texts()])


def compiled(config: StructuredOutputsConfig | None = None, /, **params: Any) -> CompiledGrammar:
    """In this process: no harm must be in it."""
    wanted = StructuredOutputsParams(**params)
    grammar = write_grammar(wanted, config or StructuredOutputsConfig(), tokenizer())
    return compile_grammar(tokenizer(), grammar, smollm2().vocab_size)


def allowed_tokens(matcher: Matcher) -> np.ndarray:
    """int64 [n], ascending."""
    vocab_size = smollm2().vocab_size
    mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    matcher.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(matcher: Matcher, seed: int) -> str | None:
    """A random text that the grammar allows; None if it does not come to an end."""
    draw = random.Random(seed)
    eos = smollm2().eos_token_ids[0]
    tokens: list[int] = []
    while len(tokens) < _MAX_TOKENS:
        allowed = allowed_tokens(matcher)
        assert matcher.failure is None, (matcher.failure, tokenizer().decode_str(tokens))
        assert len(allowed), tokenizer().decode_str(tokens)
        token = _drawn(draw, allowed, eos, hurried=len(tokens) >= _NUM_FREE)
        matcher.advance([token])
        if token == eos:
            return tokenizer().decode_bytes(tokens).decode()
        tokens.append(token)
    return None


def _drawn(draw: random.Random, allowed: np.ndarray, eos: int, *, hurried: bool) -> int:
    if hurried and eos in allowed:
        return eos
    closing = allowed[_closing_tokens()[allowed]]
    if len(closing) and draw.random() < (0.8 if hurried else 0.2):
        return int(draw.choice(closing))
    return int(draw.choice(allowed))


def walk_into_failure(matcher: Matcher, num_tokens: int) -> str | None:
    """Take the first token that is allowed, again and again; returns the failure, if it came to one."""
    for _ in range(num_tokens):
        if matcher.failure is not None:
            break
        matcher.advance([int(allowed_tokens(matcher)[0])])
        matcher.forced_tokens(5)
    return matcher.failure


def accepts(matcher: Matcher, text: str) -> bool:
    """The whole text is allowed, byte by byte at worst, and the output may end there."""
    tokens = tokenizer().tokenize_bytes(text.encode())
    if matcher.count_fitting(tokens) < len(tokens):
        return False
    matcher.advance(tokens)
    return smollm2().eos_token_ids[0] in allowed_tokens(matcher)
