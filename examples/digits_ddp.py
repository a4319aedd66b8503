"""Trains a small convolutional network on scikit-learn's digits with DDP; the lines that Tula adds end in `# tula`.

    torchrun --standalone --nproc-per-node 2 examples/digits_ddp.py --batch-size 64

Without TULA_URL, these lines do nothing; without these lines, this is an ordinary training script.
"""

import argparse
import os  # tula

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tula_agent  # tula

TRAINING_IMAGES = 1437


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--policy", default="gain", help="how Tula scales gradients: gain, ags, measure or none")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = digits()
    sampler: DistributedSampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    global_batch_size = args.batch_size * dist.get_world_size()

    run = tula_agent.init(dataset_size=len(train))  # tula
    optimizer = tula_agent.TulaOptimizer(optimizer, policy=args.policy, global_batch_size=global_batch_size)  # tula
    run.watch(model, optimizer)  # tula

    first_epoch = 0
    if "TULA_CHECKPOINT_DIR" in os.environ:  # tula
        first_epoch = run.resume(model, optimizer, loader=loader).epoch  # tula
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        batches = loader
        batches = run.steps(loader)  # tula
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)  # tula
        optimizer.next_epoch()  # tula
        if "TULA_CHECKPOINT_DIR" in os.environ:  # tula
            run.checkpoint(model, optimizer)  # tula
        if run.stopping:  # tula
            break  # tula

        model.eval()
        with torch.no_grad():
            images, labels = test.tensors
            accuracy = (model.module(images).argmax(1) == labels).float().mean().item()
        run.log(validation_accuracy=accuracy)  # tula
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: global batch {global_batch_size}, test accuracy {accuracy:.3f}", flush=True)

    run.finish()  # tula
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
