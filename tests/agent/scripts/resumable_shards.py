"""Trains an FSDP model with shuffling and dropout; writes checkpoints; prints a digest of each rank's shard."""

import argparse
import hashlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tula_agent
from benchmarks.support.gloo import leave_group, print_line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, help="copy what is on disk at step 13 there, as a crash would leave it")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 6, generator=generator), torch.randn(64, 1, generator=generator)
    )
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(dist.get_rank())  # each rank drops its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    run = tula_agent.init()
    run.watch(model, optimizer)
    start = run.resume(model, optimizer, loader=loader, scheduler=scheduler)
    if start.found:
        print_line(f"resumed at step {start.step}")
    for epoch in range(start.epoch, 4):
        sampler.set_epoch(epoch)
        for x, y in run.steps(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            if run.position.step % 4 == 0:
                run.checkpoint(model, optimizer, scheduler=scheduler)
            if run.position.step == 13 and args.keep is not None and dist.get_rank() == 0:
                shutil.copytree(os.environ["TULA_CHECKPOINT_DIR"], args.keep)
    shards = [p.to_local() for p in model.parameters()]
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    state = [value.to_local() if hasattr(value, "to_local") else value for value in state]
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in (*shards, *state))).hexdigest()
    print_line(f"weights {digest} rank {dist.get_rank()} of {sum(s.numel() for s in shards)} numbers")
    leave_group()


if __name__ == "__main__":
    main()
