"""Trains for three short epochs with a framework's DDP: by_framework.py accelerate|lightning|transformers.

Prints a digest of the final weights of each rank.
"""

import hashlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group

EPOCHS, ROWS, BATCH = 3, 96, 4


def rows() -> torch.utils.data.Dataset:
    return torch.utils.data.TensorDataset(torch.randn(ROWS, 8), torch.randint(0, 2, (ROWS,)))


def accelerate() -> nn.Module:
    from accelerate import Accelerator

    from tula_agent.callbacks.accelerate import TulaTracker, watch

    run = tula_agent.init(dataset_size=ROWS)  # before there is a group
    accelerator = Accelerator(cpu=True, log_with=[TulaTracker(run)])
    accelerator.init_trackers("tula")
    bare = nn.Linear(8, 2)
    loader = torch.utils.data.DataLoader(rows(), BATCH)
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1), loader)
    watch(run, model, optimizer)
    for _ in range(EPOCHS):
        for x, y in run.steps(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"train_loss": loss.item()})
    run.finish()
    return bare


def lightning() -> nn.Module:
    import lightning.pytorch as pl

    from tula_agent.callbacks.lightning import TulaCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 2)

        def training_step(self, batch, index):  # noqa: ARG002
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        devices=2,
        strategy="ddp",
        accelerator="cpu",
        callbacks=[TulaCallback(dataset_size=ROWS)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(rows(), BATCH))
    return module


def transformers() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from tula_agent.callbacks.transformers import TulaTrainerCallback

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30, num_labels=2
    )
    data = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.tensor(n % 2)} for n in range(ROWS)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
        )
        callback = TulaTrainerCallback(dataset_size=ROWS)
        model = BertForSequenceClassification(config)
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    return model


def main() -> None:
    torch.manual_seed(0)
    model = {"accelerate": accelerate, "lightning": lightning, "transformers": transformers}[sys.argv[1]]()
    assert dist.get_world_size() == 2
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    os.write(1, f"weights {digest}\n".encode())
    leave_group()


if __name__ == "__main__":
    main()
