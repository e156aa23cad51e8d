"""Models from a hub, against a stand-in of its HTTP interface on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from helpers_model_sources import model_config
from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources import SilentProgress, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trioserve.config import ResolvedModel

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b'{"eos_token_id": 7}',
    "model-1.safetensors": b"first",
    "model-2.safetensors": b"second",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
UNWANTED = {
    "pytorch_model.bin": b"other",
    "consolidated.safetensors": b"duplicate",
    "onnx/config.json": b"{}",
    "README.md": b"",
}


@attrs.define
class Hub:
    """Repositories by id, each with its revisions; and what was asked for."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = attrs.Factory(dict)
    token: str | None = None
    requests: list[str] = attrs.Factory(list)
    url: str = ""
    hold: threading.Event = attrs.Factory(threading.Event)
    """Weights are sent when it is set."""
    holding: threading.Event = attrs.Factory(threading.Event)

    def downloads(self) -> set[str]:
        return {
            path.rsplit("/", 1)[1]
            for path in self.requests
            if path.startswith("GET /") and "/resolve/" in path
        }


def commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        status, headers, body = self._find(path)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _find(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo = self.hub.repositories.get("/".join(parts[:2]))
        if self.hub.token and self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revisions = {name: files for branch, files in repo.items() for name in (branch, commit(branch))}
        kind, revision = parts[2:4]
        if revision not in revisions:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        sha = next(commit(branch) for branch in repo if revision in {branch, commit(branch)})
        files = revisions[revision]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "/".join(parts[:2]), "sha": sha, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        return self._file(files, "/".join(parts[4:]), sha)

    def _file(self, files: dict[str, bytes], name: str, sha: str) -> tuple[int, dict[str, str], bytes]:
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if self.command == "GET" and name.endswith(".safetensors"):
            self.hub.holding.set()
            self.hub.hold.wait(30)
        etag = hashlib.sha1(files[name]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": sha}, files[name]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    hub.hold.set()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        yield hub
        hub.hold.set()
        server.shutdown()
        thread.join()


def resolve(name: str, **changes: Any) -> ResolvedModel:
    return resolve_model(model_config(name, **changes), SilentProgress())


def test_a_model_is_fetched_with_what_serving_needs(hub: Hub) -> None:
    hub.repositories["owner/tiny"] = {"main": FILES | UNWANTED}
    found = resolve("owner/tiny")
    assert (found.architecture, found.dtype, found.eos_token_ids) == ("LlamaForCausalLM", "float32", (7,))
    assert found.directory.endswith(commit("main"))
    assert hub.downloads() == set(FILES)


def test_offline_it_is_taken_from_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["owner/tiny"] = {"main": FILES}
    found = resolve("owner/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert resolve("owner/tiny") == found
    assert hub.requests == []


def test_with_the_hub_away_it_is_taken_from_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["owner/tiny"] = {"main": FILES}
    found = resolve("owner/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert resolve("owner/tiny") == found


def test_offline_without_a_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelSourceError, match=r"owner/tiny.*local cache.*HF_HUB_OFFLINE"):
        resolve("owner/tiny")
    assert hub.requests == []


def test_a_revision(hub: Hub) -> None:
    old = FILES | {"config.json": json.dumps(CONFIG | {"vocab_size": 200}).encode()}
    hub.repositories["owner/tiny"] = {"main": FILES, "v1": old}
    assert resolve("owner/tiny").vocab_size == 300
    assert resolve("owner/tiny", revision="v1").vocab_size == 200
    assert resolve("owner/tiny", revision=commit("v1")).vocab_size == 200
    with pytest.raises(ModelSourceError, match=r"owner/tiny.*no revision 'v2'"):
        resolve("owner/tiny", revision="v2")


def test_a_token(hub: Hub) -> None:
    hub.repositories["owner/tiny"] = {"main": FILES}
    hub.token = "hf_secret"
    with pytest.raises(ModelSourceError, match=r"owner/tiny.*gated.*--hf-token"):
        resolve("owner/tiny")
    with pytest.raises(ModelSourceError) as caught:
        resolve("owner/tiny", hf_token="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    assert resolve("owner/tiny", hf_token="hf_secret").vocab_size == 300


def test_an_unknown_model(hub: Hub) -> None:
    with pytest.raises(ModelSourceError, match=r"no directory 'owner/nothing'.*hub has no such model"):
        resolve("owner/nothing")


def test_no_weights_are_fetched_of_what_cannot_be_served(hub: Hub) -> None:
    config = json.dumps(CONFIG | {"architectures": ["MambaForCausalLM"]}).encode()
    hub.repositories["owner/mamba"] = {"main": FILES | {"config.json": config}}
    with pytest.raises(ModelNotSupportedError, match=r"owner/mamba.*MambaForCausalLM.*LlamaForCausalLM"):
        resolve("owner/mamba")
    assert hub.downloads() == {"config.json"}


def test_files_of_sentence_transformers_are_fetched_too(hub: Hub) -> None:
    config = CONFIG | {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8}
    modules = [{"type": "Transformer"}, {"type": "Pooling", "path": "1_Pooling"}]
    prompts = {"prompts": {"query": "query: "}}
    files = FILES | {
        "config.json": json.dumps(config).encode(),
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": b'{"pooling_mode": "lasttoken"}',
        "sentence_bert_config.json": b'{"max_seq_length": 64}',
        "config_sentence_transformers.json": json.dumps(prompts).encode(),
    }
    hub.repositories["owner/sentences"] = {"main": files | UNWANTED}
    found = resolve("owner/sentences")
    assert (found.runner, found.max_model_len) == ("pooling", 64)
    assert found.pooler is not None
    assert (found.pooler.pooling_type, found.pooler.prompts) == ("last", {"query": "query: "})
    assert hub.downloads() == {name.rsplit("/", 1)[-1] for name in files}


def test_what_is_to_embed_need_not_be_able_to_generate(hub: Hub) -> None:
    config = json.dumps(CONFIG | {"architectures": ["MistralForCausalLM"], "hidden_size": 8}).encode()
    hub.repositories["owner/mistral"] = {"main": FILES | {"config.json": config}}
    assert resolve("owner/mistral", convert="embed").runner == "pooling"


def test_a_repository_that_is_no_model(hub: Hub) -> None:
    hub.repositories["owner/gguf"] = {"main": {"model.gguf": b"GGUF"}}
    with pytest.raises(ModelSourceError, match=r"owner/gguf.*no config\.json"):
        resolve("owner/gguf")


def test_a_tokenizer_of_its_own(hub: Hub) -> None:
    without = {name: data for name, data in FILES.items() if name != "tokenizer.json"}
    hub.repositories["owner/tiny"] = {"v1": without}
    hub.repositories["owner/words"] = {"main": FILES}
    found = resolve("owner/tiny", revision="v1", tokenizer="owner/words")
    assert "tiny" in found.directory
    assert "words" in found.tokenizer_directory
    words = [path for path in hub.requests if path.startswith("GET /owner/words/")]
    assert sorted(path.rsplit("/", 1)[1] for path in words) == ["chat_template.jinja", "tokenizer.json"]


async def test_a_download_can_be_cancelled(hub: Hub) -> None:
    hub.repositories["owner/tiny"] = {"main": FILES}
    hub.hold.clear()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def run() -> None:
            await trio.to_thread.run_sync(resolve, "owner/tiny")
            raise AssertionError("it was not cancelled")

        await trio.to_thread.run_sync(hub.holding.wait, 30)
        nursery.cancel_scope.cancel()
    hub.hold.set()
    assert resolve("owner/tiny").vocab_size == 300
