"""`--model`, once or several times: each is a name, or JSON of what is particular to this model.

All other flags are what holds for models that do not say otherwise. Weighed were a file (one more format, and
another way to write each flag), flags with the model's name in them (`--minilm-l6.dtype`: names have dots and
slashes), and flags that count for the `--model` before them (their order would begin to matter). JSON has the
flags' own names and types, as everywhere else.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.args import DEFAULT_MODEL, EngineArgs
from trioserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trioserve.cli.flags import FlagParser

__all__ = ["HELP", "build_models"]

_EXAMPLE = '{"model": "smollm2-135m", "max_num_seqs": 32}'

HELP = f"given several times, several models, each as a name or as JSON with flags of its own: {_EXAMPLE}"

_OF_THE_SERVER = {"log"}
"""Fields that cannot differ from model to model."""


def build_models(parser: FlagParser, values: Mapping[str, Any]) -> list[EngineArgs]:
    """The arguments of each model; `values` are what the flags say, with a list, or one, as `model`. Exits,
    naming the flag, if something is wrong."""
    given = values.get("model", DEFAULT_MODEL)
    texts = [given] if isinstance(given, str) else given
    models = [_build(parser, text, values) for text in texts]
    _check_names(parser, models)
    return models


def _build(parser: FlagParser, text: str, values: Mapping[str, Any]) -> EngineArgs:
    own = _read(parser, text)
    try:
        return EngineArgs(**{**values, **own})
    except InvalidConfigError as error:
        if error.field.partition(".")[0] in own and error.field != "model":
            parser.error(f"--model: {str(error).removesuffix('.')}, of {own['model']!r}")
    return parser.build(EngineArgs, {**values, **own})


def _read(parser: FlagParser, text: str) -> dict[str, Any]:
    """What a model says of itself. It may have a token in it, so no message repeats it."""
    if not text.lstrip().startswith("{"):
        return {"model": text}
    try:
        own = json.loads(text)
    except ValueError as error:
        parser.error(f"--model: must be a name, or JSON such as {_EXAMPLE}; this JSON is wrong: {error}")
    if "model" not in own:
        parser.error(f'--model: must have the key "model", got {", ".join(own) or "none"}')
    known = attrs.fields_dict(EngineArgs).keys() - _OF_THE_SERVER
    for name in own:
        if name in _OF_THE_SERVER:
            parser.error(f"--model: {name} is the same for all models, and a flag of its own")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; they are those of the flags, with _ for -"
            parser.error(f"--model: {name!r}: unknown key{hint}")
    return dict(own)


def _check_names(parser: FlagParser, models: Sequence[EngineArgs]) -> None:
    """A request must find its model by the name."""
    counts = Counter(name for args in models for name in _names_of(args))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        parser.error(
            f"--model: each must have names of its own, got {twice[0]!r} twice; "
            f'give such models another name: {{"model": ..., "served_model_name": ...}}'
        )


def _names_of(args: EngineArgs) -> Iterator[str]:
    yield from set(args.served_model_name or (args.model,))
    yield from (module.name for module in args.lora_modules)
