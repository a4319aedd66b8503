"""Trains with two Trainers to which the script gives no callbacks, and prints the callbacks that they have.

The arguments are the Lightning package and, optionally, `--measures-itself`, which imports the agent first.
"""

import sys
from importlib import import_module

import torch

pl = import_module(sys.argv[1])
if "--measures-itself" in sys.argv:
    import tula_agent  # noqa: F401


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):  # noqa: ARG002
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


for _ in range(2):
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, **options)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4))
    names = (f"{type(callback).__name__} {isinstance(callback, pl.Callback)}" for callback in trainer.callbacks)
    print("callbacks", *names)
