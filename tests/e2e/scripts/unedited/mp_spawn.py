"""Trains with DDP in ranks that the script starts with torch.multiprocessing.spawn."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank: int, options: argparse.Namespace) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=options.world_size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(160, 16), torch.randint(0, 4, (160,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("complete", sum(float(p.detach().double().sum()) for p in net.parameters()), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
    mp.spawn(train, args=(options,), nprocs=options.world_size)


if __name__ == "__main__":
    main()
