"""Trains with DDP and a GradScaler; the first steps overflow and are skipped."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train = TensorDataset(30 * torch.randn(160, 16), torch.randint(0, 4, (160,)))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    print("complete", sum(float(p.detach().double().sum()) for p in net.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
