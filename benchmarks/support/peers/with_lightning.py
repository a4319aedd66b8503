"""Lightning's `Tuner.scale_batch_size`, as it is: doubling until memory ends, three steps a trial."""

from __future__ import annotations

import importlib
import logging
import warnings

import lightning
import torch
from largest import answer
from lightning.pytorch.tuner import Tuner

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
_Data = torch.utils.data.TensorDataset


# user
class Module(lightning.LightningModule):
    """A network with the batch size that the tuner sets."""

    def __init__(self, network: torch.nn.Module, data: _Data, batch_size: int, limit: float) -> None:
        super().__init__()
        self.network, self.data, self.batch_size = network, data, batch_size
        # end
        self.limit, self.tried = limit, set()
        # user

    def training_step(self, batch, _):  # type: ignore[no-untyped-def]
        """Cross entropy."""
        # end
        self.tried.add(self.batch_size)
        if self.batch_size > self.limit:
            raise RuntimeError("CUDA out of memory.")
        # user
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self):  # type: ignore[no-untyped-def]
        """Batches of the size that is tried."""
        return torch.utils.data.DataLoader(self.data, self.batch_size)


def scaled(module: Module, least: int, most: int) -> int:
    """The batch that the tuner sets."""
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    return Tuner(trainer).scale_batch_size(module, init_val=least, max_val=most) or least


# end


def on_limit(least: int, largest: int) -> tuple[int, int]:
    """Memory ends above `largest`."""
    many = 4 * largest
    data = _Data(torch.zeros(many, 1), torch.zeros(many, dtype=torch.long))
    module = Module(torch.nn.Linear(1, 2), data, least, largest)
    return scaled(module, least, many), len(module.tried)


def on_digits(least: int, largest: int) -> tuple[int, int]:
    """Nothing runs out of memory: the search ends at the largest batch of the job."""
    script = importlib.import_module("digits")
    module = Module(script.network(), script.digits()[0], least, float("inf"))
    return scaled(module, least, largest), len(module.tried)


if __name__ == "__main__":
    answer(on_limit, on_digits)
