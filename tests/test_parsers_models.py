"""What is known of a model by its chat template: how it calls and how it thinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fake_engine import open_fake_llm
from helpers_grammars import accepts, compiled
from trioserve.config import ReasoningConfig
from trioserve.errors import InvalidRequestError
from trioserve.parsers.call_formats import find_call_format
from trioserve.reasoning import ReasoningFormat, find_reasoning_format
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

BAR, SPACE = "\uff5c", "\u2581"
DEEPSEEK = f"<{BAR}tool{SPACE}calls{SPACE}begin{BAR}>"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>\n", "qwen3_xml"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("{%- if builtin_tools %}<|python_tag|>{%- endif %}", "llama3_json"),
        ('{{ "[TOOL_CALLS] [" }}', "mistral"),
        ("<|python_start|>[func_name1(params_name1=params_value1)]", "pythonic"),
        (f"{DEEPSEEK} '```json'", "deepseek_v3"),
        (f"{DEEPSEEK} + tool['function']['name']", "deepseek_v31"),
        ("<|im_start|>{{ message.role }}", None),
    ],
)
def test_formats_by_template(template: str, name: str | None) -> None:
    found = find_call_format(template)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    ("name", "marks", "template", "expected"),
    [
        ("auto", None, "", None),
        ("auto", None, "<think> and </think>", ReasoningFormat()),
        ("auto", None, "content.split('</think>')[-1]", ReasoningFormat(begins_unasked=True)),
        ("auto", None, "[THINK] [/THINK]", ReasoningFormat(start="[THINK]", end="[/THINK]")),
        ("auto", ReasoningConfig(start="a", end="b"), "", ReasoningFormat(start="a", end="b")),
        ("none", ReasoningConfig(), "<think></think>", None),
        ("qwen3", None, "", ReasoningFormat()),
        ("deepseek_r1", None, "", ReasoningFormat(begins_unasked=True)),
        ("tags", ReasoningConfig(start="(", end=")"), "<think></think>", ReasoningFormat(start="(", end=")")),
    ],
)
def test_reasoning_by_name_and_template(
    name: str, marks: ReasoningConfig | None, template: str, expected: ReasoningFormat | None
) -> None:
    assert find_reasoning_format(name, marks, template) == expected


@pytest.mark.parametrize("begins_unasked", [False, True])
def test_what_a_prompt_says_of_the_answer(begins_unasked: bool) -> None:
    form = ReasoningFormat(begins_unasked=begins_unasked)
    assert form.is_open_after("<assistant><think>\n")
    assert not form.is_open_after("<assistant><think>\n\n</think>\n\n")
    assert form.is_open_after("<assistant>") == begins_unasked
    assert form.is_open_within("<think>I am")
    assert not form.is_open_within("<think>I am</think> So")
    assert not form.is_open_within("So")


async def test_a_thinking_budget_with_a_parser_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(thinking_token_budget=3)
    async with open_fake_llm(tmp_path, monkeypatch, reasoning_parser="qwen3") as engine:
        channel = await engine.llm.submit("Hi", params)
        thinking = engine.client.added[0].constraints.thinking
        engine.llm.release(channel)
    assert thinking is not None
    assert bytes(thinking.end_token_ids) == b"</think>"
    assert thinking.max_tokens == 3


async def test_a_thinking_budget_of_a_model_that_does_not_think(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_llm(tmp_path, monkeypatch) as engine:
        with pytest.raises(InvalidRequestError, match="--reasoning-parser"):
            await engine.llm.submit("Hi", SamplingParams(thinking_token_budget=3))


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
        {"regex": r"\{\"a\": 1\}"},
        {"choice": ['{"a": 1}']},
        {"grammar": 'start: "{" rest\nrest: "\\"a\\": 1}"'},
    ],
)
def test_a_form_behind_free_text(form: dict[str, object]) -> None:
    must_think = compiled(**form, free_until="</think>").new_matcher
    assert accepts(must_think(), 'Hm {"a": </think>\n\n{"a": 1}')
    assert accepts(must_think(), '</think>{"a": 1}')
    assert not accepts(must_think(), '{"a": 1}')
    assert not accepts(must_think(), 'Hm</think> no {"a": 1}')
    may_think = compiled(**form, free_until="</think>", free_from="<think>").new_matcher
    assert accepts(may_think(), '<think>Hm</think>\n{"a": 1}')
    assert accepts(may_think(), '{"a": 1}')
    assert not accepts(may_think(), 'Hm</think>{"a": 1}')


def test_free_text_up_to_a_special_token() -> None:
    grammar = compiled(choice=["yes"], free_until="<|im_start|>").new_matcher
    assert accepts(grammar(), "maybe<|im_start|>yes")
    assert not accepts(grammar(), "yes")
