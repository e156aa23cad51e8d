"""EngineArgs: what is accepted, what is refused and how, and what comes of it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve import LLM, EngineArgs, InvalidConfigError, InvalidRequestError, SamplingParams, ServerArgs
from trioserve.config import GenerationDefaults, LogConfig
from trioserve.quantities import parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (7, 7),
        ("7", 7),
        ("-1", -1),
        ("8k", 8000),
        ("8K", 8192),
        ("8Ki", 8192),
        ("1.5k", 1500),
        ("2GiB", 2**31),
        ("1gb", 10**9),
    ],
)
def test_quantities(text: int | str, number: int) -> None:
    assert parse_quantity(text) == number


@given(st.one_of(st.text(max_size=8), st.floats(), st.none(), st.booleans()))
def test_what_is_no_quantity_is_a_value_error(value: Any) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_quantity(value), int)


@pytest.mark.parametrize(
    ("values", "field", "text"),
    [
        ({"max_model_len": "long"}, "max_model_len", "'long'"),
        ({"max_model_len": 0}, "max_model_len", "integer >= 1"),
        ({"block_size": True}, "block_size", "True"),
        ({"dtype": "fp8"}, "dtype", "auto, bfloat16, float32"),
        ({"quantization": "awq"}, "quantization", "auto, none, int8, int4"),
        ({"quantization": "int4", "dtype": "float32"}, "quantization", "auto or none with dtype float32"),
        ({"engine": "thread"}, "engine", "process, inproc"),
        ({"startup_timeout": -1}, "startup_timeout", ">= 0"),
        ({"model": ""}, "model", "non-empty"),
        ({"log": {"level": "loud"}}, "log.level", "'debug'"),
        ({"log": {"levle": "info"}}, "log", "'levle'"),
        ({"log": "{"}, "log", "JSON"),
        (
            {"override_generation_config": {"temperature": "hot"}},
            "override_generation_config.temperature",
            "'hot'",
        ),
        ({"kv_cache_memory": "much"}, "kv_cache_memory", "'much'"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching", "true or false"),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_allowed(
    values: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        EngineArgs.from_dict(values)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "given_as",
    [LogConfig(level="debug"), {"level": "debug"}, '{"level": "debug"}'],
    ids=["object", "dict", "JSON"],
)
def test_a_nested_config_is_an_object_a_dict_or_json(given_as: Any) -> None:
    assert EngineArgs(log=given_as).create_engine_config().log.level == "debug"


def test_unknown_names_are_a_type_error_and_retired_ones_a_warning() -> None:
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        EngineArgs.from_dict({"tensor_paralel_size": 2})
    with pytest.warns(DeprecationWarning, match="swap_space"):
        args = EngineArgs.from_dict({"swap_space": 4, "seed": 5})
    assert args.seed == 5
    with pytest.raises(TypeError, match="modle"):
        LLM(modle="x")


def test_the_config_is_complete_and_frozen() -> None:
    config = EngineArgs(
        max_num_seqs=900, max_num_batched_tokens=100, max_model_len="4k"
    ).create_engine_config()
    assert config.model.served_model_names == ("smollm2-135m",)
    assert (
        config.scheduler.max_num_seqs == 100
    )  # each running sequence needs at least one token of the budget
    assert config.model.max_model_len == 4000
    assert config.threads >= 1
    with pytest.raises(AttributeError):
        config.threads = 3  # type: ignore[misc]


def test_secrets_do_not_show() -> None:
    assert "s3cret" not in repr(EngineArgs(hf_token="s3cret"))
    assert "s3cret" not in repr(EngineArgs(hf_token="s3cret").create_engine_config())
    assert "s3cret" not in repr(ServerArgs(api_key="s3cret"))


def test_the_users_generation_defaults_win() -> None:
    models = GenerationDefaults(temperature=0.6, top_k=40)
    assert models.overridden_by(GenerationDefaults(temperature=0.1)) == GenerationDefaults(
        temperature=0.1, top_k=40
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 1.5), ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
        ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 2**63), ("min_p", 1.5),
        ("max_tokens", 0), ("min_tokens", -1), ("logprobs", -2), ("prompt_logprobs", -2), ("logprobs", True),
        ("thinking_token_budget", -1), ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
        ("bad_words", ["a", ""]), ("logprob_token_ids", [-1]), ("logprob_token_ids", range(129)),
        ("flat_logprobs", 1), ("skip_reading_prefix_cache", 0),
        ("presence_penalty", 2.5), ("seed", 2**63),
        ("frequency_penalty", -3), ("repetition_penalty", 0), ("stop", [""]), ("stop", [3]),
        ("stop", "\ud800"), ("stop_token_ids", [-1]), ("stop_token_ids", ["x"]), ("logit_bias", {"x": 1}),
        ("logit_bias", [1]), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_sampling_params_name_the_wrong_field_at_construction(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field


def test_sampling_params_that_contradict_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_sampling_params_take_the_forms_people_use() -> None:
    params = SamplingParams(stop="END", logit_bias={"5": 300}, stop_token_ids=[1, 2])
    assert params.stop == ("END",)
    assert params.logit_bias == {5: 100.0}
    assert params.stop_token_ids == (1, 2)
