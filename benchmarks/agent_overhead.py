"""Measures the agent's cost by alternating between training with and without it, for a model of ResNet-50's size.

python -m benchmarks.agent_overhead [--pairs N] [--smoke] [--json OUT]

Two processes do the same fixed work on 161 tensors with 25.6 million parameters in total; one process runs the agent,
which reports to a real HTTP server. The processes take turns of a few steps on the same machine, and each is stopped
(SIGSTOP) while the other runs. In each pair of turns, the median step time without the agent is subtracted from the
median step time with it. `step.overhead` is the median of these differences over all pairs, plus the cost of the
gradient norms per step, as a fraction of the step time without the agent. The agent computes norms at two consecutive
steps, and then not again for many steps. Steps with norms are too rare to affect a median, and the measured steps do
not always include them. Therefore the cost of the norms is the time that two computations take, divided by the number
of steps from one pair of computations to the next. `step.overhead_low` and `step.overhead_high` are the ends of a 95 %
interval from a bootstrap over pairs of turns. The shipping thread sends at fixed times, even if its process was stopped
in between, so its CPU time is measured in two long turns: in the first 30 s of the run, when it sends every second
(`agent.thread_begin_us_per_step`), and afterwards, when it sends every ten seconds (`agent.thread_us_per_step`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support import PYTHON, clean_environment
from benchmarks.support.report import make_parser, write_json
from benchmarks.support.sink import Sink

TENSORS, PARAMETERS = 161, 25_557_032
STEP_S = 0.1
WARMUP_STEPS = 30
BEGIN_STEPS, LONG_STEPS = 100, 400
TARGETS = {
    "step.overhead": 0.003,
    "agent.cpu_us_per_step": 60,
    "agent.thread_us_per_step": 100,
    "agent.memory_bytes": 32 * 2**20,
    "agent.import_ms": 300,
}


class Training:
    """The fixed work of a step: a given number of matrix products, and a step of the optimizer."""

    def __init__(self, parameters_of_all: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(parameters_of_all // TENSORS)) for _ in range(TENSORS)]
        self.model = torch.nn.Module()
        self.model.weights = torch.nn.ParameterList(parameters)
        self.optimizer = torch.optim.SGD(parameters, lr=1e-9)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        self._matrix = torch.randn(256, 256)
        self._multiply = torch.mm
        self.batches: Any = ((torch.zeros(32, 4),) for _ in iter(int, 1))

    def work(self, rounds: int) -> None:
        """Do the work of one step."""
        for _ in range(rounds):
            self._multiply(self._matrix, self._matrix)
        self.optimizer.step()

    def count_rounds(self, step_s: float) -> int:
        """Return the number of rounds with which a step takes `step_s` seconds."""

        def least(rounds: int) -> float:
            times = []
            for _ in range(7):
                began = time.perf_counter()
                self.work(rounds)
                times.append(time.perf_counter() - began)
            return min(times)

        fixed, varying = least(1), least(101)
        return max(1, round(100 * (step_s - fixed) / (varying - fixed)))


class Agent:
    """The agent in a training process; `spent` collects the CPU times of its calls on the training thread, by part."""

    def __init__(self, training: Training, spent: dict[str, list[float]]) -> None:
        import tula_agent
        from tula_agent.ship.transport import Transport

        self._spent = spent
        self._norms: list[float] = []
        self._warm_norms = 0
        self._norms_every, self._sent_bytes = 1.0, 0
        self.run = tula_agent.init(dataset_size=1_000_000)
        recorder = self.run.recorder
        assert recorder is not None
        self._recorder: Any = recorder
        for part, name in (
            ("timing", "want_batch"),
            ("timing", "batch_ready"),
            ("gradients", "before_optimizer_step"),
        ):
            setattr(recorder, name, timed(getattr(recorder, name), part, spent))
        self.run.watch(training.model, training.optimizer)
        recorder.gradients.read = self._noting_interval(  # type: ignore[method-assign]
            timed(recorder.gradients.read, "norms", {"norms": self._norms})
        )
        Transport.send = self._counting_bytes(Transport.send)  # type: ignore[method-assign]
        training.batches = self.run.steps(training.batches)

    def warmed_up(self) -> None:
        """Start counting norms and sent bytes after the warm-up."""
        self._warm_norms = len(self._norms)
        self._sent_bytes = 0

    def _noting_interval(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the gradient reader's `read` to record the number of steps from one pair of norms to the next."""

        def noting(step: int, *rest: Any) -> Any:
            values = read(step, *rest)
            if self._recorder.gradients.due > step:
                self._norms_every = self._recorder.gradients.due - step + 1
            return values

        return noting

    def _counting_bytes(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counting(transport: Any, request: Any) -> Any:
            self._sent_bytes += len(request.body)
            return send(transport, request)

        return counting

    def shipping_cpu_s(self) -> float:
        """Return the CPU seconds that the shipping thread has used so far."""
        thread = next(thread for thread in threading.enumerate() if thread.name == "tula-agent")
        assert thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def report(self, measured: int) -> dict[str, float]:
        """Return the agent's mean costs per step over the `measured` steps after the warm-up."""
        calls = {"timing": 2, "gradients": 1}  # each call includes reading the clock, which is not a cost of the agent
        clock = sum(self._spent["clock"])
        report = {
            f"{part}_us": 1e6 * (sum(self._spent[part]) - number * clock) / measured for part, number in calls.items()
        }
        # The first pair of norms also loads kernels. Whether a later pair occurs in the measured steps is random.
        report["norms_us"] = 2e6 * statistics.mean(self._norms[2:]) / self._norms_every
        report["gradients_us"] += report["norms_us"] - 1e6 * sum(self._norms[self._warm_norms :]) / measured
        report["sent_bytes"] = self._sent_bytes / measured
        return report


def child(turns: Connection, environment: dict[str, str], parameters: int) -> None:
    """Run as one of the two processes: take the requested steps, and send the time of each step in seconds.

    The first number received is the number of rounds in a step; with 0, the number is chosen so that a step takes
    STEP_S seconds. Each further number is the number of steps to take; 0 ends the process. After a negative number of
    steps, the process sends the CPU time that the shipping thread used during these steps, in seconds.
    """
    os.environ.clear()
    os.environ.update(environment)
    training = Training(parameters)
    rounds = turns.recv() or training.count_rounds(STEP_S)
    turns.send(rounds)
    spent: dict[str, list[float]] = {}
    agent = Agent(training, spent) if "TULA_URL" in environment else None
    nothing = timed(lambda: None, "clock", spent)
    steps = 0
    while count := turns.recv():
        times = []
        shipping_s = agent.shipping_cpu_s() if agent is not None else 0.0
        for _ in range(abs(count)):
            began = time.perf_counter()
            next(training.batches)
            training.work(rounds)
            nothing()
            if agent is not None:
                agent.run.log(loss=0.5)
            times.append(time.perf_counter() - began)
        steps += abs(count)
        if steps == WARMUP_STEPS:
            spent.clear()
            if agent is not None:
                agent.warmed_up()
        turns.send(times if agent is None or count > 0 else agent.shipping_cpu_s() - shipping_s)
    report = {} if agent is None else agent.report(steps - WARMUP_STEPS)
    turns.send(report | {"resident": resident()})


def timed(function: Any, part: str, spent: dict[str, list[float]]) -> Any:
    """Return a wrapper of `function` that records the CPU time of each call under `part`, in seconds."""

    def call(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            spent.setdefault(part, []).append(time.thread_time() - began)

    return call


def resident() -> int:
    """Return the resident bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class Process:
    """A child process that is stopped except during its turns; every child is forked with the same modules imported."""

    def __init__(self, environment: dict[str, str], parameters: int) -> None:
        context = multiprocessing.get_context("fork")
        self._turns, turns = context.Pipe()
        self._process = context.Process(target=child, args=(turns, environment, parameters), daemon=True)
        self._process.start()

    def ask(self, number: int) -> Any:
        """Send a number to the child, let it run until it sends a result, and return the result."""
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
        self._turns.send(number)
        answer = self._turns.recv()
        os.kill(pid, signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def import_ms(repeats: int) -> float:
    """Return the shortest time, in ms, in which one of `repeats` new interpreters imports `tula_agent` after torch."""
    code = "import time, torch; t = time.perf_counter(); import tula_agent; print((time.perf_counter() - t) * 1e3)"
    command = [PYTHON, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(repeats)]
    return min(float(run.stdout) for run in runs)


def measure(
    pairs: int,
    turn: int,
    rounds: int = 0,
    imports: int = 5,
    long: tuple[int, int] = (BEGIN_STEPS, LONG_STEPS),
    parameters: int = PARAMETERS,
) -> dict[str, float]:
    """Measure all figures that the module's docstring describes, and return them by key.

    A step consists of `rounds` rounds of work; with 0, the number is chosen so that a step takes STEP_S seconds. `long`
    contains the numbers of steps in the two long turns, and `parameters` is the number of the model's parameters.
    """
    with tempfile.TemporaryDirectory() as spool, Sink() as server:
        reporting = {"TULA_URL": server.url, "TULA_RUN_ID": "bench", "TULA_SPOOL_DIR": spool}
        plain, agent = (Process(clean_environment(**each), parameters) for each in ({}, reporting))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            rounds = plain.ask(rounds)
            agent.ask(rounds)
            for process in (plain, agent):
                process.ask(WARMUP_STEPS)
            begin_s = agent.ask(-long[0]) / long[0]
            without, differences = [], []
            for pair in range(pairs):
                order = (plain, agent) if pair % 2 else (agent, plain)
                times = {process: statistics.median(process.ask(turn)) for process in order}
                without.append(times[plain])
                differences.append(times[agent] - times[plain])
            shipping_s = agent.ask(-long[1]) / long[1]
            baseline, report = plain.ask(0), agent.ask(0)
        finally:
            plain.close()
            agent.close()
            server.shutdown()
    step_s = statistics.median(without)
    norm = report["norms_us"] * 1e-6 / step_s
    relative = np.array(differences) / step_s
    draws = np.random.default_rng(0).choice(relative, (4000, len(relative)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975]) + norm
    return {
        "step.time_s": step_s,
        "step.overhead": float(np.median(relative)) + norm,
        "step.overhead_low": float(low),
        "step.overhead_high": float(high),
        "agent.cpu_us_per_step": report["timing_us"] + report["gradients_us"],
        "agent.timing_us_per_step": report["timing_us"],
        "agent.gradients_us_per_step": report["gradients_us"],
        "agent.norms_us_per_step": report["norms_us"],
        "agent.thread_begin_us_per_step": 1e6 * begin_s,
        "agent.thread_us_per_step": 1e6 * shipping_s,
        "agent.memory_bytes": report["resident"] - baseline["resident"],
        "agent.bytes_per_step": report["sent_bytes"],
        "agent.import_ms": import_ms(imports),
    }


def main() -> None:
    """Measure the figures, and print them with their targets."""
    parser = make_parser("agent_overhead", __doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--turn", type=int, default=8, help="number of steps in a turn of one process")
    options = parser.parse_args()
    if options.smoke:
        figures = measure(2, 4, rounds=1, imports=1, long=(4, 4), parameters=64 * TENSORS)
    else:
        figures = measure(options.pairs, options.turn)
    for name, value in figures.items():
        target = f"  (target: at most {TARGETS[name]:g})" if name in TARGETS else ""
        print(f"{name:32} {value:.6g}{target}")
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
