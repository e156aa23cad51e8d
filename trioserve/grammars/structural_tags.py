"""Structural tags: free text in which, between certain marks, a schema must be followed.

Two forms are in use. The older one lists structures (begin, schema, end) and the triggers that start them:

    {"type": "structural_tag",
     "structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}

The newer one is a tree of formats: {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}.
Both become a grammar in Lark's notation.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from trioserve.grammars.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llguidance import LLTokenizer

    from trioserve.grammars.json_schemas import JsonStyle

__all__ = ["special_token", "structural_tag_grammar"]

_MAX_DEPTH = 16
"""Formats within formats."""

_LIKE_SPECIAL_TOKEN = re.compile(r"(<[^<>\s]{1,64}>|\[[A-Z_/]{2,32}\])")


def structural_tag_grammar(value: object, style: JsonStyle, tokenizer: LLTokenizer) -> str:
    """Raises InvalidRequestError: it is in neither form, or asks for what is not supported."""
    if not isinstance(value, dict) or value.get("type") != "structural_tag":
        raise refusal('a structural tag is an object with "type": "structural_tag".')
    writer = _Writer(style, tokenizer)
    form = value["format"] if "format" in value else _as_format(value)
    return writer.grammar(writer.expression(form))


def _as_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """The older form as a format."""
    tags = [
        {
            "type": "tag",
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema")},
            "end": structure.get("end"),
        }
        for structure in _objects(value, "structures")
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def _objects(value: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = value.get(key)
    if not (isinstance(found, list) and found and all(isinstance(item, dict) for item in found)):
        raise refusal(f"{key} must be a non-empty list of objects.")
    return found


def _strings(value: Mapping[str, Any], key: str) -> list[str]:
    found = value.get(key)
    if not (isinstance(found, list) and found and all(isinstance(item, str) and item for item in found)):
        raise refusal(f"{key} must be a non-empty list of non-empty strings.")
    return found


def _string(value: Mapping[str, Any], key: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise refusal(f"{key} must be a string.")
    return found


def special_token(text: str, tokenizer: LLTokenizer) -> str | None:
    """Lark's reference to the special token of this name, if there is one."""
    if not _LIKE_SPECIAL_TOKEN.fullmatch(text):
        return None
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    is_special = len(tokens) == 1 and tokenizer.is_special_token(tokens[0])
    return f"<[{tokens[0]}]>" if is_special else None


class _Writer:
    """Formats to expressions of Lark, with the rules that they need besides."""

    def __init__(self, style: JsonStyle, tokenizer: LLTokenizer) -> None:
        self._style = style
        self._tokenizer = tokenizer
        self._rules = ["TEXT: /(.|\\n)*/"]
        self._depth = 0
        self._formats: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda form: self._literal(_string(form, "value")),
            "json_schema": lambda form: self._schema(form.get("json_schema")),
            "any_text": lambda _: self._add("TEXT"),
            "regex": lambda form: self._regex(_string(form, "pattern")),
            "sequence": self._sequence,
            "or": lambda form: self._any_of([self.expression(f) for f in _objects(form, "elements")]),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])

    def expression(self, form: object) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        write = self._formats.get(kind) if isinstance(kind, str) else None
        if write is None or not isinstance(form, dict):
            raise refusal(f"formats have one of the types {', '.join(self._formats)}, got {kind!r}.")
        if self._depth == _MAX_DEPTH:
            raise refusal(f"formats are nested more than {_MAX_DEPTH} deep.")
        self._depth += 1
        try:
            return write(form)
        finally:
            self._depth -= 1

    def _add(self, body: str, options: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _any_of(self, expressions: Sequence[str]) -> str:
        return self._add(" | ".join(expressions))

    def _literal(self, text: str) -> str:
        """Special tokens stand for themselves: no other token spells them."""
        pieces = (piece for piece in _LIKE_SPECIAL_TOKEN.split(text) if piece)
        return " ".join(self._special(piece) or json.dumps(piece) for piece in pieces) or '""'

    def _special(self, text: str) -> str | None:
        return special_token(text, self._tokenizer)

    def _schema(self, schema: object) -> str:
        return self._add(f"%json {json.dumps(self._style.apply(schema))}")

    def _regex(self, pattern: str) -> str:
        escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern)
        return self._add(f"/{escaped}/".replace("\n", "\\n"))

    def _sequence(self, form: Mapping[str, Any]) -> str:
        elements = _objects(form, "elements")
        if any(element.get("type") == "any_text" for element in elements[:-1]):
            raise refusal("any_text can only be the last element of a sequence: nothing would end it.")
        return self._add(" ".join(self.expression(element) for element in elements))

    def _tag(self, form: Mapping[str, Any]) -> str:
        return f"{self._literal(_string(form, 'begin'))} {self._body(form)}"

    def _body(self, tag: Mapping[str, Any]) -> str:
        """What follows the tag's begin."""
        content, end = tag.get("content"), _string(tag, "end")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return self._text_until(end)
        return f"{self.expression(content)} {self._literal(end)}"

    def _text_until(self, mark: str) -> str:
        """Any text up to the first occurrence of the mark, which is part of it."""
        special = self._special(mark)
        if special is not None:
            return f"TEXT {special}"
        return self._add(f"TEXT {json.dumps(mark)}", "[lazy]")

    def _triggered_tags(self, form: Mapping[str, Any]) -> str:
        """After a trigger, one of the tags that begin with it; any text elsewhere."""
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in _strings(form, "triggers")}
        for tag in _objects(form, "tags"):
            begin = _string(tag, "begin")
            trigger = next((trigger for trigger in by_trigger if begin.startswith(trigger)), None)
            if trigger is None:
                raise refusal(f"no trigger starts the tag {begin!r}.")
            by_trigger[trigger].append(f"{self._literal(begin[len(trigger) :])} {self._body(tag)}")
        unused = [trigger for trigger, bodies in by_trigger.items() if not bodies]
        if unused:
            raise refusal(f"no tag begins with the trigger {unused[0]!r}.")
        one = self._any_of(
            [f"{self._text_until(trigger)} {self._any_of(bodies)}" for trigger, bodies in by_trigger.items()]
        )
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else self._any_of([one, self._add("TEXT")])
        return f"{one}{'+' if form.get('at_least_one') else '*'} {self._add('TEXT')}"

    def _tags_with_separator(self, form: Mapping[str, Any]) -> str:
        one = self._any_of([self._tag(tag) for tag in _objects(form, "tags")])
        more = f"({self._literal(_string(form, 'separator'))} {one})*"
        tags = one if form.get("stop_after_first") else f"{one} {more}"
        return tags if form.get("at_least_one") else f"({tags})?"
