"""POST /pooling, /classify and /v2/embed, and what /invocations makes of their bodies."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from typing import Any

import pytest
import torch

from helpers_api import Client, FakeLLM, Reply
from helpers_pooling_api import SIZE, FakePoolingLLM, values_of
from trioserve.config import Pooler
from trioserve.frontend.prompts import TextPrompt, Truncation
from trioserve.pooling_params import PoolingParams
from trioserve.server.pooling.narrow_numbers import pack_narrow, pack_signs

EMBED = "/v2/embed"


async def ask(llm: FakeLLM, path: str, **request: Any) -> Reply:
    return await Client(llm).post(path, request)


# /pooling


async def test_the_default_task_is_the_models_first() -> None:
    llm = FakePoolingLLM()
    reply = (await ask(llm, "/pooling", input="abc")).json
    assert reply["data"] == [{"index": 0, "object": "pooling", "data": list(values_of(3))}]
    assert (reply["object"], reply["usage"]) == ("list", {"prompt_tokens": 1, "total_tokens": 1})
    assert reply["id"].startswith("pool-")
    assert llm.pooled[0].params == PoolingParams()


async def test_a_result_per_token() -> None:
    llm = FakePoolingLLM()
    fields = {"input": ["a b", "c"], "task": "token_embed"}
    reply = (await ask(llm, "/pooling", **fields)).json
    assert reply["data"][0]["data"] == [list(values_of(3))] * 2
    assert reply["data"][1]["data"] == [list(values_of(1))]
    packed = (await ask(llm, "/pooling", **fields, encoding_format="base64")).json["data"]
    assert [item["shape"] for item in packed] == [[2, SIZE], [1, SIZE]]
    assert base64.b64decode(packed[0]["data"]) == values_of(3).tobytes() * 2
    binary = await ask(llm, "/pooling", **fields, encoding_format="bytes")
    assert binary.body == values_of(3).tobytes() * 2 + values_of(1).tobytes()
    extents = json.loads(binary.headers["metadata"])["data"]
    assert [extent["shape"] for extent in extents] == [[2, SIZE], [1, SIZE]]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"task": "score"}, "task", "one of 'embed', 'token_embed', 'classify', 'token_classify'"),
        ({"task": "classify"}, "task", "does not support task 'classify'"),
        ({"task": "classify", "dimensions": 4}, "dimensions", "only allowed with the task embed"),
        ({"input": ""}, "input", "must not be an empty string"),
    ],
)
async def test_what_is_wrong_with_pooling_is_said(fields: dict[str, Any], param: str, words: str) -> None:
    reply = await ask(FakePoolingLLM(), "/pooling", **{"input": "a", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


# /classify


async def test_classes() -> None:
    llm = FakePoolingLLM("classify")
    reply = (await ask(llm, "/classify", input=["a", "b c"])).json
    assert reply["id"].startswith("classify-")
    first = reply["data"][0]
    assert (first["index"], first["label"], first["num_classes"]) == (0, "good", 2)
    assert first["probs"] == pytest.approx([0.2689414, 0.7310586])
    assert reply["usage"]["prompt_tokens"] == 3
    assert llm.pooled[0].params == PoolingParams(task="classify")


async def test_raw_values_and_classes_without_names() -> None:
    llm = FakePoolingLLM("classify", pooler=Pooler(pooling_type="cls", hidden_size=SIZE))
    reply = (await ask(llm, "/classify", input="abc", use_activation=False)).json
    assert reply["data"] == [{"index": 0, "label": None, "probs": [-2.0, 3.0], "num_classes": 2}]
    assert llm.pooled[0].params.use_activation is False


# /v2/embed


async def test_cohere_embeddings() -> None:
    llm = FakePoolingLLM()
    reply = (await ask(llm, EMBED, texts=["abc", "d e"], input_type="search_query", model="small")).json
    assert reply["embeddings"] == {"float": [list(values_of(3)), list(values_of(3))]}
    assert (reply["texts"], reply["response_type"]) == (["abc", "d e"], "embeddings_by_type")
    assert reply["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 3}}
    (call,) = llm.pooled
    assert call.prompts[0] == TextPrompt("abc", truncation=Truncation(64, keeps_end=False))
    assert (call.params, call.prompt_name) == (PoolingParams(task="embed"), None)


async def test_cohere_types() -> None:
    types = ["ubinary", "binary", "base64", "float"]
    llm = FakePoolingLLM()
    found = (await ask(llm, EMBED, texts=["abc"], embedding_types=types)).json["embeddings"]
    assert found["float"] == [list(values_of(3))]
    assert base64.b64decode(found["base64"][0]) == values_of(3).tobytes()
    assert found["ubinary"] == [[0b11100000]]  # 3 2 1 0 -1 ...
    assert found["binary"] == [[0b11100000 - 128]]


async def test_cohere_fields_reach_the_engine() -> None:
    pooler = Pooler(pooling_type="mean", hidden_size=SIZE, prompts={"query": "q: ", "bitext": "b: "})
    llm = FakePoolingLLM(pooler=pooler)
    inputs = [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    await ask(llm, EMBED, inputs=inputs, input_type="search_query", output_dimension=4, max_tokens=9,
              truncate="START", priority=2)  # fmt: skip
    await ask(llm, EMBED, texts=["a"], input_type="bitext", truncate="NONE")
    await ask(llm, EMBED, texts=["a"], input_type="search_document")
    first, second, third = llm.pooled
    assert first.prompts == [TextPrompt("a\nb", truncation=Truncation(9, keeps_end=True))]
    assert (first.params.dimensions, first.priority, first.prompt_name) == (4, 2, "query")
    assert (second.prompts, second.prompt_name) == ([TextPrompt("a")], "bitext")
    assert third.prompt_name is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"texts": None}, "texts", "Exactly one of texts and inputs must be given"),
        ({"inputs": []}, "texts", "Exactly one of texts and inputs must be given"),
        ({"texts": []}, "texts", "at least one text"),
        ({"texts": [""]}, "texts[0]", "must not be an empty string"),
        ({"texts": ["a"] * 2049}, "texts", "at most 2048 texts"),
        ({"input_type": "image"}, "input_type", "one of classification, clustering, search_document"),
        ({"embedding_types": ["int8"]}, "embedding_types[0]", "one of 'float', 'binary'"),
        ({"output_dimension": 0}, "output_dimension", "output_dimension must be an integer >= 1"),
        ({"output_dimension": SIZE - 1}, "output_dimension", "output_dimension must be another"),
        ({"output_dimension": 4, "embedding_types": ["binary"]}, "embedding_types", "a multiple of 8"),
        ({"truncate": "MIDDLE"}, "truncate", "one of 'NONE', 'START', 'END'"),
        ({"max_tokens": 65}, "max_tokens", "at most 64"),
        ({"max_tokens": 4, "truncate": "NONE"}, "max_tokens", "only allowed where truncate"),
        ({"images": ["data:"]}, "images", "images must be null or empty"),
    ],
)
async def test_what_is_wrong_for_cohere_is_said(fields: dict[str, Any], param: str, words: str) -> None:
    reply = await ask(FakePoolingLLM(), EMBED, **{"texts": ["a"], **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


# /invocations


@pytest.mark.parametrize(
    ("tasks", "body", "prefix"),
    [
        (("embed", "score"), {"input": "a"}, "embd"),
        (("embed", "score"), {"messages": [{"role": "user", "content": "a"}]}, "embd"),
        (("embed", "score"), {"texts": ["a"]}, "embd"),
        (("embed", "score"), {"input": "a", "task": "embed"}, "pool"),
        (("embed", "score"), {"query": "a", "documents": ["b"]}, "rerank"),
        (("embed", "score"), {"text_1": "a", "text_2": ["b"]}, "score"),
        (("classify",), {"input": "a"}, "classify"),
        (("token_embed",), {"input": "a"}, "pool"),
    ],
)
async def test_invocations(tasks: Any, body: dict[str, Any], prefix: str) -> None:
    reply = await ask(FakePoolingLLM(*tasks), "/invocations", **body)
    assert reply.status == 200
    assert reply.json["id"].startswith(f"{prefix}-")


# Numbers

_TORCH = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", _TORCH)
def test_numbers_are_rounded_as_by_torch(dtype: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-9, 2.5, 5000)
    values = torch.randn(5000, generator=generator) * scales
    edges = torch.tensor(
        [0.0, -0.0, 1.0, 1.0625, 1.1875, 448.0, -448.0, 2**-9, 2**-10, 2**-16, 2**-17, 432.0]
    )
    values = torch.cat([values[values.abs() <= 448], edges])
    wanted = values.to(_TORCH[dtype]).view(torch.uint8).numpy().tobytes()
    assert pack_narrow(array("f", values.tolist()), dtype, swaps=False) == wanted


def test_numbers_beyond_a_type() -> None:
    beyond = array("f", [1e9, -1e9])
    assert pack_narrow(beyond, "fp8_e4m3", swaps=False) == bytes([0x7E, 0xFE])
    assert pack_narrow(beyond, "fp8_e5m2", swaps=False) == bytes([0x7B, 0xFB])
    assert struct.unpack("=2e", pack_narrow(beyond, "float16", swaps=False)) == (float("inf"), -float("inf"))


def test_orders_of_bytes_and_signs() -> None:
    one = array("f", [1.0])
    assert pack_narrow(one, "bfloat16", swaps=True) == pack_narrow(one, "bfloat16", swaps=False)[::-1]
    assert pack_signs(array("f", [1, 0, -1, 2, 3, -1, -1, 1, 5])) == bytes([0b10011001, 0b10000000])
