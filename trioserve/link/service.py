"""What differs between an engine core that generates and one that pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import trio

    from trioserve.audio_input import AudioInput
    from trioserve.core.stats import CoreStats
    from trioserve.errors import InvalidRequestError
    from trioserve.link.messages import Message
    from trioserve.worker.lora_files import AdapterFile

__all__ = [
    "Caller",
    "Core",
    "OutputsT",
    "PlanT",
    "Result",
    "ResultT",
    "Service",
    "SteeredCore",
    "SteeredRunner",
]


class SteeredRunner(Protocol):
    """What `Controls` ask of what computes; see `trioserve.worker.model_runner.ModelRunner`."""

    def allocate_kv_cache(self, num_blocks: int) -> None: ...
    def free_kv_cache(self) -> None: ...
    def load_weights(self) -> None: ...
    def free_weights(self) -> None: ...
    def read_adapter(self, path: str) -> AdapterFile: ...
    def add_adapter(self, key: str, file: AdapterFile) -> None: ...
    def remove_adapter(self, key: str) -> None: ...
    def align_audio(
        self, audio: AudioInput, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> list[float]: ...


class SteeredCore(Protocol):
    """What `Controls` ask of a core."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_begun(self) -> int: ...
    @property
    def is_held(self) -> bool: ...
    @property
    def step_in_flight(self) -> bool: ...
    def hold(self, *, new_only: bool) -> None: ...
    def release(self) -> None: ...
    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool: ...


class Result(Protocol):
    """`trioserve.core.step_result.StepResult`, or what a core that pools has instead."""

    @property
    def request_ids(self) -> Sequence[int]: ...
    @property
    def failures(self) -> Sequence[str]: ...
    @property
    def freed(self) -> Sequence[int]: ...


PlanT = TypeVar("PlanT")
OutputsT = TypeVar("OutputsT")
ResultT = TypeVar("ResultT", bound=Result)
ResultT_co = TypeVar("ResultT_co", bound=Result, covariant=True)
ResultT_contra = TypeVar("ResultT_contra", bound=Result, contravariant=True)


class Core(SteeredCore, Protocol[PlanT, OutputsT, ResultT_co]):
    """`trioserve.core.engine.EngineCore`, or `trioserve.core.pooling.PoolingCore`; with the types of a step's
    plan, of what computing it gives, and of what there is to report."""

    def abort(self, request_ids: Iterable[int]) -> None: ...
    def schedule(self) -> PlanT | None: ...
    def execute(self, plan: PlanT) -> OutputsT: ...
    def plan_ahead(self) -> None: ...
    def finish(self, plan: PlanT, outputs: OutputsT) -> None: ...
    def take_result(self) -> ResultT_co: ...
    def take_freed(self) -> ResultT_co: ...
    @property
    def has_freed(self) -> bool: ...
    def take_stats(self) -> CoreStats: ...
    @property
    def stats_changed(self) -> bool: ...


class Caller(Protocol[ResultT_contra]):
    """Who hands a request over: the connection that it came by."""

    @property
    def nursery(self) -> trio.Nursery:
        """For what a request waits for before it gets to the core."""
        ...

    def refuse(self, request_id: int, error: InvalidRequestError) -> None:
        """Tell the client that it is not run."""

    def report(self, result: ResultT_contra) -> None:
        """Tell the client, beside what steps give."""

    def wake(self) -> None:
        """There may be something to compute now, or nothing to wait for any more."""


class Service(Protocol[PlanT, OutputsT, ResultT]):
    """A core, how requests come to it, and how what it gives is packed. Synchronous, but for `rest_until`."""

    @property
    def core(self) -> Core[PlanT, OutputsT, ResultT]: ...

    def receive(self, message: Message, caller: Caller[ResultT]) -> None:
        """Take on a request.

        Raises:
          MessageError: it is none for this core.
        """

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests, also those that are not in the core yet."""

    @property
    def num_on_their_way(self) -> int:
        """Requests that are not in the core yet."""
        ...

    @property
    def num_tokens_on_their_way(self) -> int:
        """In the prompts of those."""
        ...

    def split(self, result: ResultT) -> Iterator[ResultT]:
        """In as many parts as it needs to be sent."""
        ...

    def pack(self, result: ResultT, stats: CoreStats) -> Message:
        """The message of one part."""
        ...

    async def rest_until(self, wanted: trio.Event) -> None:
        """There is nothing to compute: return once `wanted` is set."""
