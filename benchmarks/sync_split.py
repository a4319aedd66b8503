"""Tests the agent's split of steps into compute and communication against times measured in the script.

python -m benchmarks.sync_split [--steps N] [--smoke] [--json OUT]

Two DDP ranks (gloo) spin for a known time in the forward and backward passes, and at each step one of them, chosen at
random, spins longer (the injected skew). They reduce their gradients over a link between two network namespaces,
limited by `tc tbf`; without root and iproute2 they use the loopback, and the output says so. The true times of each
step are measured in the script, on a clock that both processes share (CLOCK_MONOTONIC). The exposed communication is
the time from the last gradient to the return of backward, on the rank whose last gradient is ready last, because this
rank does not wait for the other. Compute is the median over ranks of the step time without the rank's own waiting. For
comparison, the output shows how long an all-reduce of all gradients over the link takes without any compute. For each
scenario, the agent's mean over steps is compared with the true mean; `compute.error` and `exposed_comm.error` are the
largest relative errors of all scenarios.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tula_agent
from benchmarks.support.cluster import Cluster, enter, why_not
from benchmarks.support.gloo import fork_ranks, free_port, leave_group
from benchmarks.support.report import make_parser, write_json
from benchmarks.support.sink import Sink

FLOATS = 500_000  # per layer; two layers have 4 MB of gradients in total
RATE_MBIT = 400
WARMUP_STEPS = 5
SMOKE_STEPS, SMOKE_FASTER = 3, 10.0


@dataclass(frozen=True)
class Scenario:
    """The times of a scenario in seconds; at each step, a random rank is late by a random time of up to `skew_s`."""

    name: str
    forward_s: float
    backward_s: float
    skew_s: float
    overlapped: bool

    def faster(self, times: float) -> Scenario:
        """Return the same scenario with compute and skew divided by `times`."""
        return replace(
            self, forward_s=self.forward_s / times, backward_s=self.backward_s / times, skew_s=self.skew_s / times
        )


# 4 MB at 400 Mbit/s take about 85 ms, so that 250 ms of skew are three times the communication.
SCENARIOS = [
    Scenario("no skew, no overlap", 0.03, 0.05, 0.0, False),
    Scenario("no skew, overlap", 0.03, 0.05, 0.0, True),
    Scenario("skew 1x, overlap", 0.03, 0.05, 0.085, True),
    Scenario("skew 3x, no overlap", 0.03, 0.05, 0.255, False),
    Scenario("skew 3x, overlap", 0.03, 0.05, 0.255, True),
]


def spin(seconds: float) -> None:
    """Keep a core busy for `seconds` seconds."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def build_model(scenario: Scenario, late_s: list[float]) -> Any:
    """Return a model of two layers that spin as the scenario specifies; its backward pass takes `late_s[0]` longer."""

    class Spin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, backward_s: float) -> Any:
            ctx.backward_s = backward_s
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            spin(ctx.backward_s + late_s[0] * ctx.backward_s / scenario.backward_s)
            return gradient, None

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.ones(FLOATS))
            self.second = torch.nn.Parameter(torch.ones(FLOATS))

        def forward(self, x: Any) -> Any:
            spin(scenario.forward_s)
            half = scenario.backward_s / 2
            # Order in the backward pass: spin, gradient of `second`, spin, gradient of `first`; or both spins first.
            if scenario.overlapped:
                hidden = Spin.apply(self.first * x, half)
                return (Spin.apply(hidden * self.second, half)).sum()
            return Spin.apply(self.first * self.second * x, 2 * half).sum()

    return Model()


def bare_all_reduce(buckets: int) -> float:
    """Return the median time in seconds of an all-reduce of `buckets` buckets over the link while nothing else runs."""
    times = []
    for _ in range(9):
        parts = [torch.ones(FLOATS) for _ in range(buckets)]
        dist.barrier()
        began = time.perf_counter()
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def rank(scenarios: list[Scenario], steps: int, folder: Path, url: str) -> None:
    """Run one rank: train all scenarios with the agent, one after another, and write the true times."""
    os.environ |= {
        "TULA_URL": url,
        "TULA_SPOOL_DIR": str(folder),
        "TULA_WARMUP_STEPS": str(WARMUP_STEPS),
        "TULA_MEASURE_STEPS": str(steps),
    }
    dist.init_process_group("gloo")
    for number, scenario in enumerate(scenarios):
        os.environ["TULA_RUN_ID"] = f"bench{number}"
        truth = train(scenario, steps)
        (folder / f"truth{number}-{dist.get_rank()}").write_text(json.dumps(truth))
    leave_group()


def train(scenario: Scenario, steps: int) -> dict[str, Any]:
    """Train; return the times at which each step starts, has its last gradient, returns from backward, and ends."""
    late_s = [0.0]
    bare = build_model(scenario, late_s)
    marks: dict[str, float] = {}

    def mark(name: str) -> Any:
        def ready(_parameter: Any) -> None:
            marks[name] = time.perf_counter()  # before DDP's own hook receives the gradient

        return ready

    bare.first.register_post_accumulate_grad_hook(mark("first"))
    bare.second.register_post_accumulate_grad_hook(mark("second"))
    bare_s = bare_all_reduce(2)
    model = torch.nn.parallel.DistributedDataParallel(bare, bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    chance = random.Random(1)
    run = tula_agent.init()
    run.watch(model, optimizer)
    truth = []
    for (x,) in run.steps([(torch.ones(1),)] * (steps + WARMUP_STEPS + 5)):
        began = time.perf_counter()
        late_rank, skew_s = chance.randrange(2), chance.random() * scenario.skew_s  # the same draws on both ranks
        late_s[0] = skew_s if late_rank == dist.get_rank() else 0.0
        loss = model(x)
        loss.backward()
        done = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        truth.append([began, max(marks.values()), done, time.perf_counter()])
    run.finish()
    return {"steps": truth, "bare_s": bare_s}


def serve(port: int, samples: Path, namespace: str, ready: Barrier) -> None:
    """Run a sink for a node's ranks in the node's namespace, so that their reports do not cross the link."""
    if namespace:
        enter(namespace)
    service = Sink(port, samples)
    ready.wait()
    service.serve_forever()


@contextmanager
def link(rate_mbit: float) -> Iterator[Cluster | None]:
    """Yield two nodes with a link of limited bandwidth; if they cannot be created, print a message and yield None."""
    if (reason := why_not()) is not None:
        print(f"{reason}: measuring over the loopback")
        yield None
        return
    with Cluster(2, rate_mbit) as cluster:
        yield cluster


def run_scenarios(
    scenarios: list[Scenario], steps: int, cluster: Cluster | None
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return each scenario's mean times over the same steps, as reported by the agent and as measured in the script.

    One pair of processes runs all scenarios.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        samples, nodes = folder / "samples", [cluster.namespace(node) for node in range(2)] if cluster else [""]
        ready = context.Barrier(len(nodes) + 1)
        servers = [context.Process(target=serve, args=(port, samples, node, ready), daemon=True) for node in nodes]
        try:
            for server in servers:
                server.start()
            ready.wait()
            ranks = partial(rank, scenarios, steps, folder, f"http://127.0.0.1:{port}")
            fork_ranks(ranks, 2, **cluster.for_ranks if cluster else {})
        finally:
            for server in servers:
                server.kill()
                server.join()
        reported = read_samples(samples)
        truths = [
            [json.loads((folder / f"truth{number}-{index}").read_text()) for index in range(2)]
            for number in range(len(scenarios))
        ]
    return [compare(truth, reported[f"bench{number}"]) for number, truth in enumerate(truths)]


def read_samples(path: Path) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Return the compute, exposed communication and skew that the agent reported, by run and step."""
    reported: dict[str, dict[int, tuple[float, float, float]]] = {}
    for line in path.read_text().splitlines():
        route, _, text = line.partition(" ")
        body = json.loads(text)
        if body["rank"] == 0 and body["timing_method"] == "ddp_logger" and not body["warmup"]:
            columns = (body["compute_time_s"], body["exposed_comm_time_s"], body["skew_s"])
            of_run = reported.setdefault(route.split("/")[3], {})
            of_run.update(zip(body["step"], zip(*columns, strict=True), strict=True))
    return reported


def compare(
    truth: list[dict[str, Any]], reported: dict[int, tuple[float, float, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the means of the agent's columns, and the means of the true times over the same steps."""
    agent: dict[str, list[float]] = {"compute": [], "exposed_comm": [], "skew": []}
    true: dict[str, list[float]] = {"compute": [], "exposed_comm": [], "skew": []}
    for step, (compute, exposed, skew) in sorted(reported.items()):
        rows = [ranks["steps"][step] for ranks in truth]
        _, last, returned, _ = max(rows, key=lambda row: row[1])
        true["exposed_comm"].append(returned - last)
        true["compute"].append(statistics.median((row[3] - row[0]) - (row[2] - row[1]) for row in rows))
        true["skew"].append(last - min(row[1] for row in rows))
        for name, value in zip(agent, (compute, exposed, skew), strict=True):
            agent[name].append(value)
    true["bare link"] = [ranks["bare_s"] for ranks in truth]
    means = [{name: statistics.fmean(values) for name, values in side.items()} for side in (agent, true)]
    return means[0], means[1]


def measure(steps: int, groups: list[list[Scenario]], rate_mbit: float) -> dict[str, float]:
    """Return the errors of every scenario and the largest errors; the scenarios of a group share two processes."""
    worst = {"compute": 0.0, "exposed_comm": 0.0}
    figures: dict[str, float] = {}
    with link(rate_mbit) as cluster:
        where = f"a link of {rate_mbit:g} Mbit/s" if cluster else "the loopback, not limited"
        print(f"2 ranks over {where}, {steps} steps each; times reported by the agent / true times, in ms")
        measured = (pair for group in groups for pair in run_scenarios(group, steps, cluster))
        for scenario, (agent, true) in zip(SCENARIOS, measured, strict=True):
            cells = []
            for name in worst:
                error = abs(agent[name] / true[name] - 1)
                worst[name] = max(worst[name], error)
                figures[f"{scenario.name}: {name}.error"] = error
                cells.append(f"{name} {1e3 * agent[name]:.1f} / {1e3 * true[name]:.1f} ({100 * error:.1f} %)")
            skew = f"skew {1e3 * agent['skew']:.1f} / {1e3 * true['skew']:.1f}  bare link {1e3 * true['bare link']:.1f}"
            print(f"  {scenario.name:22} {'  '.join(cells)}  {skew}", flush=True)
        figures["link.rate_limited"] = float(cluster is not None)
    return {f"{name}.error": error for name, error in worst.items()} | figures


def main() -> None:
    """Measure all scenarios, and print both largest errors with their target of 5 %."""
    parser = make_parser("sync_split", __doc__)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("TULA_")]:
        del os.environ[name]
    if options.smoke:
        scenarios = [scenario.faster(SMOKE_FASTER) for scenario in SCENARIOS]
        figures = measure(SMOKE_STEPS, [scenarios], RATE_MBIT * SMOKE_FASTER)
    else:
        figures = measure(options.steps, [[scenario] for scenario in SCENARIOS], RATE_MBIT)
    for name in ("compute.error", "exposed_comm.error"):
        print(f"{name:20} {figures[name]:.4f}  (target: at most 0.05)")
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
