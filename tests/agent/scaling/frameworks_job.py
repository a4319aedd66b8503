"""Trains with TulaOptimizer in accelerate and in Lightning; prints one JSON line for all ranks.

Each rank sees different data; the digest of the weights and the factor show whether the replicas are identical.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.support.gloo import print_results_of_all_ranks
from tula_agent.scaling import TulaOptimizer


def data() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def wrapped(parameters: Any) -> TulaOptimizer:
    return TulaOptimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), small_batch_size=4, global_batch_size=16)


def result(model: nn.Module, tula: TulaOptimizer) -> dict[str, Any]:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    values = tula.telemetry()
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"digest": digest, "scale": values["scale"], "steps": values["step"]}


def with_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    tula = wrapped(model.parameters())
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, tula, loader)
    for _ in range(3):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return result(model, tula)


def with_lightning() -> dict[str, Any]:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.tula = wrapped(self.parameters())
            return self.tula

    model = Net()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data(), batch_size=4))
    return result(model, model.tula)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print_results_of_all_ranks({"accelerate": with_accelerate(), "lightning": with_lightning()})


if __name__ == "__main__":
    main()
