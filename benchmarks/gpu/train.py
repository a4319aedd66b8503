"""Trains ResNet-50 under DDP in TF32 for one epoch, like a user's script without any of Tula's lines.

torchrun --nproc-per-node 1 benchmarks/gpu/train.py --batch-size 64 --examples 20000
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[2]))  # the path contains the script's folder, but not the checkout

from benchmarks.support.resnet import resnet

DIFFERENT = 64


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images on the device, so that no loader limits the speed; a few images are used repeatedly."""

    def __init__(self, examples: int, side: int, device: torch.device) -> None:
        self.examples = examples
        self.images = torch.randn(DIFFERENT, 3, side, side, device=device)
        self.labels = torch.randint(1000, (DIFFERENT,), device=device)

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index % DIFFERENT], self.labels[index % DIFFERENT]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--examples", type=int, default=1_281_167, help="number of examples in the epoch")
    parser.add_argument("--smoke", action="store_true", help="train ResNet-18 with small images on the CPU")
    args = parser.parse_args()
    device = torch.device("cpu") if args.smoke else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.smoke else "nccl")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    network = resnet(18 if args.smoke else 50, channels=3, num_classes=1000, width=8 if args.smoke else 64)
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Images(args.examples, 32 if args.smoke else 224, device), args.batch_size, drop_last=True)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
