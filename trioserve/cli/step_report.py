"""One step of the engine core, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.core.request import Request, Share
from trioserve.worker.batch import ScheduledSequence, SequenceOutput
from trioserve.worker.kv_layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.worker.kv_layout import KVCacheLayout

__all__ = ["Part", "Step", "describe_step"]


@attrs.frozen(eq=False)
class Part:
    """What the step did for one request."""

    request: Request
    """As the step left it."""
    share: Share
    sequence: ScheduledSequence
    output: SequenceOutput
    tables_before: Sequence[Sequence[int]]


@attrs.frozen(eq=False)
class Step:
    number: int
    parts: Sequence[Part]
    seconds: dict[str, float]
    """What took how long, in the order in which it happened."""


_PHASES = {
    "schedule, launch": "shares, blocks and drafts; token ids are read",
    "plan ahead": "shares and blocks of the next step, while this one runs",
    "forward, sample": "all tokens through the model; what comes next is drawn",
    "update": "tokens in, stops found, blocks given back",
}


def describe_step(step: Step, tokenizer: Tokenizer, layout: KVCacheLayout, budget: int) -> Iterator[str]:
    """Lines. `budget` is the most tokens that a step may compute."""
    num_tokens = sum(part.share.num_tokens for part in step.parts)
    yield f"step {step.number}: {num_tokens} tokens of {len(step.parts)} requests, of at most {budget}"
    for part in step.parts:
        yield ""
        yield from _describe_part(part, tokenizer, layout)
    yield ""
    yield "times, ms"
    for name, seconds in step.seconds.items():
        yield f"  {name:16} {1000 * seconds:8.2f}   {_PHASES[name]}"


def _describe_part(part: Part, tokenizer: Tokenizer, layout: KVCacheLayout) -> Iterator[str]:
    request, share = part.request, part.share
    prompt = request.prompt_token_ids
    num_new = len(part.output.tokens)
    kind = "prefill" if share.start < len(prompt) else "decode"
    yield f"request {request.request_id}, {kind}: ...{tokenizer.decode(prompt[-8:])!r}"
    yield (
        f"  known     {len(prompt)} prompt tokens ({request.num_cached_tokens} found in the prefix cache), "
        f"{len(request.output_token_ids) - num_new} generated"
    )
    yield f"  computes  {_interval(share.start, share.start + share.num_tokens)}"
    if share.num_drafts:
        drafts = part.sequence.token_ids[-share.num_drafts :]
        yield f"  drafts    {_tokens(drafts, tokenizer)}; {num_new - 1} of {share.num_drafts} were right"
    for group, window in enumerate(layout.windows):
        before = _blocks(part.tables_before[group] if part.tables_before else ())
        after = _blocks(request.block_tables[group] if request.block_tables else ())
        yield f"  blocks    {'' if window is None else f'window of {window}: '}{before} -> {after}"
    if share.samples:
        yield f"  sampled   {_tokens([token.token_id for token in part.output.tokens], tokenizer)}"


def _interval(start: int, end: int) -> str:
    return f"position {start}" if end == start + 1 else f"positions {start} to {end - 1}"


def _blocks(table: Sequence[int]) -> str:
    """Runs of neighbours as first-last; what a window has left behind as dots."""
    runs: list[list[int]] = []
    for block in table:
        if runs and block != NULL_BLOCK and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        elif block != NULL_BLOCK or not runs or runs[-1] != [NULL_BLOCK]:
            runs.append([block])
    return " ".join(map(_run, runs)) or "none"


def _run(blocks: list[int]) -> str:
    if blocks[0] == NULL_BLOCK:
        return ".."
    return str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]}-{blocks[-1]}"


def _tokens(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return " ".join(repr(tokenizer.token_text(token_id)) for token_id in token_ids)
