"""Trains with FSDP, which shards parameters, gradients and optimizer state over the ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("complete", sum(float(p.detach().to_local().double().sum()) for p in model.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
