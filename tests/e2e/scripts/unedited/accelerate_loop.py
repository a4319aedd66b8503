"""Trains in a loop with accelerate, which fetches each batch while the script trains on the previous one."""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(160, 16), torch.randint(0, 4, (160,)))
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
    held_out = DataLoader(TensorDataset(torch.randn(12, 16), torch.randint(0, 4, (12,))), batch_size=3)
    net = nn.Sequential(nn.Linear(16, options.width), nn.ReLU(), nn.Linear(options.width, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, loader, held_out = accelerator.prepare(net, optimizer, loader, held_out)
    for _ in range(options.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        for x, y in held_out:
            with torch.no_grad():
                accelerator.gather_for_metrics((model(x).argmax(1), y))
    print("complete", sum(float(p.detach().double().sum()) for p in net.parameters()), flush=True)
    time.sleep(0.1)  # gloo's threads free the last reduction; without the wait, destroying the model can hang
    accelerator.end_training()


if __name__ == "__main__":
    main()
