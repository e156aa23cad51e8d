"""Chat templates and tokenizers, against what transformers makes of the same files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import transformers

from byte_tokenizer import EOS, byte_tokenizer
from served import MODEL
from trioserve import EngineArgs, InvalidRequestError, ModelNotSupportedError
from trioserve.frontend.chat_template import ChatTemplate
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.model_sources import SilentProgress, resolve_model

if TYPE_CHECKING:
    from pathlib import Path

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wie ist das Wetter?",
            "parameters": {"type": "object"},
        },
    }
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 1 < 2 & 3 > 2? «日本語»"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And why?"},
]
# What real templates do: namespaces, loop controls, JSON without HTML escapes, whitespace control.
HARD_TEMPLATE = """
{%- set state = namespace(last=-1) %}
{%- if tools %}
    {{- 'Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set state.last = loop.index0 %}
    {{- bos_token + '[' + message['role'] | upper + '] ' + message.content | trim }}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '[ASSISTANT]' }}{{ extra | default('') }}{{ eos_token }}{% endif %}
"""


@pytest.fixture(scope="module")
def directory() -> str:
    config = EngineArgs(model=MODEL, dtype="float32").create_engine_config()
    return resolve_model(config.model, SilentProgress()).tokenizer_directory


@pytest.fixture(scope="module")
def reference(directory: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def template_of(tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
    text = source or tokenizer.chat_template
    assert text is not None
    return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("source", [None, HARD_TEMPLATE])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(
    directory: str, reference: Any, source: str | None, tools: Any, add_generation_prompt: bool
) -> None:
    template = template_of(Tokenizer.from_directory(directory), source)
    rendered = template.render(
        CONVERSATION,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        template_kwargs={"extra": "!"},
    )
    assert rendered == reference.apply_chat_template(
        CONVERSATION,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        chat_template=source,
        tokenize=False,
        extra="!",
    )


def test_the_last_message_can_be_continued_as_in_transformers(directory: str, reference: Any) -> None:
    messages = [CONVERSATION[1], {"role": "assistant", "content": "Yes, because"}]
    ours = template_of(Tokenizer.from_directory(directory)).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert ours == reference.apply_chat_template(messages, continue_final_message=True, tokenize=False)


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "12345 1 23",
    "日本語 🫠🥹 龦",
    "a\n\n\n  b\t",
    "<|im_start|>user",
    "'re 's",
]


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_are_those_of_transformers(directory: str, reference: Any, text: str) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_a_token_that_is_a_part_of_a_character_shows_as_one_that_is_not() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_text(0xE2) == "\ufffd"
    assert tokenizer.token_bytes(0xE2) == b"\xe2"
    assert tokenizer.token_text(EOS) == "<eos>"
    assert tokenizer.token_bytes(10**6) == b""


def test_developers_are_the_system_where_the_template_knows_only_that() -> None:
    messages = [{"role": "developer", "content": "hi"}]
    old = ChatTemplate("{{ messages[0].role }}", bos_token=None, eos_token=None)
    new = ChatTemplate("{# developer #}{{ messages[0].role }}", bos_token=None, eos_token=None)
    assert old.render(messages) == "system"
    assert new.render(messages) == "developer"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "render"),
        ("{{ 1 / 0 }}", "render"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_requests_fault(source: str, text: str) -> None:
    template = ChatTemplate(source, bos_token=None, eos_token=None)
    with pytest.raises(InvalidRequestError, match=text) as caught:
        template.render([{"role": "user", "content": "x"}])
    assert caught.value.parameter == "messages"


def test_contradictions_are_refused() -> None:
    template = ChatTemplate("x", bos_token=None, eos_token=None)
    with pytest.raises(InvalidRequestError, match="empty"):
        template.render([])
    with pytest.raises(InvalidRequestError, match="both"):
        template.render(CONVERSATION, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="keeps"):
        template.render(CONVERSATION, add_generation_prompt=False, continue_final_message=True)


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupportedError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(str(tmp_path))
