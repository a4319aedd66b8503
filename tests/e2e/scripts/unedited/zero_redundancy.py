"""Trains with ZeRO, in which each rank keeps a part of the optimizer state; the script gets batches with `next`."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(160, 16), torch.randint(0, 4, (160,)))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        while (batch := next(batches, None)) is not None:
            x, y = batch
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.zero_grad()
    print("complete", sum(float(p.detach().double().sum()) for p in model.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
