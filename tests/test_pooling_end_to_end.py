"""Embeddings and scores over HTTP, by real models in real engine cores, for OpenAI's client."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
import transformers

from helpers_complaints import RESET, http_request
from helpers_model_sources import packaged_model
from helpers_pooling_models import save_random
from served import ServedModel, served, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
EMBEDDER = "minilm-l6"
CROSS_ENCODER = "cross-encoder"
TEXTS = ["A cat sat on the mat.", "A kitten was sitting on a rug.", "Interest rates rose in May.", "x"]


@pytest.fixture(scope="module")
def encoder_directory() -> Path:
    return Path(packaged_model(EMBEDDER).directory)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory, encoder_directory: Path) -> tuple[Path, Any]:
    """A random one with a real tokenizer, and where it lies."""
    directory = tmp_path_factory.mktemp("cross-encoder")
    model = save_random(
        directory, "BertForSequenceClassification", "Bert", vocab_size=30522, num_labels=1, pad_token_id=0,
        max_position_embeddings=512,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(encoder_directory / name, directory)
    return directory, model


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, cross_encoder: tuple[Path, Any]
) -> Iterator[ServedModel]:
    """Both models; the embedder is the default."""
    second = {"model": str(cross_encoder[0]), "served_model_name": CROSS_ENCODER}
    flags = ["--model", EMBEDDER, "--model", json.dumps(second), "--dtype", "float32"]
    with served(tmp_path_factory.mktemp("server"), flags) as running:
        yield running
        assert running.terminate() == 0, running.log
        assert "Traceback" not in running.log, running.log


@pytest.fixture
def client(server: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed_by_transformers(directory: Path, texts: list[str]) -> torch.Tensor:
    """The mean of the hidden states, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt", truncation=True)).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
    return torch.stack(rows)


def test_the_client_gets_what_the_model_gives(client: openai.OpenAI, encoder_directory: Path) -> None:
    """It asks for base64 if nothing else is said."""
    expected = embed_by_transformers(encoder_directory, TEXTS)
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=EMBEDDER, input=TEXTS, **options)  # type: ignore[arg-type]
        found = torch.tensor([item.embedding for item in answer.data])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert [item.index for item in answer.data] == [0, 1, 2, 3]
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder_directory)
    token_ids = tokenizer(TEXTS)["input_ids"]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, token_ids))
    by_tokens = client.embeddings.create(model=EMBEDDER, input=token_ids)
    found = torch.tensor([item.embedding for item in by_tokens.data])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_as_many_texts_as_are_allowed(client: openai.OpenAI, server: ServedModel) -> None:
    before = server.metric("request_success_total")
    answer = client.embeddings.create(model=EMBEDDER, input=["one", "two"] * 1024, encoding_format="float")
    assert len(answer.data) == 2048
    assert answer.data[2047].embedding == pytest.approx(answer.data[1].embedding, abs=1e-6)
    assert server.metric("request_success_total") > before


def test_what_fits_comes_first(server: ServedModel) -> None:
    body = {"model": EMBEDDER, "query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}
    status, answer = server.request("POST", "/v2/rerank", body)
    assert status == 200
    assert answer["results"][0]["document"]["text"] == TEXTS[1]


def test_scores_are_those_of_the_cross_encoder(server: ServedModel, cross_encoder: tuple[Path, Any]) -> None:
    directory, model = cross_encoder
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        logits = [model(**tokenizer(TEXTS[0], text, return_tensors="pt")).logits[0, 0] for text in TEXTS]
    body = {"model": CROSS_ENCODER, "text_1": TEXTS[0], "text_2": TEXTS}
    status, answer = server.request("POST", "/score", body)
    assert status == 200
    found = torch.tensor([item["score"] for item in answer["data"]])
    torch.testing.assert_close(found, torch.stack(logits).sigmoid(), atol=1e-4, rtol=0)
    _, raw = server.request("POST", "/v1/score", body | {"use_activation": False})
    found = torch.tensor([item["score"] for item in raw["data"]])
    torch.testing.assert_close(found, torch.stack(logits), atol=1e-4, rtol=0)


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]") as caught:
        client.embeddings.create(model=EMBEDDER, input=["a", "word " * 600])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    with pytest.raises(openai.BadRequestError, match="dimensions must be not set"):
        client.embeddings.create(model=EMBEDDER, input="a", dimensions=5)
    with pytest.raises(openai.BadRequestError, match="Here these can: 'minilm-l6'"):
        client.embeddings.create(model=CROSS_ENCODER, input="a")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


@pytest.mark.parametrize("what", ["example", "document"])
def test_what_is_shown_works(server: ServedModel, what: str) -> None:
    if what == "example":
        command = [sys.executable, str(ROOT / "examples" / "embeddings.py"), server.url]
    else:
        (shown,) = re.findall(
            r"^```console\n(.*?)^```$", (ROOT / "docs" / "pooling.md").read_text(), re.MULTILINE | re.DOTALL
        )
        command = ["bash", "-c", shown.replace("http://127.0.0.1:8000", server.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in done.stdout


def test_a_client_that_leaves_ends_all_of_its_texts(server: ServedModel) -> None:
    """2048 texts of 250 tokens would take a minute."""
    body = {"model": EMBEDDER, "input": ["word " * 250] * 2048}
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(http_request("/v1/embeddings", body))
        wait_for(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting"))
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    server.wait_until_idle()
    assert server.request("POST", "/v1/embeddings", {"model": EMBEDDER, "input": "a"})[0] == 200
