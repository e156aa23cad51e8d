"""Regular expressions, choices and grammars."""

from __future__ import annotations

import re

import pytest

from helpers_grammars import accepts, compiled, walk
from trioserve.errors import InvalidRequestError


@pytest.mark.parametrize(
    "regex",
    [
        r"ab?c",
        r"^ab$",
        r"^a|b$",
        r"(a|bc)*d{2,4}",
        r"\d{4}-\d{2}-\d{2}",
        r"[a-z]{1,5}(,[a-z]{1,5}){0,3}",
        r"[^a-c\n]{3}",
        r"(?i)yes|no",
        r"\w{1,8}@\w{1,8}\.(com|org)",
        r"#[0-9a-f]{6}|rgb\(\d{1,3}(, ?\d{1,3}){2}\)",
        r"é{2}[à-ü]?日本?",
        r".{0,10}",
        r"\s?\\\/\[\]\{\}\^\$",
        r"a*",
        r"(?P<key>\w{1,4})=(?P<value>\"[^\"]{0,5}\")",
        r"<a>[^<]{0,8}</a>",
    ],
)
def test_a_regex_is_matched_from_the_first_to_the_last_character(regex: str) -> None:
    grammar = compiled(regex=regex)
    for seed in range(8):
        text = walk(grammar.new_matcher(), seed)
        assert text is not None
        assert re.fullmatch(regex, text), text


def test_digits_are_ascii() -> None:
    grammar = compiled(regex=r"\d[\d]\w")
    assert accepts(grammar.new_matcher(), "12é")
    assert not accepts(grammar.new_matcher(), "1٣é")


def test_a_regex_does_not_match_a_part() -> None:
    grammar = compiled(regex="b+")
    assert accepts(grammar.new_matcher(), "bb")
    assert not accepts(grammar.new_matcher(), "abb")
    assert not accepts(grammar.new_matcher(), "bba")


@pytest.mark.parametrize(
    ("regex", "reason"),
    [("a(b", "unclosed group"), (r"(a)\1", "backreferences"), ("(?<=a)b", "look-around"), (r"\bx", "regex")],
)
def test_a_bad_regex(regex: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        compiled(regex=regex)


CHOICES = [
    *("yes", "no", "not", "nothing", "", "a.b", "a+b", "(x)", "[y]", "{2}", "a|b", "c\\d", "^$", "/"),
    *("two\nlines", "tab\t", '"quoted"', "'", "é", "日本語", "😀", "😀😀", " leading", "trailing "),
    *("#&~-", "<s>"),
]


def test_every_choice_can_be_made_and_no_other() -> None:
    grammar = compiled(choice=CHOICES)
    for choice in CHOICES:
        assert accepts(grammar.new_matcher(), choice), choice
    for other in ("yesno", "noth", "n", "aXb", "aab", "ab", "c0", "c\\", "two", "\n", "é日本語", "😀😀😀"):
        assert not accepts(grammar.new_matcher(), other), other


def test_random_choices() -> None:
    grammar = compiled(choice=CHOICES)
    made = {walk(grammar.new_matcher(), seed) for seed in range(60)}
    assert made <= set(CHOICES)
    assert len(made) > 10


def test_thousands_of_choices() -> None:
    choices = [f"item {number * 7919 % 100003}" for number in range(5000)]
    grammar = compiled(choice=choices)
    assert {walk(grammar.new_matcher(), seed) for seed in range(10)} <= set(choices)


LARK = """
start: sum
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""

GBNF = r"""
# sums, as llama.cpp writes its grammars
root    ::= sum
sum     ::= product (("+" | "-") product)*
product ::= atom ("*" atom)*
atom    ::= [0-9]{1,3} | "(" sum ")"
"""


@pytest.mark.parametrize("grammar", [LARK, GBNF], ids=["lark", "gbnf"])
def test_a_grammar(grammar: str) -> None:
    sums = compiled(grammar=grammar)
    for text in ("1", "12+3*(4-567)", "((7))"):
        assert accepts(sums.new_matcher(), text), text
    for text in ("", "1+", "(1", "1234", "1 + 2", "a"):
        assert not accepts(sums.new_matcher(), text), text


def test_gbnf_literals_and_classes() -> None:
    rules = ['root ::= key ":" [^"\\n]+ "\\n" end', 'key ::= "a\\"b" | "::="', 'end ::= "/" ["]']
    grammar = compiled(grammar="\n".join(rules))
    assert accepts(grammar.new_matcher(), 'a"b:some text\n/"')
    assert accepts(grammar.new_matcher(), '::=:x\n/"')
    assert not accepts(grammar.new_matcher(), 'a"b:two\nlines\n/"')


def test_lark_that_mentions_gbnf() -> None:
    grammar = compiled(grammar='// root ::= "x"\nstart: NAME " ::= " NAME\nNAME: /[a-z]+/\n')
    assert accepts(grammar.new_matcher(), "root ::= x")


def test_json_within_lark() -> None:
    grammar = compiled(grammar='start: "<" %json {"type": "boolean"} ">"')
    assert accepts(grammar.new_matcher(), "<true>")
    assert not accepts(grammar.new_matcher(), "<1>")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: foo", "unknown name"),
        ('start: "a', "lexer error"),
        ("root ::= foo", "not valid"),
        ("root ::= ( ", "not valid"),
        ('rule ::= "x"', "root"),
        ("just some text", "structured_outputs"),
    ],
)
def test_a_bad_grammar(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        compiled(grammar=grammar)
