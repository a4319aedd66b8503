"""Tests the entire product on network namespaces: its recommendations, and its alarm when the links slow down.

    python -m benchmarks.cluster [--smoke] [--json OUT]        (root, iproute2)

The benchmark tunes over 2, 4 and 8 nodes and five batches, once with adaptive and once with partial search. Before and
after these searches, a full search without early stopping measures every candidate. The smaller of the two measured
times is taken as the true step time, because other work on the machine can only slow a step; the difference between the
two times is the uncertainty. Each search has a separate project, so that it cannot use the results of the others. For
each search, the benchmark prints the median error of predicted step times over the candidates that the search did not
profile, the regret of the recommendation in measured time, and the node-seconds of the search as a fraction of those of
the full search. It then trains with the links at full speed, reduces their bandwidth to a quarter, and counts the steps
until the service raises the alarm. It also counts false alarms before the reduction. `--only launches` tunes once with
one launch for each run and once with launches that measure every batch of a cluster, and compares the wall-clock times,
node-seconds, choices and step times of both searches. It then compares the wall-clock times in the same way for
`examples/digits_ddp.py` under torchrun on the cores of this machine. A full benchmark includes these comparisons.
`--smoke` uses two candidates on two nodes without a full search; its figures only show that the benchmark works.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.support import PYTHON, clean_environment, tune_words
from benchmarks.support.cluster import Cluster, why_no_delay, why_not
from benchmarks.support.report import make_parser, median, print_table, write_json
from benchmarks.support.server import Server, make_token, migrate
from tula_client import Client
from tula_client._spec import load_spec
from tula_client.launch.registration import register
from tula_client.launch.reporter import Reporter
from tula_client.launch.run_loop import Runner
from tula_client.launch.template import Template
from tula_client.launch.tune import work_through
from tula_client.launch.workdir import WorkDir
from tula_wire import Configuration, ProjectCreate, RunCreate, TokenCreate

ROOT = Path(__file__).resolve().parents[1]
RATE_MBIT = 200.0
SLOWER = 4.0
DATASET, EPOCHS = 100_000, 1
STEPS_TO_NOTICE = 600
"""Number of steps after the links slow down within which an alarm counts."""
PROGRESS_S = 2.0
RUNS_COMPARED = 6

_ENDED = ("succeeded", "out_of_memory", "failed", "cancelled")

SPEC = """
name = "{name}"
objective = "time"
search = "{search}"
{space}
[profiling]
share_launches = {share_launches}
{profiling}
"""
WAITS = """
epochs = {epochs}
model = {{ name = "waits", parameters = 262145 }}
dataset = {{ size = {dataset} }}
cluster = {{ min_nodes = 2, max_nodes = {max_nodes}, price = {{ usd_per_node_hour = 1.0 }} }}
batch = {{ min_local_batch_size = 8, max_local_batch_size = {max_batch} }}
"""
DIGITS = """
epochs = 20
model = { name = "digits-cnn", batch_normalization = false }
dataset = { size = 1437 }
cluster = { max_nodes = 2, price = { usd_per_node_hour = 1.0 } }
batch = { min_local_batch_size = 16, max_local_batch_size = 128 }
"""
"""The job of the example, with at most one rank for each of two cores, so that no rank waits for another's imports."""
DIGITS_COMMAND = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{world_size}",
    str(ROOT / "examples" / "digits_ddp.py"), "--batch-size", "{local_batch_size}", "--epochs", "1000",
]  # fmt: skip


@dataclass(frozen=True)
class Size:
    """The size of the benchmark; candidates have 2, 4, ... `max_nodes` nodes and batches of 8, 16, ... `max_batch`.

    `steady_steps` is the number of steps before the links slow down. `max_runs` limits the runs of the compared
    searches; by default, the service's limit applies. With `full`, every candidate is measured before and after the
    searches. Otherwise, there are only two candidates, and the partial search, which measures both, provides the true
    step times.
    """

    max_nodes: int = 8
    max_batch: int = 128
    steady_steps: int = 2000
    max_runs: int | None = None
    full: bool = True

    @property
    def num_candidates(self) -> int:
        """Return the number of candidates, whose nodes and batches are powers of two."""
        return (self.max_nodes.bit_length() - 1) * (self.max_batch.bit_length() - 3)


SMOKE = Size(max_nodes=2, max_batch=16, steady_steps=30, max_runs=1, full=False)


def main() -> int:
    """Run the benchmark; return 1 if no cluster can be built on this machine."""
    parser = make_parser("cluster", __doc__)
    parser.add_argument("--steady-steps", type=int, help="steps before the links slow down")
    parser.add_argument("--only", choices=("tune", "drift", "launches"))
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay of each link; needs netem in the kernel")
    options = parser.parse_args()
    if (reason := why_no_delay() if options.delay_ms else why_not()) is not None:
        print(f"{reason}: run the benchmark as root on a machine where namespaces can be created", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    figures: dict[str, float] = {}
    size = SMOKE if options.smoke else Size()
    if options.steady_steps is not None:
        size = replace(size, steady_steps=options.steady_steps)
    with (
        Cluster(size.max_nodes, RATE_MBIT, delay_ms=options.delay_ms) as cluster,
        served(cluster) as (client, environment),
        tempfile.TemporaryDirectory() as folder,
    ):
        bench = Bench(cluster, client, environment, Path(folder), size)
        if options.only in (None, "tune"):
            figures |= bench.compare()
            write_json(options.json, figures)
        if options.only == "launches" or (options.only is None and size.full):
            figures |= bench.shared_launches()
            write_json(options.json, figures)
        if options.only in (None, "drift"):
            figures |= bench.drift()
    for key, value in figures.items():
        print(f"{key}: {value:.4g}")
    write_json(options.json, figures)
    return 0


class Bench:
    """A service, a cluster, and the commands that connect them."""

    def __init__(self, cluster: Cluster, client: Client, environment: dict[str, str], folder: Path, size: Size) -> None:
        self.cluster, self.client, self.environment, self.folder, self.size = (
            cluster, client, environment, folder, size,
        )  # fmt: skip
        self.projects: dict[str, Project] = {}

    def project(self, name: str) -> Project:
        """Return the project with this name; the first call for a name creates the project and its token."""
        if name not in self.projects:
            self.client.create_project(ProjectCreate(name=name))
            token = self.client.create_token(TokenCreate(name=name, scope="user", project=name))
            environment = {**self.environment, "TULA_TOKEN": token.secret}
            self.projects[name] = Project(Client(self.client.url, token.secret), environment)
        return self.projects[name]

    def compare(self) -> dict[str, float]:
        """Return the errors, regrets and costs of both searches, compared with measurements of all candidates."""
        before = self.tune("full", project="before") if self.size.full else None
        tuned_by = {search: self.tune(search) for search in ("adaptive", "partial")}
        after = self.tune("full", project="after") if self.size.full else tuned_by["partial"]
        before = before or after
        first, again = _step_times(before), _step_times(after)
        truth = {key: min(first[key], again[key]) for key in first if key in again}
        price = min(_node_seconds(before), _node_seconds(after))
        moved = [again[key] / first[key] - 1 for key in truth]
        figures: dict[str, float] = {"truth.median_change": median([abs(change) for change in moved])}
        print_table(
            "every candidate, twice",
            ["configuration", "before", "after", "change"],
            [
                [f"{nodes} nodes, {batch}", *(f"{t[nodes, batch] * 1e3:.1f} ms" for t in (first, again)), f"{by:+.1%}"]
                for (nodes, batch), by in zip(truth, moved, strict=True)
            ],
        )
        for search, tuned in tuned_by.items():
            answer = tuned["recommendation"]
            predicted = {_key(candidate["configuration"]): candidate for candidate in answer["candidates"]}
            unseen = [key for key, candidate in predicted.items() if key in truth and not candidate["profiled"]]
            errors = [abs(predicted[key]["step_time_s"]["value"] / truth[key] - 1) for key in unseen]
            chosen, best = _key(answer["chosen"]["configuration"]), min(truth, key=lambda key: _total_s(key, truth))
            rows = [
                [
                    f"{nodes} nodes, {batch}",
                    f"{truth[nodes, batch] * 1e3:.1f} ms",
                    f"{predicted[nodes, batch]['step_time_s']['value'] * 1e3:.1f} ms",
                    f"{(predicted[nodes, batch]['step_time_s']['value'] / truth[nodes, batch] - 1) * 100:+.1f} %",
                    "profiled" if predicted[nodes, batch]["profiled"] else "",
                ]
                for nodes, batch in sorted(truth)
                if (nodes, batch) in predicted
            ]
            print_table(f"{search} search", ["configuration", "measured", "predicted", "error", ""], rows)
            print(f"  chosen: {chosen}, fastest as measured: {best}; {tuned['reason']}")
            figures |= {
                f"{search}.median_error": median(errors),
                f"{search}.regret": _total_s(chosen, truth) / _total_s(best, truth) - 1,
                f"{search}.profiling_fraction": _node_seconds(tuned) / price,
                f"{search}.num_runs": len(_done(tuned)),
            }
        return figures

    def shared_launches(self) -> dict[str, float]:
        """Compare shared launches with one launch per run; return the ratios of the costs and the differences in step
        time.
        """
        shared, single, repeat = self.both_ways("waits", self.job_command(10_000), self.waits, repeats=2)
        joint, apart, again = map(_step_times, (shared, single, repeat))
        chosen = [_key(tuned["recommendation"]["chosen"]["configuration"]) for tuned in (shared, single, repeat)]
        figures = {
            "columns.wall_fraction": 2 * shared["wall_s"] / (single["wall_s"] + repeat["wall_s"]),
            "columns.node_seconds_fraction": 2
            * _launch_node_seconds(shared)
            / (_node_seconds(single) + _node_seconds(repeat)),
            "columns.agreement": median(
                [abs(joint[key] / alone[key] - 1) for alone in (apart, again) for key in joint]
            ),
            "columns.repeat": median([abs(again[key] / apart[key] - 1) for key in joint]),
            "columns.same_choice": float(len(set(chosen)) == 1),
            "columns.launches": len({nodes for nodes, _ in joint}),
            "columns.num_runs": len(joint),
            "columns.single_runs": len(apart),
        }
        if self.size.full:
            shared, single = self.both_ways("digits", DIGITS_COMMAND, DIGITS, repeats=1)
            figures |= {
                "columns.digits.wall_fraction": shared["wall_s"] / single["wall_s"],
                "columns.digits.launches": len({nodes for nodes, _ in _step_times(shared)}),
                "columns.digits.num_runs": len(_step_times(shared)),
            }
        return figures

    def both_ways(self, name: str, command: list[str], space: str, *, repeats: int) -> list[dict[str, Any]]:
        """Return the output of a plan with shared launches, and `repeats` outputs of its runs in separate launches."""
        budget = min(RUNS_COMPARED, self.size.num_candidates)
        jobs = [self.work(name, command, space, budget)]
        shapes = sorted(_step_times(jobs[0]), reverse=True)  # largest first, so that one launch probes the links
        jobs += [self.work(f"{name}-{i}", command, space, len(shapes), shapes) for i in range(repeats)]
        times = [_step_times(answers) for answers in jobs]
        print_table(
            f"{name}: step time in a shared launch and in a separate launch",
            ["configuration", "shared launch", *["separate launch"] * repeats],
            [
                [f"{nodes} nodes, {batch}", *(f"{t[nodes, batch] * 1e3:.1f} ms" for t in times)]
                for nodes, batch in sorted(shapes)
            ],
        )
        return jobs

    def drift(self) -> dict[str, float]:
        """Return the number of steps from the slowdown of the links to the alarm, and the number of earlier alarms."""
        client, clean = self.project("adaptive")
        jobs = [job.id for job in client.jobs().jobs]
        job_id = jobs[0] if jobs else self.tune("adaptive")["job"]["id"]
        nodes, batch = min(4, self.size.max_nodes), min(32, self.size.max_batch)
        run = client.create_run(
            job_id,
            RunCreate(
                kind="train", configuration=Configuration(num_nodes=nodes, local_batch_size=batch), holder="bench"
            ),
        )
        log = self.folder / "train.log"
        environment = {**clean, "TULA_RUN_ID": run.id, "TULA_JOB_ID": job_id, "TULA_LOCAL_BATCH_SIZE": str(batch)}
        command = _fill(self.job_command(1_000_000, show=True), nodes, batch)
        with log.open("w") as output:
            training = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )
        try:
            print(f"  drift: {self.size.steady_steps} steps at full speed, then the links slow down", flush=True)
            _wait_for_step(log, self.size.steady_steps, training)
            early = self.drifts(job_id, run.id)
            cut_at = _last_step(log)
            self.cluster.set_rate(RATE_MBIT / SLOWER)
            until = cut_at + STEPS_TO_NOTICE
            alarms: list[dict[str, Any]] = []
            while not alarms and _last_step(log) < until:
                time.sleep(0.5)
                alarms = [event for event in self.drifts(job_id, run.id) if event not in early]
            for event in self.events(job_id, run.id):
                print(f"  {event['kind']}: {event['data'].get('sentence', event['data'])}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(training.pid, 9)
            training.wait()
            self.cluster.set_rate(RATE_MBIT)
        noticed = alarms[0]["data"]["step"] - cut_at if alarms else float("nan")
        return {
            "drift.steps_to_notice": noticed,
            "drift.false_alarms": len(early),
            "drift.steady_steps": cut_at,
        }

    def drifts(self, job_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return the drift events that a run has had so far."""
        return [event for event in self.events(job_id, run_id) if event["kind"] == "drift"]

    def events(self, job_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return the drift and advice events that a run has had so far, from the stream that the dashboard uses."""
        import httpx

        client, environment = self.project("adaptive")
        headers = {"Authorization": f"Bearer {environment['TULA_TOKEN']}", "Last-Event-ID": "0"}
        read: list[dict[str, Any]] = []
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream(
                "GET", f"{client.url}/v1/jobs/{job_id}/events", headers=headers, timeout=httpx.Timeout(5, read=1.0)
            ) as stream,
        ):
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    event = json.loads(line[5:])
                    if event["kind"] in ("drift", "advice") and event.get("run_id") == run_id:
                        read.append(event)
        return read

    def tune(self, search: str, *, project: str = "") -> dict[str, Any]:
        """Run `tula tune` over all candidates; return its JSON. By default, the project is named after the search."""
        client, environment = self.project(project or search)
        folder = self.folder / (project or search)
        spec = self.spec(folder, search, self.waits)
        words = tune_words(spec, folder)
        began, clock = time.monotonic(), processor_clock()
        with (folder / "out").open("w+") as out, (folder / "err").open("w+") as error:
            tuning = subprocess.Popen(
                [*words, "--", *self.job_command(10_000)], env=environment, cwd=ROOT, stdout=out, stderr=error
            )
            try:
                show_progress(search, client, tuning)
            finally:
                tuning.terminate()  # Ctrl-C ends the child process, too, but an error in this process does not
                tuning.wait()
            if tuning.returncode != 0:
                error.seek(0)
                raise RuntimeError(f"tula tune ({search}) failed: {error.read()[-3000:]}")
            out.seek(0)
            tuned: dict[str, Any] = json.load(out)
        tuned["wall_s"] = time.monotonic() - began
        print(
            f"{search}: tuned in {tuned['wall_s']:.0f} s; "
            f"{stolen_share(clock):.0%} of the processor time went to other machines on the host",
            flush=True,
        )
        return tuned

    def work(
        self, project: str, command: list[str], space: str, budget: int, again: Sequence[tuple[int, int]] = ()
    ) -> dict[str, Any]:
        """Profile as `tula tune` does, with shared launches or with one launch for each configuration in `again`."""
        client, environment = self.project(project)
        folder = self.folder / project
        configurations = tuple(Configuration(num_nodes=nodes, local_batch_size=batch) for nodes, batch in again)
        began = time.monotonic()
        job = register(client, load_spec(self.spec(folder, "adaptive", space, budget, share_launches=not again))).job
        work = WorkDir(folder, job.id)
        with work.locked() as holder:
            reporter, template = Reporter(Console(quiet=True)), Template(tuple(command))
            with Runner(client, work, holder, reporter, inherited=environment) as runner:
                tuned = work_through(runner, job, template, again=configurations)
        took_s = time.monotonic() - began
        print(f"{project}: {len(tuned.finished)} runs in {took_s:.1f} s", flush=True)
        return {
            "job": tuned.job.model_dump(mode="json"),
            "recommendation": tuned.recommendation.model_dump(mode="json"),
            "wall_s": took_s,
        }

    @property
    def waits(self) -> str:
        """Return the part of the specification that defines the candidates for `job_command`."""
        return WAITS.format(
            epochs=EPOCHS, dataset=DATASET, max_nodes=self.size.max_nodes, max_batch=self.size.max_batch
        )

    def spec(
        self, folder: Path, search: str, space: str, budget: int | None = None, *, share_launches: bool = False
    ) -> Path:
        """Write a job.toml in a new folder and return its path."""
        folder.mkdir()
        full = search == "full"
        max_runs = budget or (self.size.num_candidates if full else self.size.max_runs)
        profiling = ["measuring_steps = 40", "precision = 0.0"] if full else []
        if max_runs:
            profiling.append(f"max_runs = {max_runs}")
        spec = folder / "job.toml"
        spec.write_text(
            SPEC.format(
                name=f"cluster-{search}",
                search=search,
                space=space,
                share_launches=str(share_launches).lower(),
                profiling="\n".join(profiling),
            )
        )
        return spec

    def job_command(self, steps: int, *, show: bool = False) -> list[str]:
        """Return the user's launch command, with Tula's placeholders."""
        return [
            PYTHON, "-m", "benchmarks._cluster_job", "--nodes", "{num_nodes}",
            "--batch-size", "{local_batch_size}", "--steps", str(steps), "--dataset-size", str(DATASET),
            *(f"--{name}={value}" for name, value in self.cluster.for_ranks.items()),
            *(["--show-steps"] if show else []),
        ]  # fmt: skip


class Project(NamedTuple):
    """A search's project: its client and the environment of its commands."""

    client: Client
    environment: dict[str, str]


def show_progress(search: str, client: Client, tuning: subprocess.Popen[bytes]) -> None:
    """Print a line for each finished run until `tula tune` ends; poll rarely, since the runs need the same cores."""
    printed: set[str] = set()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            tuning.wait(timeout=PROGRESS_S)
        for job in [client.job(summary.id) for summary in client.jobs().jobs]:
            for run in job.plan:
                if run.state not in _ENDED or run.id in printed:
                    continue
                printed.add(run.id)
                took = (run.finished_at - run.started_at).total_seconds() if run.finished_at and run.started_at else 0
                print(
                    f"  {search}: {len(printed)} of {job.runs_planned}, {run.configuration.num_nodes} nodes, "
                    f"{run.configuration.local_batch_size}: {run.state} in {took:.1f} s",
                    flush=True,
                )
        if tuning.poll() is not None:
            return


@contextlib.contextmanager
def served(cluster: Cluster) -> Iterator[tuple[Client, dict[str, str]]]:
    """Run a service at the cluster's host address; yield an administrator's client and the commands' environment."""
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/tula.db"
        migrate(database)
        secret = make_token(database, "admin")  # without a token, a service listens only on the loopback
        with Server(database, host=cluster.host) as server, Client(server.url, secret) as client:
            yield client, clean_environment(TULA_URL=server.url, PYTHONPATH=str(ROOT))


def stolen_share(since: tuple[int, int]) -> float:
    """Return the share of processor time that the host gave to other machines since an earlier `processor_clock`."""
    stolen, rest = (late - early for early, late in zip(since, processor_clock(), strict=True))
    return stolen / max(stolen + rest, 1)


def processor_clock() -> tuple[int, int]:
    """Return the ticks of all processors so far (given to other machines, all others); see /proc/stat in proc(5)."""
    user, nice, system, idle, waiting, hard, soft, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return stolen, user + nice + system + idle + waiting + hard + soft


def _fill(command: list[str], nodes: int, batch: int) -> list[str]:
    return [word.replace("{num_nodes}", str(nodes)).replace("{local_batch_size}", str(batch)) for word in command]


def _key(configuration: dict[str, Any]) -> tuple[int, int]:
    return configuration["num_nodes"], configuration["local_batch_size"]


def _step_times(tuned: dict[str, Any]) -> dict[tuple[int, int], float]:
    return {_key(run["configuration"]): run["step_time_s"] for run in tuned["job"]["plan"] if run["step_time_s"]}


def _total_s(key: tuple[int, int], step_time_s: dict[tuple[int, int], float]) -> float:
    """Return the total training time in seconds according to equation 4a, T = (E D / B) t."""
    return EPOCHS * DATASET / (key[0] * key[1]) * step_time_s[key]


def _done(tuned: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in tuned["job"]["plan"] if run["state"] == "succeeded"]


def _node_seconds(tuned: dict[str, Any]) -> float:
    """Return the node-seconds of all profiling runs, from the start and end times that the service recorded."""

    return sum((ends - began) * nodes for nodes, began, ends in _spans(tuned))


def _launch_node_seconds(tuned: dict[str, Any]) -> float:
    """Return the node-seconds of the launches, assuming that all runs on a cluster size share one launch."""
    spans = _spans(tuned)
    total = 0.0
    for nodes in {count for count, _, _ in spans}:
        of_cluster = [span for span in spans if span[0] == nodes]
        total += nodes * (max(ends for _, _, ends in of_cluster) - min(began for _, began, _ in of_cluster))
    return total


def _spans(tuned: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Return each profiling run's number of nodes, and its start and end in seconds since 1970."""

    def at(run: dict[str, Any], name: str) -> float:
        return datetime.fromisoformat(run[name].replace("Z", "+00:00")).timestamp()

    return [(run["configuration"]["num_nodes"], at(run, "started_at"), at(run, "finished_at")) for run in _done(tuned)]


def _last_step(log: Path) -> int:
    steps = re.findall(r"^step (\d+)", log.read_text()[-4000:], re.MULTILINE)
    return int(steps[-1]) if steps else 0


def _wait_for_step(log: Path, step: int, training: subprocess.Popen[bytes]) -> None:
    while _last_step(log) < step:
        if training.poll() is not None:
            raise RuntimeError(f"the training ended: {log.read_text()[-2000:]}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
