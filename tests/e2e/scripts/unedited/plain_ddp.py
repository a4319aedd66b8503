"""Trains with plain DDP as in tutorials, with an evaluation after each epoch; does not use Tula."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(160, 16), torch.randint(0, 4, (160,)))
    held_out = DataLoader(TensorDataset(torch.randn(12, 16), torch.randint(0, 4, (12,))), batch_size=3)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for x, _ in held_out:
                model.module(x)
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch} done", flush=True)
    dist.destroy_process_group()
    print("complete", flush=True)


if __name__ == "__main__":
    main()
