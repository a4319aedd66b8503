"""Trains a small, seeded model and prints a digest of its final weights; arguments say what happens at which step.

train.py [--epochs N] [--at STEP:WHAT], where WHAT is raise, oom, leave, exit, term, kill, torn, small-disk, clock,
fork or full-queue. With several ranks, only the rank `--who` ends; all other events happen on all ranks.
"""

import argparse
import atexit
import contextlib
import hashlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batches", type=int, default=16)
parser.add_argument("--at", default="")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--clip", action="store_true")
parser.add_argument("--uneven", action="store_true")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--trace", action="store_true", help="print a digest of the weights after every step")
parser.add_argument("--who", type=int, default=0, help="the rank that an end comes to")
parser.add_argument("--no-sync", action="store_true", help="gradients are not reduced in all but the last micro-step")
parser.add_argument("--overflow", action="store_true", help="some losses are infinite, and a GradScaler skips the step")
parser.add_argument("--late", type=int, default=-1, help="a rank that takes 60 ms longer than the others")
parser.add_argument("--cut-spool", action="store_true", help="cut the agent's spool file at every step, somewhere else")
parser.add_argument("--norm", action="store_true", help="batch normalization in the network")
parser.add_argument("--compile", action="store_true", help="torch.compile, which compiles again for another batch")
parser.add_argument("--examples", action="store_true", help="batches are of a dataclass")
parser.add_argument("--spawned", action="store_true", help="no variable tells the rank, as under mp.spawn")
RANK = int(os.environ.get("RANK", "0"))


@dataclass
class Examples:
    """A batch of inputs and labels."""

    inputs: torch.Tensor
    labels: torch.Tensor
    source: str = "random"


def happen(name: str, model: nn.Module, run: Any) -> None:
    """End, break or disturb the process as `name` says."""
    if name == "raise":
        raise ValueError("on purpose")
    if name == "oom":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    if name in ("leave", "exit", "term", "kill"):
        print_digest(model)
        end(name)
    if name in ("torn", "small-disk"):
        write_half(and_die=name == "torn")
    if name in ("torn", "full-queue") and run.recorder is not None:
        run.recorder.exporter.queue_limit = 1  # everything but the newest request goes to disk
    if name == "clock":
        real = time.time
        time.time = lambda: real() - 86_400
    if name in ("fork", "full-queue"):
        fork_a_child_that_logs(run)


def end(name: str) -> None:
    """End this process by `sys.exit`, by `os._exit`, or by a signal."""
    if name == "leave":
        sys.exit(3)
    if name == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGTERM if name == "term" else signal.SIGKILL)
    time.sleep(30)


def fork_a_child_that_logs(run: Any) -> None:
    """Fork a child that logs a value and exits like a child of multiprocessing.

    Any other exit would fail: the destructor of a DDP model joins threads that the child does not have.
    """
    child = os.fork()
    if child == 0:
        run.log(loss=1.0)
        run.finish()
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def write_half(and_die: bool) -> None:
    """Write only half of each record for the spool; then kill the process, or continue as if the disk were full."""
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if not data.startswith(b"TUL1"):
            return write(descriptor, data)
        written = write(descriptor, data[: len(data) // 2])
        if and_die:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    os.write = half


def cut_spool(by: int) -> None:
    """Cut the end of the spool, as a crash of the machine may do without the agent's knowledge."""
    for path in Path(os.environ.get("TULA_SPOOL_DIR", "/nonexistent")).glob(f"*-{RANK}-*.spool"):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, max(0, path.stat().st_size - by))


def print_line(line: str) -> None:
    """Print a line with one write, since the ranks share an unbuffered stdout under torchrun."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_digest(model: nn.Module, label: str = "weights") -> None:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print_line(f"{label} {RANK} {digest.hexdigest()}")


def join_group(spawned: bool) -> None:
    """Join the process group; if `spawned`, do so without environment variables for the rank, as under mp.spawn."""
    if spawned:
        place = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", address, rank=RANK, world_size=int(place["WORLD_SIZE"]))
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")


def make_model(norm: bool) -> nn.Module:
    """Return a model with the same weights on every rank, wrapped in DDP if there is a process group."""
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(64)] if norm else []
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), *between, nn.Tanh(), nn.Linear(64, 4))
    return nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model


def make_loader(arguments: argparse.Namespace) -> torch.utils.data.DataLoader[Any]:
    """Return a loader of batches of 8 that differ by rank; with `--uneven`, the last batch is smaller."""
    generator = torch.Generator().manual_seed(7 + RANK)
    count = arguments.batches * 8 - (3 if arguments.uneven else 0)
    data = torch.utils.data.TensorDataset(
        torch.randn(count, 32, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    )
    collate = to_examples if arguments.examples else None
    return torch.utils.data.DataLoader(data, batch_size=8, num_workers=arguments.workers, collate_fn=collate)


def to_examples(rows: list[Any]) -> Examples:
    return Examples(*torch.utils.data.default_collate(rows))


def micro_step(arguments: argparse.Namespace, model: nn.Module, scaler: Any, batch: Any, seen: int) -> torch.Tensor:
    """Run the forward and backward pass of one batch; return the loss."""
    inputs, labels = (batch.inputs, batch.labels) if isinstance(batch, Examples) else batch
    last = (seen + 1) % arguments.accumulate == 0
    unreduced = arguments.no_sync and not last and hasattr(model, "no_sync")
    with model.no_sync() if unreduced else contextlib.nullcontext():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.amp):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        if arguments.overflow and seen % 8 == 5:
            loss = loss * float("inf")
        if arguments.late == RANK:
            time.sleep(0.06)
        scaled = loss / arguments.accumulate
        (scaler.scale(scaled) if scaler else scaled).backward()
    return loss


def optimizer_step(arguments: argparse.Namespace, model: nn.Module, scaler: Any, optimizer: Any) -> None:
    """Take one step of the optimizer, through the scaler if there is one."""
    if arguments.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> None:
    arguments = parser.parse_args()
    at, _, what = arguments.at.partition(":")
    mine = arguments.who == RANK or what not in ("raise", "oom", "leave", "exit", "term", "kill", "torn")
    join_group(arguments.spawned)
    model = make_model(arguments.norm)
    forward = torch.compile(model, backend="eager", dynamic=False) if arguments.compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = make_loader(arguments)
    used_scaler = torch.amp.GradScaler("cpu") if arguments.amp else None

    run = tula_agent.init(dataset_size=len(loader.dataset), grad_accum_steps=None)
    run.watch(model, optimizer)
    seen = 0
    for _epoch in range(arguments.epochs):
        for batch in run.steps(loader):
            if at and seen == int(at) and mine:
                happen(what, model, run)
            loss = micro_step(arguments, forward, used_scaler, batch, seen)
            if (seen + 1) % arguments.accumulate == 0:
                optimizer_step(arguments, model, used_scaler, optimizer)
            run.log(loss=loss)
            if arguments.trace:
                print_digest(model, f"step {seen}")
            if arguments.cut_spool:
                cut_spool(seen)
            seen += 1
            if arguments.pause:
                time.sleep(arguments.pause)
        with torch.no_grad():
            model(torch.ones(2, 32))
    print_line(f"micro-steps {RANK} {seen}")
    print_digest(model)
    if dist.is_initialized():
        leave_group()


if __name__ == "__main__":
    main()
