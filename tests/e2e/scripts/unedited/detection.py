"""Trains a detector; a batch is a tuple of images of several sizes and a tuple of dictionaries."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler


class Boxes(Dataset[Any]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        chosen = torch.Generator().manual_seed(int(index))
        height, width = (16 + 8 * int(torch.randint(0, 3, (), generator=chosen)) for _ in range(2))
        boxes = torch.rand(1 + index % 3, 4, generator=chosen)
        labels = torch.randint(0, 4, (len(boxes),), generator=chosen)
        return torch.randn(3, height, width, generator=chosen), {"boxes": boxes, "labels": labels}


class Detector(nn.Module):
    """A network that returns a dictionary of losses, as detectors do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        height, width = max(image.shape[1] for image in images), max(image.shape[2] for image in images)
        sizes = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
        padded = torch.stack([nn.functional.pad(image, size) for image, size in zip(images, sizes, strict=True)])
        scores, boxes = self.head(self.body(padded)).split(4, dim=1)
        labels = torch.stack([target["labels"][0] for target in targets])
        box_loss = nn.functional.smooth_l1_loss(boxes, torch.stack([target["boxes"][0] for target in targets]))
        return {"loss_classifier": nn.functional.cross_entropy(scores, labels), "loss_box_reg": box_loss}


def collate_fn(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler = DistributedSampler(Boxes())
    batches = BatchSampler(sampler, options.batch_size, drop_last=True)
    loader = DataLoader(sampler.dataset, batch_sampler=batches, collate_fn=collate_fn)
    model = nn.parallel.DistributedDataParallel(Detector(options.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            losses = model(list(images), list(targets))
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
    print("complete", sum(float(p.detach().double().sum()) for p in model.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
