"""Creates a run in the background on the first rank if no launcher has created one."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlencode

from tula_agent.config import AgentConfig, WantedJob, is_id
from tula_agent.guard import Guard, logger
from tula_agent.rank_channel import Channel
from tula_agent.ship.exporter import pause_s
from tula_agent.ship.spool import encode
from tula_agent.ship.transport import Reply, Transport
from tula_wire import routes

LEASE_S: Final = 600.0
"""Seconds until the lease expires unless samples renew it; the service then marks the training run as failed."""
HOSTS_WITHIN_S: Final = 10.0
AT_END_WITHIN_S: Final = 1.5
"""Seconds that the first rank waits for the other ranks' host names, and seconds that ranks wait at the end of the
script.
"""
TIMEOUT_S: Final = 20.0
"""Time-out of the requests in this module, which is long because the service fits its models before it responds."""
_JOBS_READ: Final = 2
"""Maximum number of jobs to request by name; a second job shows that the name is ambiguous."""


class Process(Protocol):
    """The part of the recorder that `Joining` uses: the process's place among the ranks and the configuration."""

    config: AgentConfig
    boot_id: str
    model_parallel_size: int

    @property
    def world_size(self) -> int: ...

    def channel(self) -> Channel | None: ...

    def seen_configuration(self) -> tuple[int, int] | None: ...

    def joined(self, run_id: str) -> None: ...


class _NoRun(Exception):
    """Raised with the reason why there is no run, and with the service's `reply` if the reply is the reason."""

    def __init__(self, reason: str, reply: Reply | None = None) -> None:
        super().__init__(reason)
        self.reply = reply


class Joining:
    """Creates a job's run on the first rank once a step has revealed the configuration; other ranks receive the run id.

    Until then, measurements remain in their queues. If the service is unavailable, the request is repeated after a
    back-off. If the service refuses it, the first rank logs the reason once, and measurements are dropped. `number` is
    different for each training run in this process. All methods run on the shipping thread, so training never waits for
    them.
    """

    def __init__(self, process: Process, job: WantedJob, number: int, guard: Guard) -> None:
        self.run_id: str | None = None
        self.job_id: str | None = None
        self._process = process
        self._wanted = job
        self._mark = _mark(number)
        self._guard = guard
        self._refused = False
        self._host_given = False
        self._hosts_until: float | None = None
        self._failures = 0
        self._not_before = 0.0
        self._asking = threading.Lock()

    def ready(self, last: bool) -> bool:
        """Return True once the run is known or it is certain that there will be none; `last`: the script is ending.

        If another thread is already in this method, do not wait for it, since it may hang in a request.
        """
        if self.run_id is None and not self._refused and self._asking.acquire(blocking=False):
            try:
                with self._guard("joining a run"):
                    if self._process.config.rank != 0:
                        self._learn(2 * AT_END_WITHIN_S if last else 0.0)
                    elif self._process.seen_configuration() is not None:
                        self._try_to_make(last)
            finally:
                self._asking.release()
        return self.run_id is not None or self._refused

    # The other ranks.

    def _learn(self, within_s: float) -> None:
        channel = self._process.channel()
        if channel is None:
            return
        if not self._host_given:
            channel.set(_host(channel, channel.rank), socket.gethostname())
            self._host_given = True
        answer = channel.wait(f"run/{channel.world_size}", within_s)
        if answer is not None:
            self._known(_checked(answer) if answer else None)

    # The first rank.

    def _knows_hosts(self) -> bool:
        channel = self._process.channel()
        return channel is None or channel.has(*(_host(channel, rank) for rank in range(1, channel.world_size)))

    def _try_to_make(self, last: bool) -> None:
        if self._hosts_until is None or last:
            self._hosts_until = time.monotonic() + (AT_END_WITHIN_S if last else HOSTS_WITHIN_S)
        while not self._knows_hosts() and time.monotonic() <= self._hosts_until:
            if not last:
                return
            time.sleep(0.02)
        if not last and time.monotonic() < self._not_before:
            return
        run_id = None
        try:
            run_id = self._make()
        except (_NoRun, LookupError, TypeError, ValueError) as error:
            reply = getattr(error, "reply", None)
            if reply is not None and reply.verdict == "retry":
                self._failures += 1
                self._not_before = time.monotonic() + pause_s(self._failures, reply)
                if self._failures == 1:
                    logger.warning("no run of job %r could be created yet (%s)", self._wanted.name, error)
                return
            reason = str(error) if isinstance(error, _NoRun) else "the service's response is invalid"
            text = "no run of job %r could be created (%s): nothing is measured, but training continues"
            logger.warning(text, self._wanted.name, reason)
        with self._guard("sending the run's id to the other ranks"):
            channel = self._process.channel()
            if channel is not None:
                channel.set(f"run/{channel.world_size}", run_id or "")
        self._known(run_id)

    def _known(self, run_id: str | None) -> None:
        """Store the run's id, or note that there will be no run if `run_id` is None.

        The id is also written to a file for a later start, whose first rank may be on any machine.
        """
        self._refused = run_id is None
        if run_id is None:
            return
        with self._guard("joining a run"):
            self._process.joined(run_id)
        self.run_id = run_id
        if self._mark is not None:
            with self._guard("recording the run for a later start"):
                self._mark.write_text(run_id)

    def _make(self) -> str:
        """Create a run and return its id.

        Raises _NoRun if the service refuses the request, and LookupError, TypeError or ValueError if the response is
        malformed.
        """
        config, seen = self._process.config, self._process.seen_configuration()
        assert seen is not None  # `ready` has checked it
        service = Transport(config.url, config.token, TIMEOUT_S)
        try:
            num_nodes, ranks_per_node = self._nodes()
            job_id = self._job(service, num_nodes, ranks_per_node, seen[0])
            body = {
                "kind": "train" if config.plan is None else "profile",
                "configuration": {
                    "num_nodes": num_nodes,
                    "ranks_per_node": ranks_per_node,
                    "local_batch_size": seen[0],
                    "grad_accum_steps": seen[1],
                },
                "holder": f"agent-{self._process.boot_id}",
                "lease_s": LEASE_S,
            }
            run = _ask(service, "POST", routes.JOB_RUNS.format(job_id=job_id), body | self._continued(service, job_id))
            self.job_id = job_id
            return _checked(run["id"])
        finally:
            service.close()

    def _continued(self, service: Transport, job_id: str) -> dict[str, Any]:
        """Return a field with the id of the run that preceded torchrun's restart; empty if there is no such run.

        A run that another run already continues is ignored, since this machine did not take part in the previous start.
        """
        before = ""
        with self._guard("finding the run that preceded a restart"):
            if self._mark is not None and self._mark.exists():
                before = _checked(self._mark.read_text())
        if not before or self._process.config.plan is not None:
            return {}
        answer = _ask(service, "GET", routes.RUN.format(run_id=before), may_miss=True)
        latest = answer and answer["job_id"] == job_id and answer.get("end_cause") != "superseded"
        return {"continues": before} if latest else {}

    def _nodes(self) -> tuple[int, int]:
        """Return the numbers of nodes and of ranks (model replicas) per node, from host names or the launcher's
        variables.
        """
        per_replica = self._process.model_parallel_size
        processes = self._process.config.ranks_per_node
        channel = self._process.channel()
        if channel is not None and self._knows_hosts():
            others = [channel.get(_host(channel, rank)) for rank in range(1, channel.world_size)]
            processes = 1 + others.count(socket.gethostname())
        ranks = max(1, self._process.world_size // per_replica)
        ranks_per_node = min(ranks, max(1, processes // per_replica))
        return max(1, ranks // ranks_per_node), ranks_per_node

    def _job(self, service: Transport, num_nodes: int, ranks_per_node: int, local_batch_size: int) -> str:
        """Return the id of the job, which is found by id or name or, if it does not exist, registered."""
        name = self._wanted.name
        if is_id(name) and _ask(service, "GET", f"{routes.JOB_RUNS.format(job_id=name)}?limit=1", may_miss=True):
            return name
        page = _ask(service, "GET", f"{routes.JOBS}?{urlencode({'name': name, 'limit': _JOBS_READ})}")
        ids = [_checked(job["id"]) for job in page["jobs"] if job["name"] == name]
        if len(ids) > 1:
            raise _NoRun("several jobs have this name: use the id of one of them")
        if ids:
            return ids[0]
        if self._wanted.dataset_size is None:
            raise _NoRun("the job does not exist: to register it, pass dataset_size and epochs to tula_agent.init")
        body = {
            "name": name,
            "model": {"name": name},
            "dataset": {"size": self._wanted.dataset_size},
            "epochs": self._wanted.epochs or 1.0,
            "cluster": {"max_nodes": num_nodes, "ranks_per_node": ranks_per_node},
            "batch": {"min_local_batch_size": min(32, local_batch_size)},
        }
        return _checked(_ask(service, "POST", routes.JOBS, body)["job"]["id"])


def _ask(
    service: Transport, method: str, path: str, body: dict[str, Any] | None = None, *, may_miss: bool = False
) -> dict[str, Any]:
    """Return the response to a request; empty if `may_miss` is True and the resource does not exist. Raises _NoRun."""
    reply = service.exchange(method, path, None if body is None else encode(body))
    if may_miss and reply.status == 404:
        return {}
    if reply.verdict != "delivered" or reply.body is None:
        raise _NoRun(f"{reply.status} {reply.detail}".strip(), reply)
    return reply.body


def _mark(number: int) -> Path | None:
    """Return the file that stores the run's id for later starts by the same torchrun, or None if there is no torchrun.

    The file is in torchrun's log folder, which torchrun keeps until it ends and then usually removes. torchrun's store
    is not suitable, since it does not always outlive a start (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE`).
    """
    for folder in Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents:
        if folder.name.startswith("attempt_"):
            return folder.parent / f"tula-run-{number}"
    return None


def _host(channel: Channel, rank: int) -> str:
    """Return the key of a rank's host name; keys differ between elastic rounds whose sizes or restart counts differ."""
    return f"host/{channel.world_size}/{rank}"


def _checked(identifier: Any) -> str:
    """Return `identifier` if it is an id that is safe as part of a path. Raises ValueError for anything else."""
    if not is_id(identifier):
        raise ValueError(f"not an id: {identifier!r:.40}")
    return str(identifier)
