"""Parameters of wrong types and absurd sizes: each is refused where it is given, by name and in short.

What is accepted can be sent to the engine core and understood there; else one request would end them all.
"""

from __future__ import annotations

import enum
import json
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_api import Client, FakeLLM
from trioserve import BeamSearchParams, SamplingParams, StructuredOutputsParams
from trioserve.errors import InvalidRequestError
from trioserve.link.messages import Add, decode_message, encode_message
from trioserve.sampling_params import RepetitionDetection
from trioserve.token_constraints import TokenConstraints


class Text(str):
    pass


class Number(int):
    pass


class Fruit(str, enum.Enum):  # noqa: UP042 - its __str__ is another
    APPLE = "apple"


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


ENDLESS: dict[str, Any] = {}
ENDLESS["a"] = ENDLESS

BOTTOMLESS = nested(100_000)

SCALARS = [
    None, True, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 10**5000, 0.5, float("nan"), float("inf"), "", "1",
    "\ud800", b"x", Nameless(), object(), np.float64(0.5), np.float32(0.5), np.int64(1), np.bool_(True),
    np.array([1, 2]), Text("a"), Number(1), Fruit.APPLE, int,
]  # fmt: skip
HOSTILE = [
    *SCALARS,
    *([value] for value in SCALARS),
    *({"1": value} for value in SCALARS),
    {1: 2}, {2**70: 1}, {-1: 1}, {1.5: 2}, {None: 1}, {"a": {1: 2}}, {"a": {1, 2}}, [], {}, (1,), {1},
    ENDLESS, nested(63), nested(200), nested(900), BOTTOMLESS, RepetitionDetection(max_pattern_size=2),
    StructuredOutputsParams(json_object=True),
]  # fmt: skip


def add_of(params: SamplingParams) -> Add:
    return Add(
        request_id=1,
        prompt_token_ids=b"",
        params=params,
        constraints=TokenConstraints(),
        seed=1,
        streams=True,
        time_left=None,
    )


def made_or_problem(kind: Any, fields: dict[str, Any]) -> tuple[Any, str]:
    try:
        return kind(**fields), ""
    except InvalidRequestError as error:
        return None, str(error)


def check(kind: Any, name: str, **others: Any) -> None:
    for value in HOSTILE:
        made, problem = made_or_problem(kind, others | {name: value})
        if made is None:
            assert name in problem or "structured_outputs" in problem
            assert len(problem) < 400
            continue
        match made:
            case SamplingParams():
                params = made
            case StructuredOutputsParams():
                params = SamplingParams(structured_outputs=made)
            case RepetitionDetection():
                params = SamplingParams(repetition_detection=made)
            case _:
                continue  # a beam search stays where it is
        arrived = decode_message(encode_message(add_of(params)))
        assert arrived == add_of(params) or name == "extra_args"  # NaN is not equal to itself
        hash(params.structured_outputs)  # the core looks compiled grammars up by it


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(SamplingParams)])
def test_no_value_of_a_parameter_does_harm(name: str) -> None:
    check(SamplingParams, name)


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(StructuredOutputsParams)])
def test_no_form_of_the_output_does_harm(name: str) -> None:
    check(StructuredOutputsParams, name)


@pytest.mark.parametrize("name", ["min_pattern_size", "min_count"])
def test_no_repetition_detection_does_harm(name: str) -> None:
    check(RepetitionDetection, name, max_pattern_size=3)


@pytest.mark.parametrize("name", ["ignore_eos", "temperature", "length_penalty", "structured_outputs"])
def test_no_beam_search_does_harm(name: str) -> None:
    check(BeamSearchParams, name, beam_width=2, max_tokens=2)


def test_numbers_and_texts_of_other_libraries_are_taken_for_what_they_are() -> None:
    number = Number(3)
    params = SamplingParams(
        temperature=np.float64(0.5), n=Number(2), stop=[Text("a"), Fruit.APPLE], stop_token_ids=[number]
    )
    assert (params.temperature, params.n, params.stop) == (0.5, 2, ("a", "apple"))
    assert {type(params.temperature), type(params.n), type(params.stop_token_ids[0])} == {float, int}
    assert {type(text) for text in params.stop} == {str}


MEGABYTE = 2**20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a"] * 65}, "stop must be at most 64 stop strings, got 65."),
        ({"stop": ["a" * 40_000]}, "stop must have at most 32768 characters in all, got 40000."),
        ({"bad_words": ["a"] * 1025}, "bad_words must be at most 1024 words, got 1025."),
        ({"bad_words": ["a" * 100] * 400}, "bad_words must have at most 32768 characters in all, got 40000."),
        ({"stop_token_ids": range(1025)}, "stop_token_ids must be at most 1024 token ids, got 1025."),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1)},
            "logit_bias must be at most 1024 token ids, got 1025.",
        ),
        ({"allowed_token_ids": [1] * (MEGABYTE + 1)}, "allowed_token_ids must be at most 1048576 token ids"),
        ({"extra_args": {"a": {1: 2}}}, "it holds the key 1, which JSON cannot express"),
        ({"extra_args": {"a": ["b" * 300_000]}}, "it is larger than 262144 bytes"),
        ({"extra_args": {"a": [0] * 300_000}}, "it is larger than 262144 bytes"),
        ({"extra_args": nested(65)}, "it is nested more than 64 deep"),
        ({"output_kind": 3}, "output_kind must be one of CUMULATIVE \\(0\\), DELTA \\(1\\), FINAL_ONLY"),
    ],
)
def test_what_would_hold_others_up_is_limited(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**fields)
    assert caught.value.parameter in fields


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": json.dumps({"description": "a" * MEGABYTE})}, "json must be at most 1048576 bytes"),
        ({"json": {"description": "é" * 600_000}}, "json must be at most 1048576 bytes, got 1200"),
        ({"json": "[" * (MEGABYTE + 1)}, "json must be at most 1048576 bytes"),
        ({"json": "[" * 200_000}, "json must be a JSON schema"),
        ({"json": nested(65)}, "json must be nested at most 64 deep"),
        ({"json": {"a": object()}}, "json must be a JSON schema"),
        ({"json": {"a": "\ud800"}}, "json must be text without halves of characters"),
        ({"regex": "a" * MEGABYTE}, "regex must be at most 1048576 bytes"),
        ({"grammar": "a" * MEGABYTE}, "grammar must be at most 1048576 bytes"),
        ({"structural_tag": "a" * MEGABYTE}, "structural_tag must be at most 1048576 bytes"),
        ({"choice": [""] * (MEGABYTE + 1)}, "choice must be at most 1048576 bytes"),
    ],
)
def test_the_form_of_the_output_is_not_taken_apart_if_it_is_too_large(
    form: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        StructuredOutputsParams(**form)


HOSTILE_JSON = [
    b"null", b"true", b"0", b"-1", b"2147483648", b"18446744073709551616", b"1" * 400, b"1" * 5000, b"0.5",
    b"1e308", b'""', b'"a"', b"[]", b"[[]]", b"[1]", b"[null]", b'["a"]', b"{}", b'{"a":1}', b'{"1":1e308}',
    b'{"1":"x"}', b'{"a":18446744073709551616}', b'{"json_object":true}', b'{"max_pattern_size":2}',
    b'{"max_pattern_size":2,"min_count":18446744073709551616}', b'{"type":"json_object"}',
    b'{"type":"json_schema","json_schema":{"name":"a","schema":{"a":' + b"1" * 5000 + b"}}}",
    b'{"a":' * 300 + b"1" + b"}" * 300, b'{"json":' + b'{"a":' * 300 + b"1" + b"}" * 301,
]  # fmt: skip
FIELDS = [
    "n", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "max_tokens", "skip_special_tokens", "prompt_logprobs", "logprobs", "allowed_token_ids",
    "bad_words", "repetition_detection", "thinking_token_budget", "response_format", "structured_outputs",
    "vllm_xargs", "extra_args", "use_beam_search", "length_penalty", "stream", "stream_options", "priority",
    "cache_salt", "request_id", "return_token_ids", "echo", "best_of", "top_logprobs",
    "max_completion_tokens", "tools", "tool_choice", "documents", "chat_template_kwargs", "messages",
    "prompt",
]  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
async def test_no_field_of_a_body_is_the_servers_fault(name: str) -> None:
    for path, prompt in (
        ("/v1/completions", b'"prompt":"a"'),
        ("/v1/chat/completions", b'"messages":[{"role":"user","content":"a"}]'),
    ):
        for value in HOSTILE_JSON:
            llm = FakeLLM()
            reply = await Client(llm).post(path, b"{" + prompt + b',"' + name.encode() + b'":' + value + b"}")
            assert reply.status in {200, 400}, (path, value[:80], reply.error)
            for call in llm.calls:
                if isinstance(call.params, SamplingParams):
                    decode_message(encode_message(add_of(call.params)))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


@given(JSON)
def test_whatever_json_has_can_be_sent_to_a_logits_processor(value: Any) -> None:
    params = SamplingParams(extra_args={"a": value})
    assert repr(decode_message(encode_message(add_of(params)))) == repr(add_of(params))
