"""Trains with Lightning, its DDP strategy and a validation after each epoch."""

import argparse
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch, index):  # noqa: ARG002
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):  # noqa: ARG002
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    train = TensorDataset(torch.randn(164, 16), torch.randint(0, 4, (164,)))
    held_out = TensorDataset(torch.randn(12, 16), torch.randint(0, 4, (12,)))
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(options.width)
    trainer.fit(model, DataLoader(train, batch_size=options.batch_size), DataLoader(held_out, batch_size=3))
    print("complete", sum(float(p.detach().double().sum()) for p in model.parameters()), flush=True)


if __name__ == "__main__":
    main()
