"""Uses Lightning to train a model that the script builds."""

import os
import pickle
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch

from tula_agent.callbacks.lightning import TulaCallback


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def training_step(self, batch, index):  # noqa: ARG002
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        if self.trainer.training:
            MOVED.add(len(batch[0]))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def validation_step(self, batch, index):
        x, y = batch
        time.sleep(SLOW_S if index == 0 else 0.0)
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pulls(Module):
    """A module whose training step fetches its own batches from the loader."""

    def training_step(self, dataloader_iter):
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


class Saves(pl.Callback):
    """A callback that saves a checkpoint in the middle of the second epoch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):  # noqa: ARG002
        if (trainer.current_epoch, batch_idx) == (1, 3):
            trainer.save_checkpoint(CHECKPOINT)


SLOW_S = float(os.environ.get("SLOW_EVALUATION_S", "0"))
PULLS = "PULLS" in os.environ
MOVED: set[int] = set()
CHECKPOINT = sys.argv[2] if len(sys.argv) > 2 else None
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
callback = pickle.loads(pickle.dumps(TulaCallback(dataset_size=64)))  # as a trainer that spawns its ranks sends it
callbacks = [callback]
if CHECKPOINT:
    # One that never comes to save by itself.
    callbacks += [Saves(), pl.callbacks.ModelCheckpoint(Path(CHECKPOINT).parent, every_n_train_steps=1000)]
trainer = pl.Trainer(
    max_epochs=int(sys.argv[1]),
    accumulate_grad_batches=2,
    val_check_interval=4 if SLOW_S else 1.0,
    callbacks=callbacks,
    logger=False,
    accelerator="cpu",
    enable_checkpointing=CHECKPOINT is not None,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    Pulls() if PULLS else Module(),
    loader,
    loader,
    ckpt_path=CHECKPOINT if CHECKPOINT and Path(CHECKPOINT).exists() else None,
)
print("steps", trainer.global_step)
print("moved", sorted(MOVED), "by", trainer.strategy.batch_to_device.__name__)
