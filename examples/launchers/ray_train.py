"""Trains with Ray Train, whose workers are the ranks of one DDP job; Ray places them on the nodes of its cluster.

    tula tune job.toml --launcher ray -- ray_train.py --batch-size={local_batch_size} --workers={world_size}

Ray passes the `TULA_*` variables to every worker. Checkpoints are written to TULA_CHECKPOINT_DIR, which must be a
folder that all nodes share.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn

import tula_agent


def train(config: dict[str, Any]) -> None:
    """Train as one worker, whose loader uses the batch size of one rank."""
    torch.manual_seed(0)
    inputs = torch.randn(20_000, 64)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=config["batch_size"], shuffle=True))
    model = prepare_model(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = tula_agent.init(dataset_size=len(data))
    run.watch(model, optimizer)
    start = run.resume(model, optimizer, loader=loader)
    for epoch in range(start.epoch, config["epochs"]):
        if isinstance(loader.sampler, torch.utils.data.DistributedSampler):  # a single worker has no such sampler
            loader.sampler.set_epoch(epoch)
        for inputs, targets in run.steps(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        run.checkpoint(model, optimizer)
    run.finish()


def main() -> None:
    """Start one worker for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, required=True, help="batch size of one rank")
    parser.add_argument("--workers", type=int, required=True, help="number of ranks")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    workers = ray.train.ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=vars(options), scaling_config=workers).fit()


if __name__ == "__main__":
    main()
