"""One sequence within its grammar: going on, taking back, ending, failing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from tokenizers import Tokenizer

from helpers_grammars import allowed_tokens, compiled, smollm2, tokenizer, walk_into_failure
from trioserve.errors import ModelNotSupportedError
from trioserve.grammars.compiled import compile_grammar
from trioserve.grammars.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from trioserve.grammars.matcher import Matcher

EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def spelled(text: str) -> list[int]:
    return tokenizer().tokenize_str(text)


def texts(tokens: np.ndarray) -> set[str]:
    return {tokenizer().decode_str([int(token)]) for token in tokens if token != EOS}


def matched(regex: str, text: str) -> Matcher:
    matcher = compiled(regex=regex).new_matcher()
    matcher.advance(spelled(text))
    return matcher


def test_the_mask_is_what_may_come_next() -> None:
    matcher = matched("ab?|xy", "")
    assert texts(allowed_tokens(matcher)) == {"a", "ab", "x", "xy"}
    matcher.advance(spelled("a"))
    assert texts(allowed_tokens(matcher)) == {"b"}
    assert EOS in allowed_tokens(matcher)
    assert not matcher.is_complete


def test_complete_is_when_only_the_end_may_follow() -> None:
    matcher = matched("ab?|xy", "xy")
    assert matcher.is_complete
    assert allowed_tokens(matcher).tolist() == [EOS]
    assert matcher.failure is None


@pytest.mark.parametrize("text", ["a", "ab"])
def test_the_end_is_a_token_that_can_be_taken_back(text: str) -> None:
    matcher = matched("ab?", text)
    before = allowed_tokens(matcher).tolist()
    matcher.advance([EOS])
    assert matcher.is_complete
    assert allowed_tokens(matcher).tolist() == [EOS]
    matcher.roll_back(1)
    assert allowed_tokens(matcher).tolist() == before
    matcher.advance([EOS, EOS])
    matcher.roll_back(2 + len(spelled(text)))
    assert texts(allowed_tokens(matcher)) == {"a", "ab"}
    assert matcher.failure is None


def test_every_rollback_leads_to_the_mask_that_was() -> None:
    matcher = compiled(json=PERSON).new_matcher()
    draw = random.Random(5)
    path: list[int] = []
    masks = [allowed_tokens(matcher)]
    for _ in range(120):
        if draw.random() < 0.3 or masks[-1].tolist() == [EOS]:
            steps = draw.randint(0, len(path))
            matcher.roll_back(steps)
            del path[len(path) - steps :], masks[len(masks) - steps :]
        else:
            path.append(int(draw.choice(masks[-1])))
            matcher.advance([path[-1]])
            masks.append(allowed_tokens(matcher))
        assert np.array_equal(allowed_tokens(matcher), masks[-1])
    assert matcher.failure is None


def test_count_fitting_changes_nothing() -> None:
    matcher = matched("a(bc)*", "a")
    before = allowed_tokens(matcher).tolist()
    b, c = spelled("b") + spelled("c")
    assert matcher.count_fitting([]) == 0
    assert matcher.count_fitting([b, c, b, b, c]) == 3
    assert matcher.count_fitting([c]) == 0
    assert matcher.count_fitting([EOS]) == 1
    assert matcher.count_fitting([b, EOS]) == 1
    assert allowed_tokens(matcher).tolist() == before
    assert matcher.failure is None


def test_after_the_end_nothing_but_the_end_fits() -> None:
    matcher = matched("ab", "ab")
    assert matcher.count_fitting([EOS, *spelled("a")]) == 1
    assert matcher.count_fitting(spelled("a")) == 0


def test_forced_tokens_spell_what_must_come() -> None:
    schema = {**PERSON, "properties": {"a_long_name_of_a_property": {"type": "boolean"}}}
    schema["required"] = ["a_long_name_of_a_property"]
    matcher = compiled(json=schema, disable_any_whitespace=True).new_matcher()
    forced = matcher.forced_tokens(100)
    assert tokenizer().decode_str(forced) in '{"a_long_name_of_a_property":'
    assert len(forced) > 3
    assert matcher.count_fitting(forced) == len(forced)
    assert matcher.forced_tokens(2) == forced[:2]
    matcher.advance(forced[:1])
    assert matcher.forced_tokens(100) == forced[1:]
    assert matcher.failure is None


def test_nothing_is_forced_where_there_is_a_choice() -> None:
    assert matched("a(b|c)", "a").forced_tokens(10) == []
    assert matched("ab", "ab").forced_tokens(10) == []


def test_a_token_that_does_not_fit_is_a_failure() -> None:
    matcher = matched("ab", "a")
    matcher.advance(spelled("z"))
    assert matcher.failure is not None
    assert "does not" in matcher.failure or "doesn't" in matcher.failure
    assert not matcher.is_complete


def test_matchers_of_one_grammar_are_independent() -> None:
    grammar = compiled(regex="[ab]{3}")
    first, second = grammar.new_matcher(), grammar.new_matcher()
    first.advance(spelled("a") * 3)
    assert first.is_complete
    second.advance(spelled("z"))
    assert second.failure is not None
    third = grammar.new_matcher()
    assert texts(allowed_tokens(third)) >= {"a", "b"}
    assert not grammar.is_spoiled


def test_a_limit_of_the_lexer_spoils_the_grammar() -> None:
    grammar = compiled(regex="[a-z]{3}(x{1000}){1000}")
    bystander = grammar.new_matcher()
    reason = walk_into_failure(grammar.new_matcher(), 10)
    assert reason is not None
    assert "too many" in reason
    assert grammar.is_spoiled
    assert walk_into_failure(bystander, 1) is not None


# Vocabularies of another size than the model's logits


def test_logits_without_tokens_are_never_allowed() -> None:
    model = attrs.evolve(smollm2(), vocab_size=49152 + 69)
    bigger = load_tokenizer(model)
    matcher = compile_grammar(bigger, "start: /(.|\\n)*/", model.vocab_size).new_matcher()
    mask = np.full(-(-model.vocab_size // 32), -1, dtype=np.int32)
    matcher.fill_mask(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert allowed.max() < 49152
    assert EOS in allowed


def test_tokens_without_logits_are_never_allowed(tmp_path: Path) -> None:
    source = Tokenizer.from_file(str(Path(smollm2().tokenizer_directory) / "tokenizer.json"))
    source.add_tokens([f"zebra{number}" for number in range(40)])
    source.save(str(tmp_path / "tokenizer.json"))
    model = attrs.evolve(smollm2(), tokenizer_directory=str(tmp_path), vocab_size=49155)
    matcher = compile_grammar(load_tokenizer(model), "start: /[a-z0-9]*/", model.vocab_size).new_matcher()
    mask = np.full(-(-model.vocab_size // 32), -1, dtype=np.int32)
    matcher.fill_mask(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert [token for token in allowed if token >= 49152] == [49152, 49153, 49154]


def test_every_eos_token_ends() -> None:
    model = attrs.evolve(smollm2(), eos_token_ids=(2, 0))
    matcher = compile_grammar(load_tokenizer(model), "start: /ab?/", model.vocab_size).new_matcher()
    matcher.advance(spelled("a"))
    assert {0, 2} <= set(allowed_tokens(matcher).tolist())
    matcher.advance([0])
    assert matcher.is_complete
    assert matcher.count_fitting([2]) == 1


def test_a_tokenizer_that_llguidance_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unheard"}}))
    with pytest.raises(ModelNotSupportedError, match=r"tokenizer\.json"):
        load_tokenizer(attrs.evolve(smollm2(), tokenizer_directory=str(tmp_path)))
