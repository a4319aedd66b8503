"""A profiling run whose steps the caller measures itself, where the agent cannot run."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tula_wire import MAX_STEPS, Configuration, MemoryBreakdown, Run, RunCreate, RunPatch, SampleBatch
from tula_wire.text import printable

if TYPE_CHECKING:
    from tula_client._client import Client

_MESSAGE_LENGTH = 500


class ProfileRun:
    """Registers a run of `configuration` on entry and ends it on exit: succeeded, or failed with the exception.

    `with client.profile_run(job, configuration) as run: run.log_steps([...])`
    """

    def __init__(self, client: Client, job_id: str, configuration: Configuration) -> None:
        self.client = client
        self.job_id = job_id
        self.configuration = configuration
        self.run: Run | None = None
        self._boot_id = uuid.uuid4().hex
        self._steps = 0

    def log_steps(
        self,
        step_time_s: Sequence[float],
        *,
        compute_time_s: Sequence[float] | None = None,
        exposed_comm_time_s: Sequence[float] | None = None,
        input_time_s: Sequence[float] | None = None,
        peak_bytes: int | None = None,
        warmup: bool = False,
    ) -> bool:
        """Store the next steps, one number each in seconds; True when the service knows the run precisely enough.

        `warmup` marks steps that the fit discards; `peak_bytes` is the largest memory of a rank. Raises `TulaError`,
        and `pydantic.ValidationError` for a number out of range or columns of different lengths.
        """
        if self.run is None:
            raise RuntimeError("the run has not begun: call log_steps inside `with client.profile_run(...) as run`")
        stop = False
        columns = {
            "step_time_s": step_time_s,
            "compute_time_s": compute_time_s,
            "exposed_comm_time_s": exposed_comm_time_s,
            "input_time_s": input_time_s,
        }
        for first in range(0, len(step_time_s), MAX_STEPS):
            part = slice(first, first + MAX_STEPS)
            numbers = list(range(self._steps, self._steps + len(step_time_s[part])))
            given = {name: list(column[part]) for name, column in columns.items() if column is not None}
            memory = None if peak_bytes is None else MemoryBreakdown(method="reported", peak_bytes=peak_bytes)
            batch = SampleBatch.model_validate(
                {"rank": 0, "boot_id": self._boot_id, "sequence": numbers, "step": numbers, **given}
                | {"memory": memory, "warmup": warmup}
            )
            stop = self.client.send_samples(self.run.id, batch).stop
            self._steps += len(numbers)
        return stop

    def __enter__(self) -> Self:
        self.run = self.client.create_run(self.job_id, RunCreate(kind="profile", configuration=self.configuration))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self.run is not None
        patch = RunPatch(state="succeeded")
        if isinstance(error, Exception):
            patch = RunPatch(state="failed", message=printable(f"{type(error).__name__}: {error}")[:_MESSAGE_LENGTH])
        elif error is not None:
            patch = RunPatch(state="cancelled", message="It was stopped before its end.")
        self.run = self.client.patch_run(self.run.id, patch)
