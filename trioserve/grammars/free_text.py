"""Free text, up to a mark, before what has a form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trioserve.grammars.structural_tags import special_token

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["after_free_text"]

_FORM = "form"


def after_free_text(grammar: str, tokenizer: LLTokenizer, *, start: str | None, end: str) -> str:
    """`grammar` (in llguidance's notation) after text that ends with the first `end`, and white space. With
    `start` the text begins with that, or there is none."""
    special = special_token(end, tokenizer)
    free = f"TEXT {special} SPACE" if special else "until_end SPACE"
    if start is not None:
        free = f"({special_token(start, tokenizer) or json.dumps(start)} {free})?"
    rules = [f"start: {free} @{_FORM}", "TEXT: /(.|\\n)*/", "SPACE: /\\s{0,8}/"]
    if not special:
        rules.append(f"until_end[lazy]: /(.|\\n)*/ {json.dumps(end)}")
    first, *others = _grammars(grammar)
    whole = [{"lark_grammar": "\n".join([*rules, ""])}, {**first, "name": _FORM}, *others]
    return json.dumps({"grammars": whole})


def _grammars(grammar: str) -> list[dict[str, object]]:
    """Those of llguidance's JSON; what is not JSON is Lark's notation."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    grammars: list[dict[str, object]] = json.loads(grammar)["grammars"]
    return grammars
