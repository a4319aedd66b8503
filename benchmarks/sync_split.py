"""Does the agent separate compute from communication? Real DDP over gloo against a truth taken inside the script.

python -m benchmarks.sync_split [--steps N] [--smoke] [--json OUT]

Two ranks spin for a known time in forward and backward, one of them at random longer (the injected skew), and reduce
their gradients over a link limited by `tc tbf` between two network namespaces (root and iproute2; without them over
the loopback, which the output says). The truth is taken step by step inside the script, on a clock that both processes
share (CLOCK_MONOTONIC): communication is exposed on the rank that has its last gradient last (it waits for no other),
from that gradient to the return of its backward; compute is all of the step but each rank's own waiting, the median
over ranks. Beside it stands what the bare link takes for all gradients, between barriers, with nothing to hide behind.
`compute.error` and `exposed_comm.error` are the worst relative errors of the mean over all scenarios.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["main"]

FLOATS = 500_000  # per layer: two layers, 4 MB of gradients in all
RATE_MBIT = 400
WARMUP_STEPS = 5
SMOKE_STEPS = 3


@dataclass(frozen=True)
class Scenario:
    """Times in seconds; skew is uniform up to `skew_s` and falls on a random rank at each step."""

    name: str
    forward_s: float
    backward_s: float
    skew_s: float
    overlapped: bool


# 4 MB at 400 Mbit/s take about 85 ms, so that 250 ms of skew are three times the communication.
SCENARIOS = [
    Scenario("no skew, no overlap", 0.03, 0.05, 0.0, False),
    Scenario("no skew, overlap", 0.03, 0.05, 0.0, True),
    Scenario("skew 1x, overlap", 0.03, 0.05, 0.085, True),
    Scenario("skew 3x, no overlap", 0.03, 0.05, 0.255, False),
    Scenario("skew 3x, overlap", 0.03, 0.05, 0.255, True),
]


def spin(seconds: float) -> None:
    """Compute for so long."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def model_of(scenario: Scenario, late_s: list[float]) -> Any:
    """Two layers that spin as the scenario says; backward takes `late_s[0]` longer."""
    import torch

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
            # In backward: spin, gradient of `second`, spin, gradient of `first`; or both spins first.
            if scenario.overlapped:
                hidden = Spin.apply(self.first * x, half)
                return (Spin.apply(hidden * self.second, half)).sum()
            return Spin.apply(self.first * self.second * x, 2 * half).sum()

    return Model()


def bare_all_reduce(buckets: int) -> float:
    """Seconds that the link takes for so many buckets, with nothing else going on: the median of a few."""
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(9):
        parts = [torch.ones(FLOATS) for _ in range(buckets)]
        dist.barrier()
        began = time.perf_counter()
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def rank(numbers: list[int], steps: int, folder: Path) -> None:
    """One rank: trains under the agent, scenario by scenario, and writes what truly happened."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number in numbers:
        os.environ["TULA_RUN_ID"] = run_of(number)
        truth = train(SCENARIOS[number], steps)
        (folder / f"truth{number}-{dist.get_rank()}").write_text(json.dumps(truth))
    dist.destroy_process_group()


def run_of(number: int) -> str:
    """The run that a scenario's samples are sent for."""
    return f"bench{number}"


def train(scenario: Scenario, steps: int) -> dict[str, Any]:
    """By step: when it began, when the last gradient was there, when backward returned, when it ended."""
    import torch
    import torch.distributed as dist

    import tula_agent

    late_s = [0.0]
    bare = model_of(scenario, late_s)
    marks: dict[str, float] = {}

    def mark(name: str) -> Any:
        def ready(_parameter: Any) -> None:
            marks[name] = time.perf_counter()  # before DDP's own hook sees the gradient

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


def serve(port: int, out: Path) -> None:
    """A service that writes each body of samples to a file, after its route."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path.endswith("/samples"):
                with out.open("ab") as file:
                    file.write(self.path.encode() + b" " + body + b"\n")
            answer = b'{"stored": 1, "duplicates": 0}'
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_PATCH = do_GET = do_POST

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


@contextmanager
def link() -> Iterator[list[tuple[list[str], str, str]] | None]:
    """For each rank: a command prefix, its interface, the first rank's address. None where there are no namespaces."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        yield None
        return
    names = [f"tula{os.getpid()}{end}" for end in "ab"]
    ends = [f"tb{os.getpid()}{end}" for end in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {ends[0]} type veth peer name {ends[1]}"]
    for index, (name, end) in enumerate(zip(names, ends, strict=True)):
        inside = f"ip netns exec {name}"
        commands += [
            f"ip link set {end} netns {name}",
            f"{inside} ip addr add 10.91.7.{index + 1}/24 dev {end}",
            f"{inside} ip link set {end} up",
            f"{inside} ip link set lo up",
            f"{inside} tc qdisc add dev {end} root tbf rate {RATE_MBIT}mbit burst 32kb latency 400ms",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield [(["ip", "netns", "exec", name], end, "10.91.7.1") for name, end in zip(names, ends, strict=True)]
    except subprocess.CalledProcessError as error:
        print(f"no network namespaces here ({error.stderr.decode().strip()}): measuring over the loopback")
        yield None
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run_scenarios(
    numbers: list[int], steps: int, places: list[tuple[list[str], str, str]] | None
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Of each scenario, means over the steps that both sides have: what the agent reported, and the truth.

    One pair of processes goes through all of them.
    """
    listed = ",".join(map(str, numbers))
    base = [sys.executable, "-m", "benchmarks.sync_split", "--scenarios", listed, "--steps", str(steps)]
    rooms = places or [([], "lo", "127.0.0.1")] * 2
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port, store = random.randrange(20_000, 30_000), random.randrange(30_000, 40_000)
        server = subprocess.Popen([*rooms[0][0], *base, "--serve", str(port), "--out", str(folder / "samples")])
        ranks = []
        try:
            for index, (prefix, interface, address) in enumerate(rooms):
                variables = {
                    "RANK": str(index),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(store),
                    "GLOO_SOCKET_IFNAME": interface,
                    "OMP_NUM_THREADS": "1",
                    "TULA_URL": f"http://127.0.0.1:{port}",
                    "TULA_SPOOL_DIR": str(folder),
                    "TULA_WARMUP_STEPS": str(WARMUP_STEPS),
                    "TULA_MEASURE_STEPS": str(steps),
                }
                command = [*prefix, *base, "--rank", "--out", str(folder)]
                ranks.append(subprocess.Popen(command, env=clean | variables, stderr=subprocess.DEVNULL))
            if any(process.wait(600) for process in ranks):
                raise RuntimeError("a rank failed: see above")
        finally:
            for process in [*ranks, server]:
                process.kill()
                process.wait()
        reported = read_samples(folder / "samples")
        truths = [
            [json.loads((folder / f"truth{number}-{index}").read_text()) for index in range(2)] for number in numbers
        ]
    return [compare(truth, reported[run_of(number)]) for number, truth in zip(numbers, truths, strict=True)]


def read_samples(path: Path) -> dict[str, dict[int, tuple[float, float, float]]]:
    """By run and step, what the agent reported: compute, exposed communication, skew."""
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
    """Means of the agent's columns and of the truth over the same steps."""
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


def measure(steps: int, groups: list[list[int]]) -> dict[str, float]:
    """Every scenario and the worst errors; those of a group share two processes."""
    worst = {"compute": 0.0, "exposed_comm": 0.0}
    figures: dict[str, float] = {}
    with link() as places:
        where = f"a link of {RATE_MBIT} Mbit/s" if places else "the loopback, not limited"
        print(f"2 ranks over {where}, {steps} steps each; agent / truth in ms")
        found = (pair for group in groups for pair in run_scenarios(group, steps, places))
        for scenario, (agent, true) in zip(SCENARIOS, found, strict=True):
            cells = []
            for name in worst:
                error = abs(agent[name] / true[name] - 1)
                worst[name] = max(worst[name], error)
                figures[f"{scenario.name}: {name}.error"] = error
                cells.append(f"{name} {1e3 * agent[name]:.1f} / {1e3 * true[name]:.1f} ({100 * error:.1f} %)")
            skew = f"skew {1e3 * agent['skew']:.1f} / {1e3 * true['skew']:.1f}  bare link {1e3 * true['bare link']:.1f}"
            print(f"  {scenario.name:22} {'  '.join(cells)}  {skew}", flush=True)
        figures["link.rate_limited"] = float(places is not None)
    return {f"{name}.error": error for name, error in worst.items()} | figures


def main() -> None:
    """Measure, print, and compare with what is to be reached: 5 % for both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--smoke", action="store_true", help="run for seconds; the figures are worth nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scenarios", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank([int(number) for number in options.scenarios.split(",")], options.steps, options.out)
    if options.serve:
        return serve(options.serve, options.out)
    everything = list(range(len(SCENARIOS)))
    figures = measure(SMOKE_STEPS, [everything]) if options.smoke else measure(options.steps, [[n] for n in everything])
    for name in ("compute.error", "exposed_comm.error"):
        print(f"{name:20} {figures[name]:.4f}  (to reach: at most 0.05)")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
