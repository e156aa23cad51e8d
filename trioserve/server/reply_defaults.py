"""What answers tell where their requests do not say it, as far as the server's flags decide that."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs

from trioserve.server.protocol.sampling import SamplingFields, StreamOptions

if TYPE_CHECKING:
    from trioserve.server_args import ServerArgs

__all__ = ["ReplyDefaults"]

R = TypeVar("R", bound=SamplingFields)

_FULL_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)


@attrs.frozen(kw_only=True)
class ReplyDefaults:
    """Of completions and chat completions."""

    names_tokens_by_id: bool = False
    always_tells_usage: bool = False
    """In every chunk of every stream, whatever the request says."""

    @classmethod
    def of(cls, args: ServerArgs) -> ReplyDefaults:
        return cls(
            names_tokens_by_id=args.return_tokens_as_token_ids,
            always_tells_usage=args.enable_force_include_usage,
        )

    def complete(self, request: R) -> R:
        if self.names_tokens_by_id and request.return_tokens_as_token_ids is None:
            request = attrs.evolve(request, return_tokens_as_token_ids=True)
        if self.always_tells_usage and request.stream:
            request = attrs.evolve(request, stream_options=_FULL_USAGE)
        return request
