"""Trains a GAN of two DDP networks with one optimizer each; both optimizers step on every batch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(160, 16))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
    wrap = nn.parallel.DistributedDataParallel
    generator = wrap(nn.Sequential(nn.Linear(NOISE, options.width), nn.ReLU(), nn.Linear(options.width, 16)))
    discriminator = wrap(nn.Sequential(nn.Linear(16, options.width), nn.LeakyReLU(0.2), nn.Linear(options.width, 1)))
    model = nn.ModuleList([discriminator, generator])
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            discriminator.zero_grad()
            criterion(discriminator(real), torch.ones(len(real), 1)).backward()
            fake = generator(torch.randn(len(real), NOISE))
            criterion(discriminator(fake.detach()), torch.zeros(len(real), 1)).backward()
            optimizer.step()
            generator.zero_grad()
            criterion(discriminator(fake), torch.ones(len(real), 1)).backward()
            optimizer_of_generator.step()
    print("complete", sum(float(p.detach().double().sum()) for p in model.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
