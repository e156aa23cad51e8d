"""The formats that are known, after the chat templates that the models' makers published.

In the order in which a chat template is looked at: where it has the signs of several, the first one it is.
"""

from __future__ import annotations

import regex

from trioserve.parsers.call_format import CallFormat, Spelling, StrictForm
from trioserve.parsers.json_arguments import JsonArguments
from trioserve.parsers.python_arguments import PythonArguments
from trioserve.parsers.xml_arguments import XmlArguments

__all__ = ["CALL_FORMATS", "find_call_format"]

_SPACE = r"\s{0,64}+"
_NAME = r"(?P<name>[a-zA-Z0-9_-]{1,64})"

_OBJECT_HEAD = (
    rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"{_NAME}"{_SPACE},'
    rf'{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
"""Of a call that is an object, as all models are taught to write it."""

_LOOSE_OBJECT_HEAD = (
    rf'(?P<object>\{{){_SPACE}"(?:(?:type|id|arguments|parameters)"|name"{_SPACE}:{_SPACE}"{_NAME}")'
)

_OBJECT_TAIL = rf'{_SPACE}(?:,{_SPACE}"(?:id|type)"{_SPACE}:{_SPACE}"[^"\\]{{0,64}}"{_SPACE})?\}}'
"""Mistral's calls may have an id."""


def _opening(*marks: str, dropped: tuple[str, ...] = ()) -> regex.Pattern[str]:
    """White space before a mark goes with it."""
    others = "|".join(map(regex.escape, dropped)) or "(?!)"
    return regex.compile(rf"{_SPACE}(?:{'|'.join(marks)})|(?P<dropped>{others})")


def _objects(prefix: str = "", *, after: str, closing: str | None) -> Spelling:
    """Calls that are objects; `after` stands between two."""
    return Spelling(
        head=regex.compile(prefix + _OBJECT_HEAD),
        loose_head=regex.compile(prefix + _LOOSE_OBJECT_HEAD),
        new_reader=JsonArguments,
        tail=regex.compile(_OBJECT_TAIL),
        next=regex.compile(rf"{after}{_SPACE}(?=\{{)"),
        closing=None if closing is None else regex.compile(_SPACE + closing),
    )


_QWEN3_XML = CallFormat(
    name="qwen3_xml",
    signs=(("<function=", "<parameter="),),
    # Some of these models leave out the outer mark.
    opening=_opening("<tool_call>", "(?=<function=)"),
    spellings=(
        Spelling(
            head=regex.compile(rf"{_SPACE}<function={_NAME}>"),
            new_reader=XmlArguments,
            next=regex.compile(rf"{_SPACE}(?=<function=)"),
            closing=regex.compile(rf"{_SPACE}</tool_call>"),
        ),
    ),
    marks=("<tool_call>", "</tool_call>"),
)

_HERMES = CallFormat(
    name="hermes",
    signs=(("<tool_call>",),),
    # Small models of this family, such as Qwen2.5-Coder, write the bare object, or a block of code with it.
    opening=_opening("<tool_call>", rf"```(?:json)?{_SPACE}(?=\{{)"),
    start=regex.compile(rf"{_SPACE}(?=\{{)"),
    spellings=(_objects(_SPACE, after=_SPACE, closing="(?:</tool_call>|```)"),),
    marks=("<tool_call>", "</tool_call>"),
    strict=StrictForm(
        trigger="<tool_call>",
        begin='<tool_call>\n{"name": "NAME", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
    ),
)


def _token(words: str) -> str:
    """As DeepSeek spells its tokens: a full-width bar, and U+2581 for spaces."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


_CALLS, _END_CALLS = _token("tool calls begin"), _token("tool calls end")
_CALL, _END_CALL, _SEPARATOR = _token("tool call begin"), _token("tool call end"), _token("tool sep")


def _deepseek(name: str, signs: tuple[str, ...], before_name: str, fence: tuple[str, str]) -> CallFormat:
    """`fence`: what stands around the arguments, without the line breaks."""
    begin, end = fence
    return CallFormat(
        name=name,
        signs=(signs,),
        opening=_opening(_CALLS, dropped=(_END_CALLS,)),
        spellings=(
            Spelling(
                head=regex.compile(
                    rf"{_SPACE}{_CALL}{before_name}{_SPACE}{_NAME}{_SPACE}{begin}{_SPACE}(?=\{{)"
                ),
                new_reader=JsonArguments,
                tail=regex.compile(rf"{_SPACE}{end}{_SPACE}{_END_CALL}"),
                next=regex.compile(rf"{_SPACE}(?={_CALL})"),
                closing=regex.compile(_SPACE + _END_CALLS),
            ),
        ),
        marks=(_CALLS, _END_CALLS, _CALL, _END_CALL, _SEPARATOR),
        strict=StrictForm(
            trigger=_CALL,
            begin=f"{_CALL}{before_name}NAME{begin}" if not end else f"{_CALL}{before_name}NAME\n{begin}\n",
            end=f"\n{end}{_END_CALL}" if end else _END_CALL,
        ),
    )


_DEEPSEEK_V3 = _deepseek("deepseek_v3", (_CALLS, "```json"), f"function{_SEPARATOR}", ("```json", "```"))
_DEEPSEEK_V31 = _deepseek("deepseek_v31", (_CALLS,), "", (_SEPARATOR, ""))

_MISTRAL = CallFormat(
    name="mistral",
    signs=(("[TOOL_CALLS]",),),
    opening=_opening(r"\[TOOL_CALLS\]"),
    spellings=(
        _objects(rf"{_SPACE}\[?{_SPACE}", after=f"{_SPACE},", closing=r"\]"),
        Spelling(  # since Mistral's tokenizer 11
            head=regex.compile(
                rf"{_SPACE}{_NAME}{_SPACE}(?:\[CALL_ID\]\w{{1,64}}{_SPACE})?(?:\[ARGS\])?{_SPACE}(?=\{{)"
            ),
            new_reader=JsonArguments,
        ),
    ),
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    strict=StrictForm(
        trigger='{"name": "NAME", "arguments": ', begin='{"name": "NAME", "arguments": ', end="}"
    ),
)

_PYTHONIC = CallFormat(
    name="pythonic",
    signs=(("<|python_start|>",),),
    opening=_opening(rf"<\|python_start\|>{_SPACE}(?=\[)", dropped=("<|python_end|>",)),
    start=regex.compile(rf"{_SPACE}(?=\[)"),
    spellings=(
        Spelling(
            # A bracket behind a name is a call's only if a keyword follows, or nothing.
            head=regex.compile(
                rf"{_SPACE}\[?{_SPACE}{_NAME}{_SPACE}\({_SPACE}(?=[^\W\d]\w{{0,255}}{_SPACE}=[^=]|\))"
            ),
            new_reader=PythonArguments,
            next=regex.compile(rf"{_SPACE},{_SPACE}(?=[a-zA-Z_])"),
            closing=regex.compile(rf"{_SPACE}\]"),
        ),
    ),
    marks=("<|python_start|>", "<|python_end|>"),
)

_LLAMA3_JSON = CallFormat(
    name="llama3_json",
    signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
    opening=_opening(r"<\|python_tag\|>"),
    start=regex.compile(rf"{_SPACE}(?=\{{)"),
    spellings=(_objects(_SPACE, after=f"{_SPACE};?", closing=None),),
    marks=("<|python_tag|>",),
    strict=StrictForm(
        trigger='{"name": "NAME", "parameters": ',
        begin='{"name": "NAME", "parameters": ',
        end="}",
        separator="; ",
    ),
)

CALL_FORMATS = {
    form.name: form
    for form in (_QWEN3_XML, _HERMES, _DEEPSEEK_V3, _DEEPSEEK_V31, _MISTRAL, _PYTHONIC, _LLAMA3_JSON)
} | {"qwen": _HERMES, "qwen3_coder": _QWEN3_XML}
"""By name; the last two are other names of formats."""


def find_call_format(chat_template: str) -> CallFormat | None:
    """The one that the template teaches the model."""
    for form in CALL_FORMATS.values():
        if any(all(sign in chat_template for sign in signs) for signs in form.signs):
            return form
    return None
