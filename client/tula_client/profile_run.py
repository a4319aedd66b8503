"""A profiling run whose steps the caller measures itself, where the agent cannot run."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tula_client import _calls as calls
from tula_client import _flows
from tula_client._request import Awaited, Blocking, Call, Flow, flow
from tula_wire import MAX_STEPS, Configuration, MemoryBreakdown, Run, RunCreate, RunPatch, SampleBatch
from tula_wire.text import printable

if TYPE_CHECKING:
    from tula_client._client import AsyncClient, Client

_MESSAGE_LENGTH = 500


class _Steps:
    """What both kinds of run keep, and the calls that they send."""

    run: Run

    def __init__(self, job: str, configuration: Configuration) -> None:
        self._job = job
        self._configuration = configuration
        self._boot_id = uuid.uuid4().hex
        self._steps = 0

    @flow
    def log_steps(
        self,
        step_time_s: Sequence[float],
        *,
        compute_time_s: Sequence[float] | None = None,
        exposed_comm_time_s: Sequence[float] | None = None,
        input_time_s: Sequence[float] | None = None,
        peak_bytes: int | None = None,
        warmup: bool = False,
    ) -> Flow[bool]:
        """Store the next steps, one number each in seconds; True when the service knows the run precisely enough.

        `warmup` marks steps that the fit discards; `peak_bytes` is the largest memory of a rank. Raises `TulaError`,
        and `pydantic.ValidationError` for a number out of range or columns of different lengths.
        """
        if not hasattr(self, "run"):
            raise RuntimeError("the run has not begun: call log_steps inside `with client.profile_run(...) as run`")
        columns = {
            "step_time_s": step_time_s,
            "compute_time_s": compute_time_s,
            "exposed_comm_time_s": exposed_comm_time_s,
            "input_time_s": input_time_s,
        }
        given = {name: list(column) for name, column in columns.items() if column is not None}
        memory = None if peak_bytes is None else MemoryBreakdown(method="reported", peak_bytes=peak_bytes)
        stop = False
        for first in range(0, len(step_time_s), MAX_STEPS):
            part = {name: column[first : first + MAX_STEPS] for name, column in given.items()}
            numbers = list(range(self._steps, self._steps + len(part["step_time_s"])))
            batch = SampleBatch.model_validate(
                {"rank": 0, "boot_id": self._boot_id, "sequence": numbers, "step": numbers, **part}
                | {"memory": memory, "warmup": warmup}
            )
            stop = (yield from calls.send_samples(self.run.id, batch)).stop
            self._steps += len(numbers)
        return stop

    def _begun(self) -> Flow[Run]:
        job_id = yield from _flows.job_id(self._job)
        return (yield from calls.create_run(job_id, RunCreate(kind="profile", configuration=self._configuration)))

    def _ended(self, error: BaseException | None) -> Call[Run]:
        patch = RunPatch(state="succeeded")
        if isinstance(error, Exception):
            patch = RunPatch(state="failed", message=printable(f"{type(error).__name__}: {error}")[:_MESSAGE_LENGTH])
        elif error is not None:
            patch = RunPatch(state="cancelled", message="It was stopped before its end.")
        return calls.patch_run(self.run.id, patch)


class ProfileRun(_Steps, Blocking):
    """Registers a run of `configuration` on entry and ends it on exit: succeeded, or failed with the exception.

    `with client.profile_run(job, configuration) as run: run.log_steps([...])`; `job` is an id or a name. `run.run` is
    the registered run.
    """

    def __init__(self, client: Client, job: str, configuration: Configuration) -> None:
        super().__init__(job, configuration)
        self.client = client

    def __enter__(self) -> Self:
        self.run = self.client.send(self._begun())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.run = self.client.send(self._ended(error))


class AsyncProfileRun(_Steps, Awaited):
    """Like `ProfileRun`, for `async with`, with a method to await."""

    def __init__(self, client: AsyncClient, job: str, configuration: Configuration) -> None:
        super().__init__(job, configuration)
        self.client = client

    async def __aenter__(self) -> Self:
        self.run = await self.client.send(self._begun())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.run = await self.client.send(self._ended(error))
