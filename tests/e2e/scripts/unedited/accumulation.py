"""Trains with DDP and gradient accumulation, under no_sync in all micro-steps except the last."""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


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
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            last = index % ACCUMULATE == ACCUMULATE - 1
            with nullcontext() if last else model.no_sync():
                (nn.functional.cross_entropy(model(x), y) / ACCUMULATE).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    print("complete", sum(float(p.detach().double().sum()) for p in net.parameters()), flush=True)
    time.sleep(0.1)  # gloo's threads free the last reduction; without the wait, destroying the model can hang
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
