"""Trains a small DDP job in which one rank can run out of memory, crash or hang, and which can write checkpoints."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tula_agent


def stuck_on_purpose() -> None:
    time.sleep(600)


def take_host_memory(group: str) -> None:
    """Enter a control group and allocate more than its memory limit, so that the kernel kills this process."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1) * 2**20))


def wait_while(hold: Path) -> None:
    """Wait until the test deletes the file."""
    if hold.exists():
        print(f"waits for {hold.name}", flush=True)
    while hold.exists():
        time.sleep(0.02)


def crash_once(at: Path) -> None:
    """Crash the first rank once: delete the file that requests the crash, and raise an error."""
    if dist.get_rank() == 0 and at.exists():
        at.unlink()
        raise ValueError("on purpose")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument(
        "--fits", type=int, default=10**9, help="largest batch with which the last rank does not run out of memory"
    )
    parser.add_argument("--catch", action="store_true", help="catch the out-of-memory error, report it, and hang")
    parser.add_argument("--memory-group", help="exhaust the memory of this control group instead")
    parser.add_argument("--checkpoint-at", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--folder", type=Path, default=Path("/nonexistent"), help="folder with the files wait-BATCH and crash-BATCH"
    )
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(args.steps * args.batch_size, 4), args.batch_size)
    run = tula_agent.init()
    run.watch(model, optimizer)
    start = run.resume(model, optimizer, loader=loader)
    if dist.get_rank() == 0:
        print(f"starts at step {start.step}, batch {args.batch_size} x {args.accumulate}", flush=True)
    for batch in run.steps(loader):
        time.sleep(args.step_s)
        number = run.position.step
        wait_while(args.folder / f"wait-{len(batch)}")
        crash_once(args.folder / f"crash-{len(batch)}")
        try:
            if number > 6 and dist.get_rank() == dist.get_world_size() - 1 and len(batch) > args.fits:
                if args.memory_group:
                    take_host_memory(args.memory_group)
                torch.empty(2**60, dtype=torch.uint8)
        except RuntimeError as error:
            if not args.catch:
                raise
            run.report_out_of_memory(error)
            stuck_on_purpose()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if number == args.checkpoint_at:
            run.checkpoint(model, optimizer)
    run.finish()
    time.sleep(0.05)  # until gloo's threads have freed the last reduction; see docs/limits.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
