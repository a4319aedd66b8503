"""Trains with DDP on a stream: a worker process reads an IterableDataset of unknown length, split by rank."""

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for index in range(160):
            example = torch.randn(16, generator=generator), torch.randint(0, 4, (), generator=generator)
            if index % self.world_size == self.rank:
                yield example


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = Stream(dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=options.batch_size, num_workers=1, persistent_workers=True)
    net = nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("complete", sum(float(p.detach().double().sum()) for p in net.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
