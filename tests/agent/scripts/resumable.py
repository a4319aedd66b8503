"""Trains with dropout, shuffling, momentum and a schedule; writes checkpoints; prints a digest of the final weights."""

import argparse
import hashlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group, print_line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, help="copy what is on disk at step 13 there, as a crash would leave it")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--policies", nargs="+", default=["gain"], help="one training after the other")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for policy in args.policies:
        train(policy, Path(os.environ["TULA_CHECKPOINT_DIR"]), args)
    if dist.is_initialized():
        leave_group()


def train(policy: str, root: Path, args: argparse.Namespace) -> None:
    """Train once, with checkpoints in a separate folder below `root`."""
    distributed = dist.is_initialized()
    rank = dist.get_rank() if distributed else 0
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 6, generator=generator), torch.randn(64, 1, generator=generator)
    )
    sampler = torch.utils.data.DistributedSampler(data) if distributed else None
    batch = 4 if distributed else 8
    loader = torch.utils.data.DataLoader(
        data, batch, shuffle=sampler is None, sampler=sampler, num_workers=args.workers
    )
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = tula_agent.TulaOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        policy=tula_agent.scaling.Ags(steps_per_epoch=8) if policy == "ags" else policy,
        global_batch_size=8,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    run = tula_agent.init()
    run.watch(model, optimizer)
    start = run.resume(model, optimizer, loader=loader, scheduler=scheduler, directory=root / policy)
    if start.found:
        print_line(f"resumed at step {start.step}")
    for epoch in range(start.epoch, 4):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in run.steps(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            if run.position.step % 4 == 0:
                run.checkpoint(model, optimizer, scheduler=scheduler, directory=root / policy)
            if run.position.step == 13 and args.keep is not None and rank == 0:
                shutil.copytree(root / policy, args.keep / policy)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print_line(f"weights {digest} rank {rank} policy {policy}")


if __name__ == "__main__":
    main()
