"""Trains a residual network on synthetic images with DDP and four switches; Tula's lines end in `# tula`.

    torchrun --standalone --nproc-per-node 2 examples/switches_ddp.py --batch-size 64 --precision bf16 --compile on

If a job lists values of the switches under `[options]` and the command contains their placeholders, `tula tune`
measures which values are worth using.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tula_agent  # tula


class Block(nn.Module):
    def __init__(self, width: int, checkpointing: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointing else self.inner(x)
        return x + change


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are shifted and made noisy at each access, so that loading takes longer than reading alone."""

    def __init__(self) -> None:
        self.images = torch.rand(2048, 8, 8)
        self.labels = (10 * self.images.mean((1, 2))).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        image = torch.roll(self.images[index], (down, right), (0, 1))
        return (image + 0.05 * torch.randn(8, 8)).flatten(), self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", choices=("off", "on"), default="off")
    parser.add_argument("--checkpointing", choices=("off", "on"), default="off")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Augmented()
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data, drop_last=True)
    loader = DataLoader(
        data,
        args.batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )

    blocks = [Block(args.width, args.checkpointing == "on") for _ in range(args.depth)]
    network = nn.Sequential(nn.Linear(64, args.width), *blocks, nn.Linear(args.width, 10))
    model = DistributedDataParallel(torch.compile(network) if args.compile == "on" else network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    run = tula_agent.init()  # tula
    run.watch(model, optimizer)  # tula

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in run.steps(loader):  # tula
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if args.precision == "bf16" else nullcontext():
                loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if run.stopping:  # tula
            break  # tula
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}", flush=True)

    run.finish()  # tula
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
