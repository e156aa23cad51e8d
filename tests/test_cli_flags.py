"""Flags are the fields of EngineArgs and ServerArgs; a mistake is one line that says what is allowed."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest

from trioserve.args import RETIRED, EngineArgs
from trioserve.cli.serve_command import parse
from trioserve.config import (
    GenerationDefaults,
    LogConfig,
    ReasoningConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from trioserve.server_args import ServerArgs


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIOSERVE_API_KEY", raising=False)


def test_without_flags_all_is_as_in_python() -> None:
    assert parse([]) == ([EngineArgs()], ServerArgs())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["some/model"], {"model": "some/model"}),
        (["--model", "some/model"], {"model": "some/model"}),
        (["some/model", "--model", "some/model"], {"model": "some/model"}),
        (["--threads", "3", "some/model"], {"model": "some/model", "threads": 3}),
        (["--max-model-len", "8k"], {"max_model_len": 8000}),
        (["--max_model_len=8K"], {"max_model_len": 8192}),
        (["--max-model-len", "auto"], {"max_model_len": None}),
        (["--kv-cache-memory", "2GiB"], {"kv_cache_memory": 2**31}),
        (["--startup-timeout", "2.5"], {"startup_timeout": 2.5}),
        (["--dtype", "bf16"], {"dtype": "bfloat16"}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no_enable_prefix_caching", "--enable_prefix_caching"], {"enable_prefix_caching": True}),
        (
            ["--served-model-name", "a", "b", "--served-model-name", "c"],
            {"served_model_name": ("a", "b", "c")},
        ),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        (["--log", '{"level": "debug"}'], {"log": LogConfig(level="debug")}),
        (["--log.level", "debug", "--log.requests"], {"log": LogConfig(level="debug", requests=True)}),
        (
            ["--no-log.access", "--log.stats_interval", "0"],
            {"log": LogConfig(access=False, stats_interval=0)},
        ),
        (
            ["--log.level=error", "--log", '{"level": "debug", "requests": true}'],
            {"log": LogConfig(level="error", requests=True)},
        ),
        (
            ["--override-generation-config.temperature", "0.2", "--override_generation_config.top_k=5"],
            {"override_generation_config": GenerationDefaults(temperature=0.2, top_k=5)},
        ),
        (["--scheduling-policy", "deadline"], {"scheduling_policy": "deadline"}),
        (["--long-prefill-token-threshold", "1k"], {"long_prefill_token_threshold": 1000}),
        (["--prefill-beside-decodes", "96"], {"prefill_beside_decodes": 96}),
        (["--max-long-partial-prefills", "2"], {"max_long_partial_prefills": 2}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--max-logprobs", "-1"], {"max_logprobs": -1}),
        (["--logits-processors", "a.b:C", "d:E"], {"logits_processors": ("a.b:C", "d:E")}),
        (["--speculative-config", '{"method": "ngram"}'], {"speculative_config": SpeculativeConfig()}),
        (
            ["--speculative-config.num_speculative_tokens", "7", "--speculative-config.prompt-lookup-max=3"],
            {"speculative_config": SpeculativeConfig(num_speculative_tokens=7, prompt_lookup_max=3)},
        ),
        (
            ["--speculative_config", '{"prompt_lookup_min": 1}', "--speculative_config.method", "ngram"],
            {"speculative_config": SpeculativeConfig(prompt_lookup_min=1)},
        ),
        (
            ["--no-structured-outputs-config.jump-ahead", "--structured-outputs-config.compile-timeout", "2"],
            {"structured_outputs_config": StructuredOutputsConfig(jump_ahead=False, compile_timeout=2.0)},
        ),
        (
            ["--structured-outputs-config.disable_any_whitespace", "true", "some/model"],
            {
                "structured_outputs_config": StructuredOutputsConfig(disable_any_whitespace=True),
                "model": "some/model",
            },
        ),
        (["--log.access", "false", "--log.requests=true"], {"log": LogConfig(access=False, requests=True)}),
        (["--log.requests=false", "--log.access", "m"], {"log": LogConfig(), "model": "m"}),
        (["--log.requests", "--", "true"], {"log": LogConfig(requests=True), "model": "true"}),
        (["--reasoning-config.start", "<t>"], {"reasoning_config": ReasoningConfig(start="<t>")}),
        (["--reasoning-config", "{}"], {"reasoning_config": ReasoningConfig()}),
        (["--tokenizer", "a_b", "--revision=c_d=e_f"], {"tokenizer": "a_b", "revision": "c_d=e_f"}),
    ],
)
def test_engine_flags(flags: list[str], expected: dict[str, Any]) -> None:
    assert parse(flags)[0] == [EngineArgs(**expected)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--model", "a", "--model=b"], [{"model": "a"}, {"model": "b"}]),
        (
            ["--dtype", "float32", "--model", '{"model": "a", "dtype": "bfloat16"}', "--model", "b"],
            [{"model": "a", "dtype": "bfloat16"}, {"model": "b", "dtype": "float32"}],
        ),
        (
            ["--model", '{"model": "a", "served_model_name": "x"}', "--model", "a", "--threads", "2"],
            [{"model": "a", "served_model_name": ("x",), "threads": 2}, {"model": "a", "threads": 2}],
        ),
        (['{"model": "a", "max_model_len": "8k"}'], [{"model": "a", "max_model_len": 8000}]),
        (
            ["--model", '{"model": "a", "speculative_config": {"method": "ngram"}}'],
            [{"model": "a", "speculative_config": {"method": "ngram"}}],
        ),
    ],
)
def test_several_models(flags: list[str], expected: list[dict[str, Any]]) -> None:
    assert parse(flags)[0] == [EngineArgs(**args) for args in expected]


def test_server_flags() -> None:
    flags = ["m", "--host", "::1", "--port", "0", "--api-key", "a", "b", "--max-body-size", "1MiB"]
    models, server_args = parse(flags)
    assert models == [EngineArgs(model="m")]
    assert server_args == ServerArgs(host="::1", port=0, api_key=("a", "b"), max_body_size=2**20)


def test_defaults_of_several_values_are_shown_as_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "[/health /health/live /health/ready /ping /docs]" in text
    assert "[GET POST OPTIONS]" in text


def test_every_field_has_a_flag_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse(["--help"])
    assert exited.value.code == 0
    text = " ".join(re.sub(r"-\n +", "-", capsys.readouterr().out).split())
    for schema in (EngineArgs, ServerArgs):
        for attribute in attrs.fields(schema):
            assert f"--{attribute.name.replace('_', '-')}" in text
            assert attribute.metadata["help"] in text
    assert "port to listen on; 0 takes a free one [8000]" in text
    assert "debug, info, warning, error [info]" in text
    for name in RETIRED:
        assert name.replace("_", "-") not in text


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exited:
        parse(flags)
    assert exited.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "x"], "--port: must be an integer from 0 to 65535, got 'x'"),
        (["--port=99999"], "--port: must be an integer from 0 to 65535, got '99999'"),
        (
            ["--max_model_len", "x"],
            "--max-model-len: must be an integer >= 1 (8k and 2GiB are understood), or 'auto', got 'x'",
        ),
        (["--seed", "-1"], "--seed: must be an integer >= 0 (8k and 2GiB are understood), got '-1'"),
        (["--dtype", "int8"], "--dtype: must be one of auto, bfloat16, float32, got 'int8'"),
        (["--engine", "x"], "--engine: must be one of process, inproc, got 'x'"),
        (["--host", ""], "--host: must be a non-empty string, got ''"),
        (["--log", "{"], "--log: must be a JSON object, got '{'"),
        (["--log", "3"], "--log: must be an object, got 3"),
        (
            ["--log.level", "loud"],
            "--log.level: must be one of 'debug', 'info', 'warning', 'error', got 'loud'",
        ),
        (["--log", '{"tempo": 1}'], "--log: has unknown keys: 'tempo'"),
        (
            ["--override-generation-config.temperature", "hot"],
            "--override-generation-config.temperature: must be a number, got 'hot'",
        ),
        (
            ["--scheduling-policy", "lifo"],
            "--scheduling-policy: must be one of fcfs, priority, deadline, got 'lifo'",
        ),
        (
            ["--speculative-config.num_speculative_tokens", "0"],
            "--speculative-config: num_speculative_tokens must be an integer >= 1, got 0",
        ),
        (
            ["--speculative-config", '{"method": "eagle"}'],
            "--speculative-config.method: must be one of 'ngram', got 'eagle'",
        ),
        (
            ["--speculative-config.prompt-lookup-max", "1"],
            "--speculative-config: prompt_lookup_min must be at most prompt_lookup_max (1), got 2",
        ),
        (["--max-model-length", "8k"], "--max-model-length: unknown flag; did you mean --max-model-len?"),
        (["--max_model"], "--max-model: unknown flag; did you mean --max-model-len?"),
        (["--prot=3"], "--prot: unknown flag; did you mean --port?"),
        (["--zzz"], "--zzz: unknown flag; see trioserve serve --help"),
        (["-x"], "-x: unknown flag; see trioserve serve --help"),
        (["--port"], "--port: needs a value: port to listen on; 0 takes a free one [8000]"),
        (["--log.access=no"], "--log.access/--no-log.access: takes no value, got 'no'"),
        (["a", "b"], "'b': not expected; one MODEL is taken, and values follow their flag"),
        (["a", "--model", "b"], "--model: must be the same as MODEL, 'a', got 'b'"),
        (["a", "--model", "a", "--model", "b"], "--model: must be the same as MODEL, 'a', got 'a, b'"),
        (
            ["--model", "a", "--model", "a"],
            "--model: each must have names of its own, got 'a' twice; give such models another name: "
            '{"model": ..., "served_model_name": ...}',
        ),
        (
            ["--model", "a", "--model", '{"model": "b", "enable_lora": true, "lora_modules": ["a=/x"]}'],
            "--model: each must have names of its own, got 'a' twice; give such models another name: "
            '{"model": ..., "served_model_name": ...}',
        ),
        (
            ["--model", '{"model": "a", "dtype": "int3"}'],
            "--model: dtype must be one of auto, bfloat16, float32, got 'int3', of 'a'",
        ),
        (
            ["--model", '{"model": "a"}', "--dtype", "int3"],
            "--dtype: must be one of auto, bfloat16, float32, got 'int3'",
        ),
        (["--model", '{"model": ""}'], "--model: must be a non-empty string, got ''"),
        (["--model", '{"model": "a", "dtyp": 1}'], "--model: 'dtyp': unknown key; did you mean dtype?"),
        (
            ["--model", '{"model": "a", "port": 1}'],
            "--model: 'port': unknown key; they are those of the flags, with _ for -",
        ),
        (
            ["--model", '{"model": "a", "log": {}}'],
            "--model: log is the same for all models, and a flag of its own",
        ),
        (["--model", "{}"], '--model: must have the key "model", got none'),
        (
            ["--model", "{a"],
            '--model: must be a name, or JSON such as {"model": "smollm2-135m", "max_num_seqs": 32}; this '
            "JSON is wrong: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(flags, capsys) == f"trioserve serve: {line}"


def test_names_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--por: unknown flag" in refusal(["--por", "1"], capsys)


def test_secrets_are_in_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["--api-key", "sesame", "--port", "x"], capsys)
    assert "sesame" not in line


def test_retired_flags_warn_and_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--swap-space", "4", "--enforce_eager", "some/model", "--no-enable-chunked-prefill"]
    assert parse(flags)[0] == [EngineArgs(model="some/model")]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is retired")[0] for line in lines] == [
        "trioserve serve: warning: --swap-space",
        "trioserve serve: warning: --enforce-eager",
        "trioserve serve: warning: --no-enable-chunked-prefill",
    ]
    assert RETIRED["swap_space"] in lines[0]


@pytest.mark.parametrize("name", sorted(RETIRED))
def test_every_retired_name_is_a_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = f"--{name.replace('_', '-')}"
    value = ["4"] if name == "swap_space" else []
    assert parse([flag, *value])[0] == [EngineArgs()]
    assert capsys.readouterr().err.startswith(f"trioserve serve: warning: {flag} is retired and ignored: ")


def test_the_api_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOSERVE_API_KEY", "from-env")
    assert parse([])[1] == ServerArgs(api_key="from-env")
    monkeypatch.setenv("TRIOSERVE_API_KEY", "from-env")
    assert parse(["--api-key", "from-flag"])[1] == ServerArgs(api_key="from-flag")
    monkeypatch.setenv("TRIOSERVE_API_KEY", "")
    assert parse([])[1].api_key == ()
