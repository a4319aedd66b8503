"""Agents, pages and recommendations at once on one worker, alone and beside one sender's flood.

    python -m benchmarks.mixed [--json OUT] [--seconds 30] [--load 1] [--engines sqlite postgres] [--smoke]

200 agents send one request a second, of a run of theirs: samples, telemetry, a lease, thresholds. 50 dashboards read a
page every five seconds, and two recommendations a second follow a new sample. Each flood comes from a separate process:
`wrong_tokens` on 20 connections, as fast as they are answered; `slow_bodies` that never complete, on 300 connections
without a token and 300 with one; `images` of charts on 20 connections of one token; `streams` of events on 100
connections of one token. Each is measured beside the flood and, just before, alone: `ratio` is the one median latency
over the other. To reach: no error for agents, at most 1 % for pages, ratios of at most 2. Load, flood and service share
the machine's cores, and the whole load takes nearly all of two: there, a median says how long the queue is.
`--load 0.25` measures beside a quarter of the agents, dashboards and recommendations. `--smoke` runs each for a
fraction of a second beside a tenth of them: its figures only show that the benchmark works.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgpack
import numpy as np

from benchmarks.support.postgres import databases
from benchmarks.support.report import median, parser_of, percentile, print_table, write_json
from benchmarks.support.server import Server, migrate
from tula_service.domain import NewRun
from tula_service.store import Store
from tula_service.usecases.access import ANONYMOUS, issue_token
from tula_wire import Configuration, JobSpec, routes

AGENTS, DASHBOARDS, STEPS = 200, 50, 10
RECOMMENDATIONS_PER_S, PAGE_EVERY_S = 2.0, 5.0
SPEC = JobSpec.model_validate(
    {
        "name": "mixed",
        "model": {"name": "mixed-net", "parameters": 25_600_000},
        "dataset": {"size": 1_281_167},
        "cluster": {"max_nodes": 8, "ranks_per_node": 4, "price": {"usd_per_node_hour": 3.06}},
        "batch": {"max_local_batch_size": 512},
    }
)


@dataclass(frozen=True)
class Tenant:
    """A project with a job, its training runs, and its tokens."""

    job_id: str
    run_ids: tuple[str, ...]
    agent: str
    user: str


def tenant(database: str, name: str, num_runs: int) -> Tenant:
    """A new one."""
    store = Store.open(database)
    configuration = Configuration(num_nodes=1, ranks_per_node=4, local_batch_size=32)
    with store.transaction() as tx:
        project = tx.projects.create(name)
        job, _ = tx.jobs.create(project.id, SPEC.model_dump(mode="json") | {"name": name, "objective": "knee"})
        new = NewRun("train", configuration, "running")
        runs = tuple(tx.runs.create(job.id, new).id for _ in range(num_runs))
    agent = issue_token(store, ANONYMOUS, name=name, scope="agent", job_id=job.id).secret
    user = issue_token(store, ANONYMOUS, name=name, scope="user", project=name).secret
    store.close()
    return Tenant(job.id, runs, agent, user)


def request(method: str, path: str, token: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    """A whole request of HTTP/1.1."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    if method != "GET":
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


@dataclass
class Connection:
    """One that is kept open, and opened again when the service closes it."""

    port: int
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None, init=False)

    async def exchange(self, sent: bytes) -> int:
        """The status of the answer, which is read whole."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        reader, writer = self._streams
        writer.write(sent)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        if b"connection: close" in head:
            self.close()
        return int(head.split(b" ", 2)[1])

    def close(self) -> None:
        """Close it; the next exchange opens another."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


@dataclass
class Asked:
    """Latencies of what was answered well, s, and how many were not, by kind of request."""

    port: int
    ends: float
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    async def repeat(self, kind: str, every_s: float, delay_s: float, requests: Iterator[list[bytes]]) -> None:
        """Send the next requests, one after another, at each tick until the end; the last one is what is measured."""
        connection, tick = Connection(self.port), time.perf_counter() + delay_s
        while tick < self.ends:
            await asyncio.sleep(max(0.0, tick - time.perf_counter()))
            began, status = 0.0, 0
            for each in next(requests):
                began = time.perf_counter()
                try:
                    status = await connection.exchange(each)
                except (OSError, EOFError):
                    connection.close()
                    status = 599
            if status < 400:
                self.latencies[kind].append(time.perf_counter() - began)
            else:
                self.failed[kind] += 1
            tick = max(tick + every_s, time.perf_counter())
        connection.close()


def agent_requests(made: Tenant, run_id: str, boot: str) -> Iterator[list[bytes]]:
    """What one agent sends, in turn."""
    noise = np.random.default_rng(0)
    for number in itertools.count():
        steps = list(range(number * STEPS, (number + 1) * STEPS))
        facts = {"rank": 0, "boot_id": boot}
        times = {"sequence": steps, "step": steps, "step_time_s": noise.lognormal(-2, 0.05, STEPS).tolist()}
        loss = {
            "sequence": number,
            "steps": np.array(steps).tobytes(),
            "columns": {"loss": noise.random(STEPS).tobytes()},
        }
        samples, telemetry = routes.RUN_SAMPLES.format(run_id=run_id), routes.RUN_TELEMETRY.format(run_id=run_id)
        yield [request("POST", samples, made.agent, json.dumps(facts | times).encode())]
        yield [request("POST", telemetry, made.agent, msgpack.packb(facts | loss), "application/msgpack")]
        yield [request("PATCH", routes.RUN.format(run_id=run_id), made.agent, b'{"state": "running"}')]
        yield [request("GET", routes.JOB_SCALING.format(job_id=made.job_id), made.agent)]


def page_requests(made: Tenant) -> Iterator[list[bytes]]:
    """What a dashboard reads, in turn."""
    chart = routes.RUN_CHART.format(run_id=made.run_ids[0], name="loss")
    for path in itertools.cycle(["/", f"/runs/{made.run_ids[0]}", chart, routes.JOBS, f"/jobs/{made.job_id}/quality"]):
        yield [request("GET", path, made.user)]


def recommendation_requests(made: Tenant) -> Iterator[list[bytes]]:
    """A new sample, then the question."""
    for number in itertools.count():
        body = {"rank": 1, "boot_id": str(time.time()), "sequence": [number], "step": [number], "step_time_s": [0.1]}
        sample = request(
            "POST", routes.RUN_SAMPLES.format(run_id=made.run_ids[0]), made.agent, json.dumps(body).encode()
        )
        yield [sample, request("GET", routes.JOB_RECOMMENDATION.format(job_id=made.job_id), made.user)]


async def ask(port: int, made: Tenant, seconds: float, load: float) -> Asked:
    """All of them at once, each at its own time; `load`: the share of them that asks."""
    asked, boot = Asked(port, time.perf_counter() + seconds), str(time.time())
    runs, dashboards = made.run_ids[: round(load * AGENTS)], round(load * DASHBOARDS)
    work = [
        asked.repeat("agents", 1.0, number / len(runs), agent_requests(made, run_id, boot))
        for number, run_id in enumerate(runs)
    ]
    work += [
        asked.repeat("pages", PAGE_EVERY_S, min(PAGE_EVERY_S, seconds) * number / dashboards, page_requests(made))
        for number in range(dashboards)
    ]
    every_s = 1 / (load * RECOMMENDATIONS_PER_S)
    work.append(asked.repeat("recommendations", every_s, 0.0, recommendation_requests(made)))
    await asyncio.gather(*work)
    return asked


async def hammer(port: int, sent: bytes, pause_s: float = 0.0) -> None:
    """The same request for ever."""
    connection = Connection(port)
    while True:
        try:
            await connection.exchange(sent)
        except (OSError, EOFError):
            connection.close()
        await asyncio.sleep(pause_s)


async def stuck(port: int, sent: bytes) -> None:
    """A request that does not complete, or whose answer does not end; again once the service breaks it off."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            while await reader.read(2**16):
                pass
            writer.close()
        await asyncio.sleep(0.1)


def flood(kind: str, port: int, made: Tenant) -> None:
    """One sender's flood, until the process is ended."""
    job, run = {"job_id": made.job_id}, {"run_id": made.run_ids[0]}
    image = routes.RUN_CHART.format(**run, name="loss") + "?format=png"
    slow = [
        (f"PATCH {routes.RUN.format(**run)} HTTP/1.1\r\nHost: x\r\n", "application/json"),
        (f"POST {routes.RUN_SAMPLES.format(**run)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {made.agent}\r\n", ""),
    ]
    bodies = [f"{head}Content-Type: application/json\r\nContent-Length: 9000\r\n\r\n{{".encode() for head, _ in slow]
    attacks: dict[str, Callable[[], list[asyncio.Future[None]]]] = {
        "wrong_tokens": lambda: [
            asyncio.ensure_future(hammer(port, request("GET", routes.JOBS, f"tula_wrong_{number}")))
            for number in range(20)
        ],
        "slow_bodies": lambda: [asyncio.ensure_future(stuck(port, body)) for body in bodies for _ in range(300)],
        "images": lambda: [asyncio.ensure_future(hammer(port, request("GET", image, made.user))) for _ in range(20)],
        "streams": lambda: [
            asyncio.ensure_future(stuck(port, request("GET", routes.JOB_EVENTS.format(**job), made.user)))
            for _ in range(100)
        ],
    }

    async def attack() -> None:
        await asyncio.gather(*attacks[kind]())

    asyncio.run(attack())


FLOODS = ("wrong_tokens", "slow_bodies", "images", "streams")


@contextmanager
def flooding(kind: str, port: int, made: Tenant) -> Iterator[None]:
    """A flood of this kind for the length of a block."""
    process = multiprocessing.get_context("fork").Process(target=flood, args=(kind, port, made), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def measure(engine: str, database: str, seconds: float, load: float) -> dict[str, float]:
    """The figures of one engine."""
    migrate(database)
    good, bad = tenant(database, "good", AGENTS), tenant(database, "bad", 1)
    figures: dict[str, float] = {}
    with Server(database) as server:
        asyncio.run(ask(server.port, good, min(seconds, 5.0), load))  # what is measured finds warm caches
        for kind in FLOODS:
            alone = asyncio.run(ask(server.port, good, seconds, load))
            with flooding(kind, server.port, bad):
                beside = asyncio.run(ask(server.port, good, seconds, load))
            for who in ("agents", "pages", "recommendations"):
                key = f"{engine}.{kind}.{who}"
                for name, asked in (("alone", alone), ("beside", beside)):
                    figures |= {f"{key}.{name}.{each}": value for each, value in summary(asked, who, seconds).items()}
                figures[f"{key}.ratio"] = figures[f"{key}.beside.p50_ms"] / figures[f"{key}.alone.p50_ms"]
    return figures


def summary(asked: Asked, who: str, seconds: float) -> dict[str, float]:
    """Answers of one kind, the share of failures, and latencies: without an answer, those of the whole measurement."""
    found, failed = asked.latencies[who] or [seconds], asked.failed[who]
    answered = len(asked.latencies[who])
    return {
        "answered": answered,
        "failed_share": failed / max(1, failed + answered),
        "p50_ms": 1e3 * median(found),
        "p99_ms": 1e3 * percentile(found, 0.99),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = parser_of("mixed", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=1.0, help="share of the agents, dashboards and recommendations")
    parser.add_argument("--engines", nargs="*", default=["sqlite", "postgres"], choices=["sqlite", "postgres"])
    options = parser.parse_args(arguments)
    seconds, load = (0.4, 0.1) if options.smoke else (options.seconds, options.load)
    figures: dict[str, float] = {}
    for engine, database in databases(options.engines):
        figures |= measure(engine, database, seconds, load)
    columns = ("alone.failed_share", "beside.failed_share", "alone.p50_ms", "beside.p50_ms", "beside.p99_ms", "ratio")
    cases = [key.removesuffix(".ratio") for key in figures if key.endswith(".ratio")]
    rows = [(case, *(f"{figures[f'{case}.{each}']:.3f}" for each in columns)) for case in cases]
    print_table("Mixed", ("case", *columns), rows)
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
