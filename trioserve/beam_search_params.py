"""How a beam search is to be run."""

from __future__ import annotations

import attrs

from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.validators import boolean, integer, number, one_of_class, plain

__all__ = ["BeamSearchParams"]


@attrs.frozen(kw_only=True)
class BeamSearchParams:
    """Validated at construction: a wrong value raises `InvalidRequestError`, which names the field."""

    beam_width: int = attrs.field(
        converter=plain, validator=integer("an integer from 1 to 64", least=1, most=64)
    )
    """Sequences that are kept after each token, and returned."""
    max_tokens: int = attrs.field(converter=plain, validator=integer("an integer >= 1", least=1))
    ignore_eos: bool = attrs.field(default=False, validator=boolean)
    temperature: float = attrs.field(
        default=0.0, converter=plain, validator=number("a number from 0 to 2", least=0, most=2)
    )
    """Divides the logits before they are scored; 0 is 1, as a search draws nothing."""
    length_penalty: float = attrs.field(default=1.0, converter=plain, validator=number("a finite number"))
    """A sequence's score is its logprobs' sum / length ** length_penalty."""
    include_stop_str_in_output: bool = attrs.field(default=False, validator=boolean)
    structured_outputs: StructuredOutputsParams | None = attrs.field(
        default=None, validator=one_of_class(StructuredOutputsParams)
    )
