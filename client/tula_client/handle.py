"""Handles of a job for scripts and notebooks: `JobHandle` and `AsyncJobHandle`, with the same methods."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tula_client import _calls as calls
from tula_client import _flows
from tula_client._errors import TulaError
from tula_client._request import Awaited, Blocking, Call, Flow, flow
from tula_client.plots import altair_chart, save
from tula_client.tables import Row, Table, data_frame
from tula_wire import Event, Job, Objective, Predictions, Recommendation, Run

if TYPE_CHECKING:
    from tula_client._client import AsyncClient, Client


class _JobMethods:
    """What both handles can do."""

    client: Client | AsyncClient
    id: str

    @flow
    def status(self) -> Call[Job]:
        """The job with its plan."""
        return calls.job(self.id)

    @flow
    def recommendation(self, objective: Objective | None = None) -> Call[Recommendation]:
        """The recommended configuration and the reason; by default for the job's objective."""
        return calls.recommendation(self.id, objective=objective)

    @flow
    def predict(
        self,
        num_nodes: int | list[int] | None = None,
        global_batch_size: int | list[int] | None = None,
        *,
        local_batch_size: int | list[int] | None = None,
        instance_type: str | list[str] | None = None,
        usd_per_node_hour: float | None = None,
        deadline_s: float | None = None,
    ) -> Call[Predictions]:
        """What-if: predictions for all combinations; what is omitted takes every value that the job allows."""
        return calls.predictions(
            self.id,
            num_nodes=num_nodes,
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            instance_type=instance_type,
            usd_per_node_hour=usd_per_node_hour,
            deadline_s=deadline_s,
        )

    @flow
    def wait(self, timeout_s: float | None = None, *, poll_s: float = 2.0) -> Flow[Recommendation]:
        """Wait until no profiling run waits or is in progress, and return the recommendation.

        Asks the service every `poll_s` seconds. Raises `TulaError` after `timeout_s` seconds; None waits for ever.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (job := (yield from calls.job(self.id))).state == "planning":
            left = deadline - time.monotonic()
            if left <= 0:
                runs = f"{job.runs_done} of {job.runs_planned} runs are done"
                raise TulaError(
                    f"{job.name} is still profiled ({runs}): start them with tula tune, or give a longer timeout_s"
                )
            yield min(poll_s, left)
        return (yield from calls.recommendation(self.id))

    @flow
    def runs(self) -> Flow[list[Run]]:
        """All runs, newest first."""
        return _flows.runs(self.id)

    @flow
    def rows(self, table: Table = "candidates") -> Flow[list[Row]]:
        """A table as a list of dictionaries; raises `TulaError` for an unknown one."""
        return _flows.table(self.id, table)

    @flow
    def to_dataframe(self, table: Table = "candidates") -> Flow[Any]:
        """A table as a pandas data frame; raises `MissingExtraError` without pandas."""
        return data_frame((yield from _flows.table(self.id, table)))

    @flow
    def chart(
        self, name: str = "tradeoff", *, quantity: Literal["time", "cost"] = "time", objective: Objective | None = None
    ) -> Call[dict[str, Any]]:
        """The Vega-Lite specification of a chart with its data; `quantity` is drawn by `tradeoff`."""
        return calls.chart(self.id, name, quantity=quantity, objective=objective)

    @flow
    def plot(
        self,
        name: str = "tradeoff",
        output: str | Path | None = None,
        *,
        quantity: Literal["time", "cost"] = "time",
        objective: Objective | None = None,
    ) -> Flow[Any]:
        """The chart as an Altair object, for notebooks; with `output`, written as PNG, SVG or JSON instead."""
        spec = yield from calls.chart(self.id, name, quantity=quantity, objective=objective)
        return altair_chart(spec) if output is None else save(spec, Path(output))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, url={self.client.url!r})"


class JobHandle(_JobMethods, Blocking):
    """One job of one service. Every access queries the service: the handle caches nothing."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.client: Client = client
        self.id = job_id

    def events(self, last_id: int | None = None) -> Iterator[Event]:
        """Events of the job as they happen; ends when the caller stops."""
        return self.client.events(self.id, last_id=last_id)


class AsyncJobHandle(_JobMethods, Awaited):
    """Like `JobHandle`, with methods to await."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.client: AsyncClient = client
        self.id = job_id

    def events(self, last_id: int | None = None) -> AsyncIterator[Event]:
        """Like `JobHandle.events`."""
        return self.client.events(self.id, last_id=last_id)
