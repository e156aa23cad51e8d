"""Answers that are numbers, in the format that the request asks for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.server.pooling.numbers import NumberFormat
from trioserve.server.pooling.replies import bytes_reply, encode_each, large_json_reply
from trioserve.server.protocol.pooling import BytesMetadata, Extent
from trioserve.server.protocol.pooling_fields import PromptUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quart import Response

    from trioserve.outputs import PoolingOutput, PoolingRequestOutput
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.pooling_fields import FormatFields

__all__ = ["count_tokens", "number_reply", "pack_all"]

Content = list[float] | list[list[float]] | bytes


def count_tokens(outputs: Iterable[PoolingRequestOutput]) -> PromptUsage:
    return PromptUsage.of(sum(len(output.prompt_token_ids) for output in outputs))


async def pack_all(number_format: NumberFormat, results: Sequence[PoolingOutput]) -> Iterable[bytes]:
    """The values of each. What takes long is done in a thread, at once; the rest when it is asked for."""
    packed = (number_format.pack(result.data) for result in results)
    return packed if number_format.is_cheap else await trio.to_thread.run_sync(list, packed)


async def number_reply(
    request: FormatFields,
    head: ReplyHead,
    outputs: Sequence[PoolingRequestOutput],
    *,
    new_list: Callable[..., object],
    new_item: Callable[[int, PoolingOutput, Content], object],
) -> Response:
    """In JSON, `new_list` is made of the head and the usage, with an empty list `data`, which is filled with
    what `new_item` makes of each result."""
    usage = count_tokens(outputs)
    results = [output.outputs for output in outputs]
    number_format = NumberFormat.of(request)
    if request.is_binary:
        return await _bytes_reply(request, head, results, usage)
    contents: Iterable[Content]
    if request.encoding_format == "base64":
        contents = await pack_all(number_format, results)
    else:
        contents = (result.tolist() for result in results)
    items = (
        new_item(index, result, content)
        for index, (result, content) in enumerate(zip(results, contents, strict=True))
    )
    answer = new_list(id=head.id, created=head.created, model=head.model, data=[], usage=usage)
    return large_json_reply(answer, {"data": encode_each(items)})


async def _bytes_reply(
    request: FormatFields, head: ReplyHead, results: Sequence[PoolingOutput], usage: PromptUsage
) -> Response:
    number_format = NumberFormat.of(request)
    extents = _extents(number_format, results)
    headers = {}
    if request.encoding_format == "bytes":
        metadata = BytesMetadata(
            id=head.id, created=head.created, model=head.model, data=extents, usage=usage
        )
        headers["metadata"] = json.dumps(msgspec.to_builtins(metadata))  # a header is ASCII
    return bytes_reply(await pack_all(number_format, results), extents[-1].end, headers)


def _extents(number_format: NumberFormat, results: Sequence[PoolingOutput]) -> list[Extent]:
    extents = []
    start = 0
    for index, result in enumerate(results):
        end = start + len(result.data) * number_format.size
        extents.append(
            Extent(
                index=index,
                embed_dtype=number_format.dtype,
                endianness=number_format.endianness,
                start=start,
                end=end,
                shape=result.shape,
            )
        )
        start = end
    return extents
