"""Tests predictions for training with steps of unequal length, with real processes and a real service.

    python -m benchmarks.stalls [--steps N] [--json OUT] [--smoke]

For each scenario, a job is profiled as by `tula tune`, and then trains for 400 steps with the recommended
configuration. A step sleeps for a time that grows with the batch. In addition, `stall2`, `stall4` and `stall8` wait for
data at every second, fourth and eighth step, as a loader with 2, 4 or 8 slow workers does; `evaluation` evaluates for
half a second at every 50th step, within `run.paused()`; and `bimodal` takes three times as long at a random half of its
steps (the worst of three seeds is reported). The script measures the true step time: the duration of the loop without
the evaluations, divided by the number of steps. `<scenario>.error` is the relative error of the prediction, and
`stalls.worst_error` is the largest of these errors.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import tula_agent
from benchmarks.support.forked import Server
from benchmarks.support.report import make_parser, print_table, write_json
from benchmarks.support.server import make_token, migrate
from tula_client import Client
from tula_client.launch.process import run_variables
from tula_wire import ClaimRequest, Configuration, JobSpec, Run, RunCreate

TO_REACH = 0.1
FLOOR_S, EXAMPLE_S = 0.03, 0.0005
STALL_S = 0.0008  # per example that the slow workers load
EVALUATION_S, EVALUATE_EVERY = 0.5, 50
SLOW_TIMES = 3.0
SEEDS, STEPS = 3, 400
SMOKE_STEPS, SMOKE_MEASURED, SMOKE_PACE = 12, 8, 0.1
HOLDER = "bench"


@dataclass(frozen=True)
class Scenario:
    """The irregularities of a scenario; `stall_every` and `evaluate_every` are 0 without stalls or evaluations.

    All times are multiplied by `pace`.
    """

    name: str
    stall_every: int = 0
    evaluate_every: int = 0
    bimodal: bool = False
    pace: float = 1.0


SCENARIOS = [
    *(Scenario(f"stall{every}", stall_every=every) for every in (2, 4, 8)),
    Scenario("evaluation", evaluate_every=EVALUATE_EVERY),
    Scenario("bimodal", bimodal=True),
]


def batches(scenario: Scenario, size: int, steps: int) -> Iterator[torch.Tensor]:
    """Yield batches of `size` examples as a loader does, some of them late."""
    for number in range(1, steps + 1):
        if scenario.stall_every and number % scenario.stall_every == 0:
            time.sleep(scenario.pace * STALL_S * size * scenario.stall_every)
        yield torch.zeros(size, 1)


def train(scenario: Scenario, variables: dict[str, str], steps: int, seed: int, result: Connection) -> None:
    """Train as a user's script does, in one of the run's processes; send the mean seconds per step to `result`."""
    os.environ.update(variables)
    size, dice = int(variables["TULA_LOCAL_BATCH_SIZE"]), random.Random(seed)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    run = tula_agent.init(dataset_size=100_000)
    run.watch([], optimizer)
    began, left_out_s, done = time.perf_counter(), 0.0, 0
    for batch in run.steps(batches(scenario, size, steps)):
        slow = scenario.bimodal and dice.random() < 0.5
        time.sleep(scenario.pace * (FLOOR_S + EXAMPLE_S * size) * (SLOW_TIMES if slow else 1.0))
        weight.grad = batch.mean(0)
        optimizer.step()
        done += 1
        if scenario.evaluate_every and done % scenario.evaluate_every == 0:
            left_at = time.perf_counter()
            with run.paused():
                time.sleep(scenario.pace * EVALUATION_S)
            left_out_s += time.perf_counter() - left_at
    result.send((time.perf_counter() - began - left_out_s) / max(done, 1))
    run.finish()


class Bench:
    """A service, and the processes that report to it."""

    def __init__(self, client: Client, url: str, token: str, folder: Path, steps: int, smoke: bool) -> None:
        self.client, self.url, self.token, self.folder, self.steps, self.smoke = (
            client, url, token, folder, steps, smoke,
        )  # fmt: skip

    def launch(self, scenario: Scenario, run: Run, steps: int, seed: int) -> float:
        """Train in one of the run's processes; return the mean seconds per step."""
        folder = self.folder / run.id
        variables = run_variables(
            run, url=self.url, token=self.token, spool=folder, checkpoints=folder, restart=0
        )  # fmt: skip
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(scenario, variables, steps, seed, theirs))
        process.start()
        theirs.close()
        took_s = float(ours.recv())
        process.join()
        return took_s

    def profile(self, job_id: str, scenario: Scenario, seed: int) -> int:
        """Carry out all runs of the job's plan; return their number."""
        done = 0
        while True:
            claimed = self.client.claim(job_id, ClaimRequest(holder=HOLDER))
            if claimed.run is not None:
                done += 1
                self.launch(scenario, claimed.run, 10_000, seed + 100 * done)
            elif claimed.retry_after_s is None:
                return done
            else:
                time.sleep(min(claimed.retry_after_s, 0.5))

    def error(self, scenario: Scenario, seed: int) -> list[float]:
        """Return the number of runs, the predicted and the measured milliseconds per step, and the relative error."""
        body = {
            "name": f"{scenario.name}-{seed}",
            "model": {"name": f"sleeps-{scenario.name}-{seed}", "parameters": 1},
            "dataset": {"size": 100_000},
            "cluster": {"max_nodes": 1},
            "batch": {"min_local_batch_size": 32, "max_local_batch_size": 128},
            "objective": "time",
            "profiling": {"measuring_steps": SMOKE_MEASURED, "max_runs": 1} if self.smoke else {},
        }
        job = self.client.register(JobSpec.model_validate(body)).job
        runs = self.profile(job.id, scenario, seed)
        chosen = self.client.recommendation(job.id).chosen
        assert chosen is not None
        c: Configuration = chosen.configuration
        run = self.client.create_run(job.id, RunCreate(kind="train", configuration=c, holder=HOLDER))
        true_s, predicted_s = self.launch(scenario, run, self.steps, seed), chosen.step_time_s.value
        return [runs, 1e3 * predicted_s, 1e3 * true_s, abs(predicted_s / true_s - 1.0)]


def measure(steps: int, smoke: bool) -> dict[str, float]:
    """Measure all scenarios with one service."""
    figures, rows = {}, []
    with tempfile.TemporaryDirectory() as name:
        database = f"sqlite:///{name}/stalls.db"
        migrate(database)
        token = make_token(database)
        with Server(database) as server:
            bench = Bench(Client(server.url, token), server.url, token, Path(name), steps, smoke)
            for scenario in (replace(each, pace=SMOKE_PACE if smoke else 1.0) for each in SCENARIOS):
                seeds = range(1 if smoke or not scenario.bimodal else SEEDS)
                runs, predicted, true, error = max((bench.error(scenario, seed) for seed in seeds), key=lambda r: r[-1])
                figures[f"{scenario.name}.error"] = error
                rows.append([scenario.name, f"{runs:.0f}", f"{predicted:.1f}", f"{true:.1f}", f"{error:.1%}"])
                print(*rows[-1], flush=True)
    print_table("milliseconds per step", ["scenario", "runs", "predicted", "trained", "error"], rows)
    return {"stalls.worst_error": max(figures.values())} | figures


def main() -> None:
    """Measure all scenarios, and print the largest error with its target."""
    parser = make_parser("stalls", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="number of steps of each training run")
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("TULA_")]:
        del os.environ[name]
    figures = measure(SMOKE_STEPS if options.smoke else options.steps, options.smoke)
    print(f"stalls.worst_error {figures['stalls.worst_error']:.3f}  (target: at most {TO_REACH})")
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
