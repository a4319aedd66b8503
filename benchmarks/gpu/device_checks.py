"""What the agent relies on of a device, checked on the device.

A server of this module takes what the agent sends. On a CPU the same code runs, smaller,
and what only an accelerator has is reported as not measured.
"""

from __future__ import annotations

import http.server
import itertools
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from tula_agent.config import read_config
from tula_agent.measure.memory import MemoryMonitor
from tula_agent.measure.step_timer import DeviceClock, clock_for
from tula_agent.oom_watch import cuda_oom_count, is_out_of_memory
from tula_agent.run import Run
from tula_agent.scaling import TulaOptimizer
from tula_agent.scaling.gain import noise_moments

State = Literal["pass", "fail", "not measured"]
ALLOCATION_BYTES = 256 * 2**20
IMPOSSIBLE_BYTES = 2**50
MAX_CLOCK_ERROR, MAX_STEP_OVERHEAD, MAX_CPU_S, MAX_PEAK_ERROR = 0.02, 0.003, 60e-6, 0.02
MAX_NOISE_ERROR = 1e-3
MEMORY_TOLERANCE_BYTES = 32 * 2**20
"""The driver allocates in pages and the allocator in segments of 2 or 20 MiB."""
WARMUP_STEPS, MEASURED_STEPS = 5, 5
SHIPPED_WITHIN_S = 2.5


@dataclass(frozen=True)
class Verdict:
    """Result of one check: what was found, in words and as figures by name."""

    name: str
    state: State
    found: str
    figures: dict[str, float] = field(default_factory=dict)


class NotMeasuredError(Exception):
    """A check needs what this machine lacks; the text says what."""


class Device:
    """A device as the checks see it. Methods that only an accelerator supports raise NotMeasuredError on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.accelerated = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.accelerated else "CPU"
        self.width, self.examples, self.pairs, self.steps = (4096, 4096, 9, 30) if self.accelerated else (64, 8, 3, 5)

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.accelerated:
            torch.cuda.synchronize(self.torch)

    def clock(self) -> DeviceClock:
        """The agent's clock of this device."""
        clock = clock_for(self.torch)
        if clock is None:
            raise NotMeasuredError("a CPU has no clock besides the host's: step times are wall time")
        return clock

    def work(self) -> None:
        """Queue work for some tens of milliseconds."""
        matrix = torch.ones(self.width, self.width, device=self.torch)
        for _ in range(20):
            torch.mm(matrix, matrix)

    def allocate(self, size: int) -> Any:
        """Hold so many bytes until the result is freed."""
        return torch.empty(size, dtype=torch.uint8, device=self.torch)

    def allocated(self) -> dict[str, int]:
        """Bytes `now`, at their `peak` and `reserved`, by the allocator; the peak starts again at `now` afterwards."""
        self.needs_accelerator("a CPU has no caching allocator: peaks are those of the process")
        read = {
            "now": torch.cuda.memory_allocated(self.torch),
            "peak": torch.cuda.max_memory_allocated(self.torch),
            "reserved": torch.cuda.memory_reserved(self.torch),
        }
        torch.cuda.reset_peak_memory_stats(self.torch)
        return read

    def used(self) -> int:
        """Bytes in use on the whole device by the driver, without what the allocator keeps for reuse."""
        self.needs_accelerator("a CPU has no driver that counts memory")
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch)
        return int(total - free)

    def context_bytes(self) -> int | None:
        """What NVML says that this process holds beside the allocator; None without NVML."""
        return MemoryMonitor(1).read([nn.Linear(1, 1).to(self.torch)], []).get("context_bytes")

    def peak_of(self, examples: int) -> int:
        """Peak bytes of a few steps with a batch of `examples`."""
        self.allocated()
        train(self, steps=3, examples=examples)
        return self.allocated()["peak"]

    def peaks_of_column(self, sizes: Sequence[int]) -> dict[int, int]:
        """Peak bytes of each batch, as the agent reports them of one profiling launch; ascending sizes."""
        steps = len(sizes) * (WARMUP_STEPS + MEASURED_STEPS)
        return train(self, steps=steps, examples=sizes[-1], column=sizes[:-1]).peaks

    def oom_count(self) -> int:
        """Out-of-memory errors that the allocator has raised."""
        return cuda_oom_count()

    def needs_accelerator(self, why: str) -> None:
        """Raise NotMeasuredError with `why` on a CPU."""
        if not self.accelerated:
            raise NotMeasuredError(why)


@dataclass
class Training:
    """One short training: its weights, seconds of a step, of the host's thread too, and what the agent made of it.

    `peaks` are the bytes that the agent reported, by local batch.
    """

    weights: list[torch.Tensor]
    step_s: float
    cpu_s: float
    steps_counted: int = 0
    skipped: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)


def train(
    device: Device,
    *,
    steps: int,
    examples: int = 0,
    width: int = 0,
    agent: bool = False,
    column: Sequence[int] = (),
    amp_spoiled_at: int | None = None,
    compiled: bool = False,
    at_end: Callable[[Run], None] | None = None,
) -> Training:
    """Train a perceptron for `steps` steps after WARMUP_STEPS, the same every time; `agent` measures it.

    column: as a profiling launch, in which the agent measures these smaller batches first, MEASURED_STEPS of each.
    amp_spoiled_at: with mixed precision and a GradScaler; the loss of this step is infinite, so that it is skipped.
    """
    torch.manual_seed(0)
    width = width or device.width
    model: Any = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device.torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(examples or device.examples, width, device=device.torch)
    scaler = None if amp_spoiled_at is None else _scaler(device)
    called = torch.compile(model, backend="inductor" if device.accelerated else "eager") if compiled else model
    result = Training([], math.nan, math.nan)
    with _watching(agent or bool(column), result, _column_variables(column, examples)) as run:
        run.watch(model, optimizer)
        began = cpu_began = 0.0
        for step, data in enumerate(run.steps(itertools.repeat(batch, WARMUP_STEPS + steps))):
            if step == WARMUP_STEPS:
                device.synchronize()
                began, cpu_began = time.perf_counter(), time.thread_time()
            optimizer.zero_grad()
            if scaler is None:
                called(data).square().mean().backward()
                optimizer.step()
            else:
                result.skipped += _amp_step(device, called, data, optimizer, scaler, spoiled=step == amp_spoiled_at)
        cpu_ended = time.thread_time()
        device.synchronize()
        result.step_s, result.cpu_s = (time.perf_counter() - began) / steps, (cpu_ended - cpu_began) / steps
        if at_end is not None:
            at_end(run)
    result.weights = [parameter.detach().clone() for parameter in model.parameters()]
    return result


def _column_variables(column: Sequence[int], whole: int) -> dict[str, str]:
    """The environment of a profiling launch of these batches and the whole one; none without them."""
    if not column:
        return {}
    return {
        "TULA_KIND": "profile",
        "TULA_WARMUP_STEPS": str(WARMUP_STEPS),
        "TULA_MEASURE_STEPS": str(MEASURED_STEPS),
        "TULA_LOCAL_BATCH_SIZE": str(whole),
        "TULA_COLUMN": ",".join(f"{size}=check-{size}" for size in column),
    }


def _scaler(device: Device) -> Any:
    if not hasattr(torch.amp, "GradScaler"):
        raise NotMeasuredError("torch before 2.3 has no GradScaler for every device")
    return torch.amp.GradScaler(device.torch.type, init_scale=1024.0)


def _amp_step(
    device: Device, model: Any, data: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: Any, *, spoiled: bool
) -> int:
    """One step of mixed precision; 1 if the scaler skipped it."""
    dtype = torch.float16 if device.accelerated else torch.bfloat16
    with torch.autocast(device.torch.type, dtype=dtype):
        loss = model(data).float().square().mean()
    scaler.scale(loss * math.inf if spoiled else loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return int(scaler.get_scale() < before)


class _watching:
    """A run of the agent against a server of this process, or one that does nothing."""

    def __init__(self, agent: bool, result: Training, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._agent, self._result, self._variables = agent, result, variables

    def __enter__(self) -> Run:
        if not self._agent:
            self._run = Run(None)
            return self._run
        self._folder = tempfile.TemporaryDirectory()
        self._server = _Server(self._result)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        variables = {"TULA_URL": url, "TULA_RUN_ID": "check", "TULA_SPOOL_DIR": self._folder.name}
        self._run = Run(read_config({**variables, **self._variables}))
        if self._run.recorder is None:
            self.__exit__()
            raise NotMeasuredError("the agent did not start: its log says why")
        return self._run

    def __exit__(self, *_: object) -> None:
        if self._agent:
            recorder = self._run.recorder
            self._result.steps_counted = recorder.timer.step if recorder is not None else 0
            self._run.finish()
            self._result.failures = dict(self._run.guard.failures)
            self._server.shutdown()
            self._server.server_close()
            self._folder.cleanup()


class _Server(http.server.ThreadingHTTPServer):
    """Keeps the body of each PATCH and the peaks of samples in `result`, and accepts everything."""

    daemon_threads = True

    def __init__(self, result: Training) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.result = result


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.command == "PATCH":
            self.server.result.requests.append(json.loads(body))
        elif self.path.endswith("/samples"):
            samples = json.loads(body)
            if "memory" in samples:
                self.server.result.peaks[samples["local_batch_size"]] = samples["memory"]["peak_bytes"]
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_PATCH = do_GET = do_POST

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def _judge(name: str, passed: bool, found: str, **figures: float) -> Verdict:
    return Verdict(name, "pass" if passed else "fail", found, figures)


def events(device: Device) -> Verdict:
    """Times by events in the stream against a wall clock around work that was waited for."""
    clock = device.clock()
    device.work()
    ratios = []
    for _ in range(5):
        device.synchronize()
        began = time.perf_counter()
        clock.begin()
        clock.batch()
        device.work()
        clock.optimizer()
        device.work()
        interval = clock.end()
        device.synchronize()
        wall_s = time.perf_counter() - began
        timing = None if interval is None else interval.poll()
        if timing is None:
            return _judge("events", False, "an event was not passed after the device had been waited for")
        ratios.append(timing[0] / wall_s)
    error = statistics.median(ratios) - 1.0
    return _judge("events", abs(error) <= MAX_CLOCK_ERROR, f"{100 * error:+.2f} % against waiting", error=error)


def allocator(device: Device) -> Verdict:
    """The allocator's readings against one known allocation."""
    before = device.allocated()["now"]
    held = device.allocate(ALLOCATION_BYTES)
    during = device.allocated()
    del held
    after = device.allocated()
    grown, left = during["now"] - before, after["now"] - before
    passed = grown == ALLOCATION_BYTES and left == 0 and during["peak"] == during["now"] <= during["reserved"]
    found = f"256 MiB are read as {grown / 2**20:.1f} MiB, and as {left} bytes once freed"
    return _judge("allocator", passed, found, grown_bytes=grown, left_bytes=left)


def driver(device: Device) -> Verdict:
    """The driver's reading against one known allocation, and NVML's of this process."""
    before = device.used()
    held = device.allocate(ALLOCATION_BYTES)
    grown = device.used() - before
    del held
    context = device.context_bytes()
    if context is None:
        raise NotMeasuredError(
            f"NVML has no reading (pip install nvidia-ml-py); the driver read {grown} bytes of 256 Mi"
        )
    passed = abs(grown - ALLOCATION_BYTES) <= MEMORY_TOLERANCE_BYTES and context > 0
    found = f"256 MiB are read as {grown / 2**20:.1f} MiB; the context holds {context / 2**20:.0f} MiB"
    return _judge("driver", passed, found, grown_bytes=grown, context_bytes=context)


def peak_by_batch(device: Device) -> Verdict:
    """Peaks of three batch sizes in one process: that of the first comes back after a larger one."""
    small, large = device.examples, 4 * device.examples
    first, grown, again = (device.peak_of(examples) for examples in (small, large, small))
    passed = grown > first and abs(again - first) <= 0.01 * first
    sizes = ", ".join(f"{peak / 2**20:.1f}" for peak in (first, grown, again))
    found = f"{sizes} MiB at batches of {small}, {large}, {small}"
    return _judge("peak by batch", passed, found, first_bytes=first, larger_bytes=grown, again_bytes=again)


def column(device: Device) -> Verdict:
    """Each batch of a column launch has the peak of a separate process, beside the whole batch that is held."""
    sizes = [device.examples * times for times in (1, 2, 4)]
    peaks = device.peaks_of_column(sizes)
    if sorted(peaks) != sizes:
        return _judge("column", False, f"peaks of batches {sorted(peaks)} were reported, not of {sizes}")
    device.needs_accelerator(f"all of {sizes} were measured; a CPU's peaks are those of the process")
    held = [4 * device.width * (sizes[-1] - size) for size in sizes]
    alone = [device.peak_of(size) + more for size, more in zip(sizes, held, strict=True)]
    errors = [peaks[size] / peak - 1.0 for size, peak in zip(sizes, alone, strict=True)]
    worst = max(errors, key=abs)
    found = (
        f"peaks of {', '.join(map(str, sizes))} examples are at most {100 * worst:+.1f} % off those of single launches"
    )
    return _judge("column", abs(worst) <= MAX_PEAK_ERROR, found, worst_error=worst)


def noise_scale(device: Device) -> Verdict:
    """The gradient noise scale of a step, by the hooks of gradient scaling, against two separate gradients."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(20)).to(device.torch)  # one kernel sums 32 tensors
    parts = torch.randn(2, 128, 64, device=device.torch)

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
    by_hooks, expected = optimizer.telemetry()["gradient_noise_scale"], 256 * noise / signal
    found = f"{by_hooks:.4f} examples by hooks, {expected:.4f} by separate gradients"
    passed = abs(by_hooks / expected - 1.0) <= MAX_NOISE_ERROR
    return _judge("noise scale", passed, found, by_hooks=by_hooks, expected=expected)


def _same_weights(left: Training, right: Training) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.weights, right.weights, strict=True))


def mixed_precision(device: Device) -> Verdict:
    """GradScaler skips one step: the agent counts every step, and the weights are those without it."""
    without = train(device, steps=5, amp_spoiled_at=7)
    measured = train(device, steps=5, amp_spoiled_at=7, agent=True)
    counted, skipped, same = measured.steps_counted, measured.skipped, _same_weights(without, measured)
    passed = counted == WARMUP_STEPS + 5 and skipped == 1 and same and not measured.failures
    found = f"{counted} of {WARMUP_STEPS + 5} steps counted, {skipped} skipped, weights {'equal' if same else 'differ'}"
    return _judge("mixed precision", passed, found + _failures(measured), steps_counted=counted, skipped=skipped)


def compiled(device: Device) -> Verdict:
    """`torch.compile`: the agent counts every step, and the weights are those without it."""
    without = train(device, steps=5, compiled=True)
    measured = train(device, steps=5, compiled=True, agent=True)
    counted, same = measured.steps_counted, _same_weights(without, measured)
    passed = counted == WARMUP_STEPS + 5 and same and not measured.failures
    found = f"{counted} of {WARMUP_STEPS + 5} steps counted, weights {'equal' if same else 'differ'}"
    return _judge("torch.compile", passed, found + _failures(measured), steps_counted=counted)


def cuda_graph(device: Device) -> Verdict:
    """A whole step is captured under the agent, and its replays train."""
    device.needs_accelerator("a CPU captures no graph")
    model = nn.Linear(device.width, device.width).to(device.torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(device.examples, device.width, device=device.torch)
    graph = torch.cuda.CUDAGraph()
    result = Training([], math.nan, math.nan)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    with _watching(True, result) as run:
        run.watch(model, optimizer)
        for index, _ in enumerate(run.steps(itertools.repeat(batch, 20))):
            if index < 3:  # kernels and buffers are made before a capture, on a side stream
                stream = torch.cuda.Stream(device.torch)
                stream.wait_stream(torch.cuda.current_stream(device.torch))
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.current_stream(device.torch).wait_stream(stream)
            elif index == 3:
                with torch.cuda.graph(graph):
                    step()
                    time.sleep(SHIPPED_WITHIN_S)  # the shipping thread reads events, which a capture may not survive
            else:
                before = model.weight.detach().clone()
                graph.replay()
    device.synchronize()
    moved = not torch.equal(before, model.weight)
    passed = moved and not result.failures
    found = "captured; replays " + ("train" if moved else "change no weight") + _failures(result)
    return _judge("CUDA graph", passed, found)


def out_of_memory(device: Device) -> Verdict:
    """An impossible allocation is recognised and reported; what else the process holds works afterwards."""
    kept = torch.ones(1024, device=device.torch)
    counted_before, caught = device.oom_count(), []

    def exhaust(run: Run) -> None:
        try:
            device.allocate(IMPOSSIBLE_BYTES)
        except Exception as error:
            caught.append(error)
            run.report_out_of_memory(error, 4 * device.examples)

    measured = train(device, steps=3, agent=True, at_end=exhaust)
    train(device, steps=2)
    counted = device.oom_count() - counted_before
    recognised = bool(caught) and is_out_of_memory(caught[0])
    report = next((body for body in measured.requests if body.get("state") == "out_of_memory"), {})
    reported = report.get("failed_local_batch_size") == 4 * device.examples
    unharmed = bool((kept == 1).all())
    passed = recognised and reported and unharmed and counted == int(device.accelerated)
    words = [f"{'' if was else 'not '}{what}" for what, was in (("recognised", recognised), ("reported", reported))]
    found = ", ".join([*words, f"counted {counted} times", "training works" if unharmed else "data was harmed"])
    return _judge("out of memory", passed, found, counted=counted)


def overhead(device: Device) -> Iterator[Verdict]:
    """The same training with and without the agent, in turns: weights, step time, CPU time of its thread."""
    times, cpu, weights_equal, failures = [], [], True, ""
    train(device, steps=device.steps)
    for pair in range(device.pairs):
        order = (False, True) if pair % 2 else (True, False)
        done = {agent: train(device, steps=device.steps, agent=agent) for agent in order}
        times.append(done[True].step_s / done[False].step_s - 1.0)
        # Steps so small that the host never waits for the device, which would count as its work.
        host = {agent: train(device, steps=20 * device.steps, width=64, examples=8, agent=agent) for agent in order}
        cpu.append(host[True].cpu_s - host[False].cpu_s)
        weights_equal = weights_equal and _same_weights(done[True], done[False])
        failures = failures or _failures(done[True])
    yield _judge("same weights", weights_equal and not failures, ("equal" if weights_equal else "differ") + failures)
    judged = device.accelerated  # on a CPU, both are mostly the noise of the network's own work
    yield _within("step time", times, MAX_STEP_OVERHEAD, 100.0, "%", judged)
    yield _within("CPU of the training thread", cpu, MAX_CPU_S, 1e6, "us a step", judged)


def _within(name: str, readings: list[float], limit: float, scale: float, unit: str, judged: bool) -> Verdict:
    """The median of `readings` against `limit`; not measured where the noise is wider than what is to be decided."""
    middle = statistics.median(readings)
    ordered = sorted(readings)
    low, high = ordered[1], ordered[-2]  # of nine readings, they hold the median with 96 %
    found = f"{scale * middle:+.2f} [{scale * low:.2f}, {scale * high:.2f}] {unit}, at most {scale * limit:g} allowed"
    state: State = "not measured"
    if judged and (high <= limit or low > limit):
        state = "pass" if middle <= limit else "fail"
    return Verdict(name, state, found, {"value": middle, "low": low, "high": high})


def _failures(training: Training) -> str:
    return f"; parts of the agent failed: {', '.join(training.failures)}" if training.failures else ""


Check = Callable[[Device], "Verdict | Iterable[Verdict]"]
CHECKS: dict[str, Check] = {
    "events": events,
    "allocator": allocator,
    "driver": driver,
    "peak by batch": peak_by_batch,
    "column": column,
    "out of memory": out_of_memory,
    "mixed precision": mixed_precision,
    "noise scale": noise_scale,
    "overhead": overhead,
    "torch.compile": compiled,
    "CUDA graph": cuda_graph,
}
"""In order of value; a capture that fails harms the process that it runs in."""


def check(device: Device, name: str) -> list[Verdict]:
    """The verdicts of one of CHECKS. Never raises an Exception."""
    try:
        result = CHECKS[name](device)
        return [result] if isinstance(result, Verdict) else list(result)
    except NotMeasuredError as reason:
        return [Verdict(name, "not measured", str(reason))]
    except Exception as error:
        return [Verdict(name, "fail", f"raised {error!r}"[:500])]
