"""Tests what the agent needs from a device (its clock and memory figures), and that training remains unchanged."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.agent.sink import Sink
from tula_agent.config import read_config
from tula_agent.measure.memory import MemoryMonitor
from tula_agent.measure.step_timer import clock_for
from tula_agent.oom_watch import cuda_oom_count, is_out_of_memory
from tula_agent.run import Run
from tula_agent.scaling import TulaOptimizer
from tula_agent.scaling.direction import corrections
from tula_agent.scaling.noise import noise_moments

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")]
MIB = 2**20
ALLOCATION_BYTES, IMPOSSIBLE_BYTES = 256 * MIB, 2**50
DRIVER_TOLERANCE_BYTES = 32 * MIB
"""The driver allocates in pages and the allocator in segments of 2 or 20 MiB."""
WIDTH, EXAMPLES = 4096, 4096
WARMUP_STEPS, MEASURED_STEPS = 5, 5
MAX_STEP_OVERHEAD, MAX_CPU_S = 0.003, 60e-6
"""What the agent may add to a step, as a share of its time and in CPU seconds of the training thread."""


@dataclass
class Training:
    """The final weights of a short training run, and its wall-clock time and CPU time per step."""

    weights: list[torch.Tensor]
    step_s: float
    cpu_s: float
    steps_counted: int
    steps_skipped: int


class Trainer:
    """Trains a perceptron in the same way every time, with or without the agent."""

    def __init__(self, device: torch.device, sink: Sink, spool: Path) -> None:
        self.device, self.sink, self.spool = device, sink, spool

    @contextmanager
    def watched(self, agent: bool = True, **variables: str) -> Iterator[Run]:
        """Yield a run that reports to the sink, in which the agent must not fail, or a run without an agent."""
        if not agent:
            yield Run(None)
            return
        place = {"TULA_URL": self.sink.url, "TULA_RUN_ID": "run-1", "TULA_SPOOL_DIR": str(self.spool)}
        run = Run(read_config(place | variables))
        assert run.recorder is not None
        try:
            yield run
        finally:
            run.finish()
        assert not run.guard.failures
        assert not self.sink.invalid

    def train(
        self,
        steps: int,
        *,
        examples: int = EXAMPLES,
        width: int = WIDTH,
        agent: bool = False,
        compiled: bool = False,
        spoiled_step: int | None = None,
        at_end: Callable[[Run], None] | None = None,
        **variables: str,
    ) -> Training:
        """Train for `steps` steps after WARMUP_STEPS.

        With `spoiled_step`, train in mixed precision with a GradScaler, and make the loss of this step infinite.
        """
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        batch = torch.randn(examples, width, device=self.device)
        scaler = None if spoiled_step is None else torch.amp.GradScaler("cuda", init_scale=1024.0)
        forward = torch.compile(model) if compiled else model
        skipped, began, cpu_began = 0, 0.0, 0.0
        with self.watched(agent, **variables) as run:
            run.watch(model, optimizer)
            for step, data in enumerate(run.steps(itertools.repeat(batch, WARMUP_STEPS + steps))):
                if step == WARMUP_STEPS:
                    torch.cuda.synchronize()
                    began, cpu_began = time.perf_counter(), time.thread_time()
                optimizer.zero_grad()
                if scaler is None:
                    forward(data).square().mean().backward()
                    optimizer.step()
                else:
                    skipped += scaled_step(forward, data, optimizer, scaler, spoiled=step == spoiled_step)
            cpu_ended = time.thread_time()
            torch.cuda.synchronize()
            step_s, cpu_s = (time.perf_counter() - began) / steps, (cpu_ended - cpu_began) / steps
            if at_end is not None:
                at_end(run)
            counted = run.recorder.timer.step if run.recorder is not None else 0
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        return Training(weights, step_s, cpu_s, counted, skipped)


def scaled_step(
    model: Any, data: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, spoiled: bool
) -> int:
    """Take one step of mixed precision; return 1 if the scaler skipped it."""
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(data).float().square().mean()
    scaler.scale(loss * math.inf if spoiled else loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return int(scaler.get_scale() < before)


@pytest.fixture
def trainer(device: torch.device, sink: Sink, tmp_path: Path) -> Trainer:
    return Trainer(device, sink, tmp_path)


def same_weights(left: Training, right: Training) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.weights, right.weights, strict=True))


def peak_of(trainer: Trainer, examples: int) -> int:
    """Return the peak memory in bytes of a few training steps with this batch."""
    torch.cuda.reset_peak_memory_stats()
    trainer.train(3, examples=examples)
    return torch.cuda.max_memory_allocated()


def test_times_by_events_agree_with_waiting_for_the_device(device: torch.device) -> None:
    clock = clock_for(device)
    assert clock is not None
    matrix = torch.ones(WIDTH, WIDTH, device=device)

    def work() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    work()
    ratios = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        clock.begin()
        clock.batch()
        work()
        clock.optimizer()
        work()
        interval = clock.end()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began
        timing = None if interval is None else interval.poll()
        assert timing is not None, "an event was not passed after the device had been waited for"
        ratios.append(timing[0] / wall_s)
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.02)


def test_the_allocator_counts_an_allocation_to_the_byte(device: torch.device) -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(ALLOCATION_BYTES, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_allocated() - before == ALLOCATION_BYTES
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() <= torch.cuda.memory_reserved()
    del held
    assert torch.cuda.memory_allocated() == before


def test_the_driver_counts_an_allocation_and_nvml_what_the_process_holds_besides(device: torch.device) -> None:
    before = torch.cuda.mem_get_info()[0]
    held = torch.empty(ALLOCATION_BYTES, dtype=torch.uint8, device=device)
    assert abs(before - torch.cuda.mem_get_info()[0] - ALLOCATION_BYTES) <= DRIVER_TOLERANCE_BYTES
    del held
    context_bytes = MemoryMonitor(1).read([nn.Linear(1, 1).to(device)], []).get("context_bytes")
    assert context_bytes is not None
    assert context_bytes > 0


def test_the_peak_of_a_small_batch_comes_back_after_a_larger_one(trainer: Trainer) -> None:
    first, larger, again = (peak_of(trainer, examples) for examples in (EXAMPLES, 4 * EXAMPLES, EXAMPLES))
    assert larger > first
    assert again == pytest.approx(first, rel=0.01)


def test_each_batch_of_a_launch_has_the_peak_of_a_separate_launch(trainer: Trainer) -> None:
    """Peaks differ only by the rest of the whole batch, which stays on the device while parts are cut from it."""
    sizes = [EXAMPLES, 2 * EXAMPLES, 4 * EXAMPLES]
    variables = {
        "TULA_KIND": "profile",
        "TULA_WARMUP_STEPS": str(WARMUP_STEPS),
        "TULA_MEASURE_STEPS": str(MEASURED_STEPS),
        "TULA_LOCAL_BATCH_SIZE": str(sizes[-1]),
        "TULA_SMALLER_BATCHES": ",".join(f"{size}=run-{size}" for size in sizes[:-1]),
    }
    steps = len(sizes) * (WARMUP_STEPS + MEASURED_STEPS)
    trainer.train(steps, examples=sizes[-1], agent=True, **variables)
    peaks = {
        body["local_batch_size"]: body["memory"]["peak_bytes"] for body in trainer.sink.samples if "memory" in body
    }
    held = {size: 4 * WIDTH * (sizes[-1] - size) for size in sizes}
    assert peaks == pytest.approx({size: peak_of(trainer, size) + held[size] for size in sizes}, rel=0.02)


def test_out_of_memory_is_recognised_reported_and_harms_nothing_else(trainer: Trainer) -> None:
    kept = torch.ones(1024, device=trainer.device)
    counted = cuda_oom_count()

    def exhaust(run: Run) -> None:
        with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
            torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8, device=trainer.device)
        assert is_out_of_memory(raised.value)
        run.report_out_of_memory(raised.value, 4 * EXAMPLES)

    trainer.train(3, agent=True, at_end=exhaust)
    trainer.train(2)
    bodies = [body for _, _, body in trainer.sink.requests if body.get("state") == "out_of_memory"]
    assert [body["failed_local_batch_size"] for body in bodies] == [4 * EXAMPLES]
    assert cuda_oom_count() == counted + 1
    assert bool((kept == 1).all())


def test_a_step_that_a_grad_scaler_skips_is_counted_and_changes_no_weight(trainer: Trainer) -> None:
    without = trainer.train(5, spoiled_step=7)
    measured = trainer.train(5, spoiled_step=7, agent=True)
    assert (measured.steps_counted, measured.steps_skipped) == (WARMUP_STEPS + 5, 1)
    assert same_weights(without, measured)


def test_a_compiled_model_is_measured_and_trains_to_the_same_weights(trainer: Trainer) -> None:
    without, measured = trainer.train(5, compiled=True), trainer.train(5, compiled=True, agent=True)
    assert measured.steps_counted == WARMUP_STEPS + 5
    assert same_weights(without, measured)


def test_the_noise_scale_by_hooks_is_that_of_separate_gradients(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(20)).to(device)  # one kernel sums 32 tensors
    parts = torch.randn(2, 128, 64, device=device)

    def loss(part: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(part).square().mean() for layer in model]).mean() / 2

    separate = [torch.autograd.grad(loss(part), list(model.parameters())) for part in parts]
    small = statistics.fmean(float(sum(4 * g.double().square().sum() for g in gradients)) for gradients in separate)
    large = float(sum((a.double() + b.double()).square().sum() for a, b in zip(*separate, strict=True)))
    signal, noise = noise_moments(small, large, 2.0)
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), policy="measure", global_batch_size=256)
    for _ in range(2):  # a step's measurement is taken up by the next one
        optimizer.zero_grad()
        for part in parts:
            loss(part).backward()
        optimizer.step()
    assert optimizer.telemetry()["gradient_noise_scale"] == pytest.approx(256 * noise / signal, rel=1e-3)


def clearly_above(limit: float, readings: Sequence[float]) -> bool:
    """Return True if the second-smallest of nine readings is above the limit.

    That reading is the lower end of a 96 % confidence interval for the median.
    """
    return sorted(readings)[1] > limit


def test_the_agent_adds_little_to_a_step_and_changes_no_weight(trainer: Trainer) -> None:
    """Runs with the agent alternate with runs without it; CPU time comes from steps too small for the host to wait."""
    shares, cpu_s = [], []
    trainer.train(30)
    for pair in range(9):
        order = (False, True) if pair % 2 else (True, False)
        done = {agent: trainer.train(30, agent=agent) for agent in order}
        assert same_weights(done[True], done[False])
        shares.append(done[True].step_s / done[False].step_s - 1.0)
        small = {agent: trainer.train(600, width=64, examples=8, agent=agent) for agent in order}
        cpu_s.append(small[True].cpu_s - small[False].cpu_s)
    print(f"share of step time {statistics.median(shares):+.4f}, CPU {1e6 * statistics.median(cpu_s):+.1f} us a step")
    assert not clearly_above(MAX_STEP_OVERHEAD, shares)
    assert not clearly_above(MAX_CPU_S, cpu_s)


def wait_for_shipping(sink: Sink) -> None:
    """Return once the agent has sent two more requests."""
    sent = len(sink.seen) + 2
    sink.wait(lambda at: len(at.seen) >= sent, 10.0)


def test_a_step_is_captured_in_a_cuda_graph_under_the_agent_and_its_replays_train(trainer: Trainer) -> None:
    """This test is the last in the file, since a capture that fails harms its process."""
    model = nn.Linear(WIDTH, WIDTH).to(trainer.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(EXAMPLES, WIDTH, device=trainer.device)
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    with trainer.watched() as run:
        run.watch(model, optimizer)
        for index, _ in enumerate(run.steps(itertools.repeat(batch, 20))):
            if index < 3:  # kernels and buffers are made before a capture, on a side stream
                stream = torch.cuda.Stream(trainer.device)
                stream.wait_stream(torch.cuda.current_stream(trainer.device))
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.current_stream(trainer.device).wait_stream(stream)
            elif index == 3:
                with torch.cuda.graph(graph):
                    step()
                    wait_for_shipping(trainer.sink)  # the shipping thread reads events, which can end a capture
            else:
                before = model.weight.detach().clone()
                graph.replay()
                torch.cuda.synchronize()
                assert not torch.equal(before, model.weight)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_directions_on_the_device_are_those_of_the_host_also_where_products_may_be_rounded(
    device: torch.device, precision: str
) -> None:
    draw = torch.Generator().manual_seed(0)
    updates = torch.randn(3, 300, 700, generator=draw) * torch.logspace(0, -2, 300)[None, :, None]
    levels = updates.square().sum((1, 2)) * torch.tensor([1e-4, 1e-3, 1e-2])
    host = updates + torch.stack(corrections([*updates], levels))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = updates + torch.stack(corrections([*updates.to(device)], levels.to(device))).cpu()
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((found - host).norm() / host.norm()) < 0.01
