"""lm-eval's `local-completions` on local tasks: its log-likelihoods are those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

if TYPE_CHECKING:
    from endpoint import Endpoint

HERE = Path(__file__).parent

TOLERANCE = 1e-3
"""Of a token's log-likelihood."""

DOCUMENTS = [
    {"text": "The capital of France is", "choices": [" Paris", " a dog named Rex", " blue"], "answer": 0},
    {"text": "Water boils at", "choices": [" night in the sea", " 100 degrees Celsius"], "answer": 1},
    {"text": "Das schöne Mädchen aß", "choices": [" einen Apfel 🍎.", " 龜"], "answer": 0},
    {"text": "def add(a, b):\n    return", "choices": [" a + b\n", " None\n"], "answer": 0},
]


def reference(model: str, pairs: Any = None) -> Any:
    """See reference.py."""
    done = subprocess.run(
        [os.environ["TRIOSERVE_PYTHON"], HERE / "reference.py", model],
        input=json.dumps(pairs), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results(text: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", text.key)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder))
        documents = folder / "documents.jsonl"
        documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
        tasks = [task | {"dataset_kwargs": {"data_files": {"test": str(documents)}}} for task in TASKS]
        arguments = {
            "base_url": f"{text.api}/completions",
            "model": text.model,
            "tokenizer_backend": "huggingface",
            "tokenizer": reference(text.model),
            "tokenized_requests": True,
            "num_concurrent": 2,
            "max_retries": 1,
        }
        return lm_eval.simple_evaluate(
            "local-completions", model_args=arguments, tasks=tasks, bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )  # fmt: skip


COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}

TASKS: list[dict[str, Any]] = [
    COMMON
    | {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    COMMON
    | {
        "task": "rolling",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}{{choices[answer]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    COMMON
    | {
        "task": "generation",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
]


def test_choices(results: Any, text: Endpoint) -> None:
    samples = results["samples"]["choices"]
    pairs = [pair for sample in samples for pair in sample["arguments"]]
    found = [float(answer[0][0]) for sample in samples for answer in sample["resps"]]
    assert len(pairs) == sum(len(document["choices"]) for document in DOCUMENTS)
    check(found, reference(text.model, pairs))


def test_whole_texts(results: Any, text: Endpoint) -> None:
    samples = results["samples"]["rolling"]
    pairs = [("", sample["arguments"][0][0]) for sample in samples]
    check([float(sample["resps"][0][0]) for sample in samples], reference(text.model, pairs))


def test_generation(results: Any) -> None:
    answers = [sample["resps"][0][0] for sample in results["samples"]["generation"]]
    assert "Paris" in answers[0]
    assert not any("\n" in answer or "." in answer for answer in answers)


def check(found: list[float], expected: list[list[float]]) -> None:
    for score, tokens in zip(found, expected, strict=True):
        assert score == pytest.approx(sum(tokens), rel=0, abs=TOLERANCE * len(tokens))
