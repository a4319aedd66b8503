"""Tests training on several ranks and, with several GPUs, uses `no_sync` to check the agent's exposed communication."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import start_processes

from benchmarks.gpu.store import Results, Row
from benchmarks.support.gloo import free_port, leave_group
from benchmarks.support.resnet import resnet
from tula_agent.measure.all_reduces import time_all_reduces
from tula_agent.measure.ddp import TIMED_STEPS, BucketTimer, CommSplit
from tula_agent.measure.step_timer import StepTimer
from tula_agent.scaling import TulaOptimizer
from tula_agent.torch_private import ddp_statistics

PROBE_S = 1.0
MAX_SPLIT_ERROR = 0.1
"""The largest allowed error of the exposed communication, as a share of the step."""


def rank_main(rank: int, world_size: int, port: int, device_type: str, smoke: bool, out: Path) -> None:
    """Run one rank; the first rank writes the results to `out`."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    several = device_type == "cuda" and torch.cuda.device_count() > 1
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank if several else 0)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if several else "gloo")
    row = measure(device, smoke)
    if rank == 0:
        out.write_text(json.dumps(row), encoding="utf-8")
    gc.collect()  # the model must be freed before the process group
    dist.barrier()
    leave_group()


def measure(device: torch.device, smoke: bool) -> Row:
    """Train with communication, compare the ranks' weights, and train without communication; every rank calls this."""
    big = (50, 32, 224, 60) if dist.get_backend() == "nccl" else (50, 8, 224, 20)
    depth, size, side, steps = (18, 2, 32, 6) if smoke else big
    width = 8 if smoke else 64
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(resnet(depth, channels=3, num_classes=1000, width=width).to(device))
    batch = (torch.randn(size, 3, side, side, device=device), torch.randint(1000, (size,), device=device))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    # With such a small base batch, steps are turned although the network has batch normalization.
    optimizer = TulaOptimizer(inner, global_batch_size=size * dist.get_world_size(), small_batch_size=1)
    with_comm, exposed = _train(model, optimizer, batch, steps)
    equal = _equal_on_all_ranks(model)
    timeline = _timeline(model, inner, batch)
    optimizer.close()
    with model.no_sync():
        without, _ = _train(model, inner, batch, steps)
    return {
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
        "weights_equal": equal,
        "step_time_s": statistics.median(with_comm),
        "readings": len(exposed),
        "exposed_comm_s": statistics.median(exposed) if exposed else None,
        "exposed_comm_by_no_sync_s": statistics.median(with_comm) - statistics.median(without),
        "timeline": timeline,
        "probe": time_all_reduces(device, PROBE_S),
        "ddp": {key: value for key, value in ddp_statistics(model).items() if isinstance(value, (int, float, str))},
    }


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor], steps: int
) -> tuple[list[float], list[float]]:
    """Return the times of all steps but the first, and the measured exposed communication, in seconds."""
    split, timer = CommSplit([model], profiling=True), StepTimer(grad_accum_steps=1)
    times, exposed = [], []
    for _ in range(steps + 1):
        if batch[0].device.type == "cuda":
            torch.cuda.synchronize(batch[0].device)
        step = timer.step
        timing = timer.want_batch()
        comm = split.at_boundary(step, timing)
        times += [timing.step_time_s] if timing is not None else []
        exposed += [comm.exposed_comm_time_s] if comm is not None else []
        timer.batch_ready(len(batch[0]))
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return times[1:], exposed


def _timeline(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, list[float]] | None:
    """Return the times in the backward pass at which DDP's buckets are ready, as the agent reports them."""
    timer = BucketTimer(model)
    found = None
    for _ in range(2 * TIMED_STEPS):  # the same number of steps on every rank
        optimizer.zero_grad()
        timer.begin()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        found = timer.end() or found
    timer.close()
    return found


def _equal_on_all_ranks(model: nn.Module) -> bool:
    """Return True if every parameter has the same bits on all ranks."""
    sums = [parameter.detach().flatten().view(torch.int32).sum(dtype=torch.int64) for parameter in model.parameters()]
    mine = torch.stack(sums).cpu()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine.tolist())
    return all(one == everyone[0] for one in everyone)


def judge(row: Row) -> str:
    """Return a verdict in words; with one GPU per rank, it covers the split into compute and communication."""
    if not row["weights_equal"]:
        return "fail: the ranks' weights differ"
    if row["backend"] != "nccl":
        return "pass: equal weights on all ranks; the split was not measured (one device)"
    if row["exposed_comm_s"] is None:
        return "fail: DDP published no times"
    error = abs(row["exposed_comm_s"] - row["exposed_comm_by_no_sync_s"]) / row["step_time_s"]
    return f"{'pass' if error <= MAX_SPLIT_ERROR else 'fail'}: the split is off by {100 * error:.1f} % of a step"


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add a row for two ranks and, with more than two devices, a row with a rank on each device."""
    ends = time.monotonic() + seconds
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    sizes = sorted({2, max(2, devices)})
    for name in results.missing([f"{ranks} ranks" for ranks in sizes], ends):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row.json"
            world_size = int(name.split()[0])
            arguments = (world_size, free_port(), device.type, smoke, out)
            # Ranks are spawned, since this process may have initialised CUDA, which cannot be used after a fork.
            method = "spawn" if device.type == "cuda" else "fork"
            start_processes(rank_main, arguments, nprocs=world_size, start_method=method)
            row = json.loads(out.read_text(encoding="utf-8"))
        results.add(name, row | {"verdict": judge(row)})
