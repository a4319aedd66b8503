"""A handle of a job for scripts and notebooks, and search of jobs by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tula_client import _flows
from tula_client._errors import MissingExtraError
from tula_client.plots import altair_chart, save
from tula_client.tables import Row, Table
from tula_wire import Event, Job, JobSpec, JobSummary, Objective, Predictions, Recommendation, Run

if TYPE_CHECKING:
    from tula_client._client import Client

PAGE = 100


class JobHandle:
    """One job of one service. Every access queries the service: the handle caches nothing."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.client = client
        self.id = job_id

    @classmethod
    def of(cls, client: Client, job: str | JobSpec) -> JobHandle:
        """A handle by id or name, or of the job registered from a specification; raises `TulaError` if ambiguous."""
        if isinstance(job, JobSpec):
            return cls(client, client.register(job).job.id)
        return cls(client, find_job(client, job))

    def status(self) -> Job:
        """The job with its plan."""
        return self.client.job(self.id)

    def recommendation(self, objective: Objective | None = None) -> Recommendation:
        """The recommended configuration and the reason; by default for the job's objective."""
        return self.client.recommendation(self.id, objective=objective)

    def predict(
        self, num_nodes: int | list[int] | None = None, global_batch_size: int | list[int] | None = None
    ) -> Predictions:
        """What-if: predictions for all combinations of cluster size and global batch."""
        return self.client.predictions(self.id, num_nodes=num_nodes, global_batch_size=global_batch_size)

    def runs(self) -> list[Run]:
        """All runs, newest first."""
        return all_runs(self.client, self.id)

    def events(self, last_id: int | None = None) -> Iterator[Event]:
        """Events of the job as they happen; ends when the caller stops."""
        return self.client.events(self.id, last_id=last_id)

    def rows(self, table: Table = "candidates") -> list[Row]:
        """A table as a list of dictionaries; raises `TulaError` for an unknown one."""
        return _flows.answered(_flows.table(self.id, table), self.client.send)

    def to_dataframe(self, table: Table = "candidates") -> Any:
        """A table as a pandas data frame; raises `MissingExtraError` without pandas."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("a data frame", "notebook") from None
        return pandas.DataFrame(self.rows(table))

    def chart(
        self, name: str = "tradeoff", *, quantity: Literal["time", "cost"] = "time", objective: Objective | None = None
    ) -> dict[str, Any]:
        """The Vega-Lite specification of a chart with its data; `quantity` is drawn by `tradeoff`."""
        return self.client.chart(self.id, name, quantity=quantity, objective=objective)

    def plot(
        self,
        name: str = "tradeoff",
        output: str | Path | None = None,
        *,
        quantity: Literal["time", "cost"] = "time",
        objective: Objective | None = None,
    ) -> Any:
        """The chart as an Altair object, for notebooks; with `output`, written as PNG, SVG or JSON instead."""
        spec = self.chart(name, quantity=quantity, objective=objective)
        if output is None:
            return altair_chart(spec)
        save(spec, Path(output))
        return None

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r}, url={self.client.url!r})"


def find_job(client: Client, name_or_id: str) -> str:
    """The id of a job given by id, or by a name that exactly one job has that is not archived."""
    return _flows.answered(_flows.job_id(name_or_id), client.send)


def all_jobs(client: Client, *, search: str | None = None, archived: bool = False) -> Iterator[JobSummary]:
    """All jobs that match, over all pages."""
    cursor: str | None = None
    while True:
        page = client.jobs(search=search, archived=archived, limit=PAGE, cursor=cursor)
        yield from page.jobs
        if (cursor := page.next_cursor) is None:
            return


def all_runs(client: Client, job_id: str) -> list[Run]:
    """All runs of a job, newest first."""
    return _flows.answered(_flows.runs(job_id), client.send)
