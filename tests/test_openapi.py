"""The description of the API, against the application that it describes."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import jsonschema
import msgspec
import pytest

from helpers_api import Client, FakeLLM
from trioserve.args import EngineArgs
from trioserve.errors import InvalidRequestError
from trioserve.server.openapi import Description
from trioserve.server.openapi_routes import ROUTES
from trioserve.server.protocol.readers import COMPLETION_READER
from trioserve.server_args import ServerArgs
from trioserve.version import __version__

if TYPE_CHECKING:
    from trioserve.server.protocol.reading import RequestReader

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hi"}
INPUT = {"input": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "ChatBatchRequest": {"messages": [CHAT["messages"]]},
    "ChatCompletionRequest": CHAT,
    "ClassifyRequest": INPUT,
    "CohereEmbedRequest": {"texts": ["Hi"]},
    "CompletionRequest": {**COMPLETION, "echo": True},  # else 0 is no max_tokens
    "ConversationRequest": {**CHAT, "model": "small"},
    "DetokenizeRequest": {"tokens": [1]},
    "EmbeddingRequest": INPUT,
    "GenerateRequest": {"token_ids": [1], "sampling_params": {}},
    "LoadLoRARequest": {"lora_name": "a", "lora_path": "b"},
    "MessagesRequest": {**CHAT, "model": "small", "max_tokens": 1},
    "PoolingRequest": INPUT,
    "RerankRequest": {"query": "Hi", "documents": ["Ho"]},
    "ResponsesRequest": {"input": "Hi"},
    "ScoreRequest": {"queries": "Hi", "documents": ["Ho"]},
    "TokenCountRequest": {"input": "Hi"},
    "TokenizeRequest": COMPLETION,
    "TranscriptionRequest": {},
    "UnloadLoRARequest": {"lora_name": "a"},
}
"""A request of each kind that is right."""


def all_readers() -> dict[str, RequestReader[Any]]:
    given = [route.reader for route in ROUTES if route.reader is not None]
    readers = [reader for some in given for reader in (some if isinstance(some, tuple) else (some,))]
    return {reader.kind.__name__: reader for reader in readers}


READERS = all_readers()


@cache
def describe() -> dict[str, Any]:
    return Description(ROUTES, needs_key=False, open_paths=()).document()


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    document = describe()
    return jsonschema.Draft202012Validator(
        {"components": document["components"], "$ref": f"#/components/schemas/{name}"}
    )


def is_read(reader: RequestReader[Any], body: dict[str, Any], field: str) -> bool:
    """The reader does not say what this field must be; what it says of two together is another thing."""
    try:
        reader.read(msgspec.json.encode(body))
    except InvalidRequestError as error:
        return not re.match(rf"{field}\b.* must be |.*\. {field} must be ", str(error))
    return True


async def test_it_is_served_as_json() -> None:
    client = Client(FakeLLM())
    reply = await client.get("/openapi.json")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["openapi"] == "3.1.0"
    assert reply.json["info"]["version"] == __version__
    assert "security" not in reply.json


async def test_what_a_flag_adds_is_described_with_the_flag_only() -> None:
    plain = (await Client(FakeLLM()).get("/openapi.json")).json["paths"]
    args = ServerArgs(enable_control_routes=True)
    added = (await Client(FakeLLM(), args).get("/openapi.json")).json["paths"].keys() - plain.keys()
    assert {"/pause", "/is_sleeping"} <= added
    assert "/tokenizer_info" not in added


async def test_it_needs_a_key_and_says_so() -> None:
    client = Client(FakeLLM(), ServerArgs(api_key=("k",)))
    assert (await client.get("/openapi.json")).status == 401
    document = (await client.get("/openapi.json", authorization="Bearer k")).json
    assert document["security"] == [{"ApiKey": []}, {"ApiKeyHeader": []}]
    assert document["components"]["securitySchemes"].keys() == {"ApiKey", "ApiKeyHeader"}
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "401" in document["paths"]["/v1/models"]["get"]["responses"]
    assert "401" not in document["paths"]["/health"]["get"]["responses"]


def test_every_route_is_described_and_no_other() -> None:
    flags = {route.flag: True for route in ROUTES if route.flag is not None}
    llm = FakeLLM()
    llm.config = EngineArgs(model="models/small", enable_lora=True).create_engine_config()
    app = Client(llm, ServerArgs(lora_directories="/", **flags)).app
    served = {
        (re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule), method.lower())
        for rule in app.url_map.iter_rules()
        if rule.endpoint != "docs_file"  # what a page loads
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    described = {(path, method) for path, operations in describe()["paths"].items() for method in operations}
    assert served == described


def test_its_schemas_are_json_schemas_that_refer_to_each_other() -> None:
    document = describe()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    referred = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert referred <= document["components"]["schemas"].keys()


def test_links_lead_to_operations_and_come_from_what_an_answer_has() -> None:
    operations = {route.operation_id: route for route in ROUTES}
    assert len(operations) == len(ROUTES), "ids are unique"
    for route in ROUTES:
        for operation, places in route.links.items():
            wanted = {parameter["name"] for parameter in operations[operation].parameters}
            assert places.keys() <= wanted
            (body, *_) = route.answers[200]
            for place in places.values():
                assert place.split("/")[1] in attrs.fields_dict(body.kind)


def values_of(schema: dict[str, Any]) -> list[Any]:
    """Those just within the schema's bounds, on them and just beyond."""
    step = 1 if "integer" in schema.get("type", ()) else 2**-20
    edges = [schema[word] for word in ("minimum", "exclusiveMinimum", "maximum") if word in schema]
    values = [edge + step * steps for edge in edges for steps in (-1, 0, 1)]
    return values + ([*schema["enum"], "x", 0, 1, True, False, [], {}] if "enum" in schema else [])


FIELDS = [
    (name, field)
    for name in sorted(READERS)
    for field, schema in describe()["components"]["schemas"][name]["properties"].items()
    if values_of(schema)
]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_value_is_described_as_it_is_read(name: str, field: str) -> None:
    reader, body = READERS[name], BODIES[name]
    for value in values_of(describe()["components"]["schemas"][name]["properties"][field]):
        request = {**body, field: value}
        assert is_read(reader, request, field) == validator(name).is_valid(request), value


def test_a_right_request_of_every_kind_is_described_as_such() -> None:
    assert READERS.keys() == BODIES.keys()
    for name, reader in READERS.items():
        reader.read(msgspec.json.encode(BODIES[name]))
        validator(name).validate(BODIES[name])


def test_there_are_bounds_to_test() -> None:
    fields = {field for _, field in FIELDS}
    assert {"n", "seed", "temperature", "top_p", "top_logprobs", "timeout", "best_of", "store"} <= fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ""),
        ("stop", []),
        ("stop", ["a"] * 65),
        ("stop", "a" * 32769),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"\u0663": 1}),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("model", 1),
        ("stream", 1),
        ("n", 1.0),
        ("n", True),
        ("repetition_detection", {"max_pattern_size": 0}),
        ("repetition_detection", {}),
        ("structured_outputs", {"json": {}}),
        ("structured_outputs", {"json": 1}),
        ("structured_outputs", {"regex": None, "json_object": True}),
        ("structured_outputs", {"jsn": {}}),
        ("response_format", {"type": "xml"}),
        ("prompt", []),
        ("prompt", [1]),
        ("prompt", [[1]]),
        ("prompt", ["a"]),
        ("prompt", ["a", 1]),
        ("prompt", None),
    ],
)
def test_what_is_within_a_value_is_described_as_it_is_read(field: str, value: Any) -> None:
    request = {**COMPLETION, field: value}
    try:
        COMPLETION_READER.read(msgspec.json.encode(request))
        is_right = True
    except InvalidRequestError:
        is_right = False
    assert validator("CompletionRequest").is_valid(request) == is_right


@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": True, "return_token_ids": True, "prompt_logprobs": 1, "n": 2}]
)
async def test_answers_are_as_described(extra: dict[str, Any]) -> None:
    client = Client(FakeLLM())
    completion_extra = extra | ({"logprobs": 1} if extra else {})
    chat = await client.post("/v1/chat/completions", CHAT | extra)
    completion = await client.post("/v1/completions", COMPLETION | completion_extra)
    validator("ChatCompletion").validate(chat.json)
    validator("Completion").validate(completion.json)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    without = {"prompt_logprobs": None}
    for path, body, name in (
        ("/v1/chat/completions", CHAT | extra, "ChatCompletionChunk"),
        ("/v1/completions", COMPLETION | completion_extra, "CompletionChunk"),
    ):
        for event in (await client.post(path, body | without | streamed)).events[:-1]:
            validator(name).validate(event)


async def test_errors_and_models_are_as_described() -> None:
    client = Client(FakeLLM())
    validator("ErrorResponse").validate((await client.post("/v1/completions", {})).json)
    validator("ModelList").validate((await client.get("/v1/models")).json)
    validator("ModelCard").validate((await client.get("/v1/models/small")).json)


def test_a_response_has_no_keys_that_are_not_described() -> None:
    """A new field of a class is a new property: nothing to keep in step by hand."""
    schemas = describe()["components"]["schemas"]
    properties = {
        "content", "role", "refusal", "annotations", "tool_calls", "function_call", "reasoning",
        "reasoning_content",
    }  # fmt: skip
    assert properties == set(schemas["AssistantMessage"]["properties"])
    assert schemas["Delta"].get("required") is None
    assert set(schemas["ModelCard"]["required"]) == set(schemas["ModelCard"]["properties"])
