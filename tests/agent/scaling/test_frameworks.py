"""Tests TulaOptimizer in Lightning and accelerate, with gradient accumulation and learning-rate schedulers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tula_agent.scaling import TulaOptimizer


def data(count: int = 64):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=draw)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def test_lightning_trains_and_the_gain_follows_accumulated_micro_steps(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning

        class Net(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

            def training_step(self, batch, _index):
                return F.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self):
                self.tula = TulaOptimizer(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))
                return [self.tula], [torch.optim.lr_scheduler.StepLR(self.tula, 2, 0.5)]

        def trainer(epochs):
            return lightning.Trainer(
                max_epochs=epochs,
                accelerator="cpu",
                accumulate_grad_batches=4,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                gradient_clip_val=0.5,
            )

        loader = torch.utils.data.DataLoader(data(), batch_size=4)
        model = Net()
        first = trainer(4)
        first.fit(model, loader)
        first.save_checkpoint(tmp_path / "lightning.ckpt")
        straight = model.tula.telemetry()
        assert straight["step"] == 16.0
        assert 1.0 < straight["scale"] <= 4.0
        assert model.tula.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)
        resumed = Net()
        trainer(6).fit(resumed, loader, ckpt_path=tmp_path / "lightning.ckpt")
        assert resumed.tula.telemetry()["step"] == 24.0


def test_accelerate_trains_and_the_gain_follows_accumulated_micro_steps():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        tula = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        schedule = torch.optim.lr_scheduler.StepLR(tula, 100, 0.5)
        loader = torch.utils.data.DataLoader(data(), batch_size=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, tula, loader, schedule)
        for _ in range(3):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(inputs), labels))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        assert tula.telemetry()["step"] == 12.0
        assert 1.0 < tula.telemetry()["scale"] <= 4.0
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert tula.telemetry()["step"] == 12.0


def test_two_ranks_stay_identical_under_accelerate_and_lightning(results_of_ranks):
    by_rank = results_of_ranks(2, Path(__file__).with_name("frameworks_job.py"))
    for name in ("accelerate", "lightning"):
        first, second = (results[name] for results in by_rank)
        assert first == second
        assert first["steps"] == 24.0
        assert 1.0 < first["scale"] <= 4.0
