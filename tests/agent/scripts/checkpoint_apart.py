"""Prints what two ranks raise if one of them cannot write or read a checkpoint, and the resulting files and weights."""

import argparse
import hashlib
import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group, print_line
from tula_agent.checkpoint import CheckpointError

WIDE = 256
LIMIT = 100_000
"""Bytes that a file may have on a rank whose disk is full: less than a part of the model, more than a rank's own."""


def digest(model: nn.Module) -> str:
    parts = [getattr(p.detach(), "to_local", p.detach)() for p in model.parameters()]
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()[:16]


def build(sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))
    if not sharded:
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def full_disk(full: bool) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT if full else hard, hard))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shared", type=Path)
    parser.add_argument("elsewhere", type=Path)
    parser.add_argument("--sharded", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(args.sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tula_agent.init()
    del os.environ["TULA_CHECKPOINT_DIR"]

    def attempt(name: str, directory: Path | None, *, full: bool = False, of: nn.Module = model) -> None:
        before, what = digest(model), run.resume if name.startswith("resume") else run.checkpoint
        full_disk(full)
        try:
            found = what(of, optimizer, directory=directory)
            said = f"went well: {getattr(found, 'step', '')}"
        except CheckpointError as error:
            said = f"refused: {error}"
        full_disk(False)
        dist.barrier()  # reached by both, or this hangs
        on_disk = " ".join(sorted(path.name for path in args.shared.glob("step-*")))
        print_line(f"{name} | rank {rank} | {'kept' if digest(model) == before else 'moved'} | {on_disk} | {said}")
        dist.barrier()

    for x in run.steps([torch.randn(4, WIDE) for _ in range(2)]):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if run.position.step == 1:
            attempt("first", args.shared)
    apart = args.shared if rank == 0 else args.elsewhere
    attempt("unshared", apart)
    attempt("the first has no directory", None if rank == 0 else args.shared)
    attempt("first rank blocked", args.elsewhere / "a-file" if rank == 0 else args.shared)
    attempt("full on the first", args.shared, full=rank == 0)
    if not args.sharded:
        grown = nn.Sequential(*model.module, nn.Linear(WIDE, 1))
        attempt("resume where the second's model grew", args.shared, of=grown if rank == 1 else model)
    attempt("full on the second", args.shared, full=rank == 1)
    attempt("resume unshared", apart)
    if rank == 1:
        newest = max(args.shared.glob("step-*"))
        (newest / "__1_0.distcp").rename(newest / "aside")
        (newest / "__1_0.distcp").write_bytes((newest / "aside").read_bytes()[:100])
    dist.barrier()
    attempt("resume half a file", args.shared)
    if rank == 1:
        (newest / "aside").replace(newest / "__1_0.distcp")
    dist.barrier()
    attempt("again at the same step, full", args.shared, full=rank == 0)
    attempt("resume", args.shared)
    leave_group()


if __name__ == "__main__":
    main()
