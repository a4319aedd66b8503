"""Trains according to the batch schedule in FOLDER/schedule.py: `scheduled.py transformers|lightning FOLDER`.

Each launch of the schedule has a separate trainer, which prints its last step, and its learning rate and beta2 during
training.
"""

import os
import sys
from pathlib import Path

import torch

FRAMEWORK, FOLDER = sys.argv[1], Path(sys.argv[2])
os.chdir(FOLDER)
sys.path.insert(0, str(FOLDER))
import schedule  # noqa: E402

torch.manual_seed(0)


def report(step, optimizer):
    group = optimizer.param_groups[0]
    print(f"stage {step} {group['lr']:.6g} {group['betas'][1]:.6g}", flush=True)


def with_transformers(batch):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    network = BertForSequenceClassification(BertConfig(**sizes, vocab_size=30, num_labels=2))
    rows = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.tensor(n % 2)} for n in range(64)]
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "out"),
        max_steps=schedule.LAST_STEP,
        per_device_train_batch_size=batch,
        learning_rate=0.001,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(network, arguments, train_dataset=rows, callbacks=[schedule.BatchSchedule()])
    trainer.train(resume_from_checkpoint=any((FOLDER / "out").glob("checkpoint-*")))
    report(trainer.state.global_step, trainer.optimizer)


def with_lightning(batch):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 2)

        def training_step(self, rows, _):
            return torch.nn.functional.cross_entropy(self.net(rows[0]), rows[1])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.001)
            constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # noqa: ARG005
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": constant, "interval": "step"}}

    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    trainer = pl.Trainer(
        max_steps=schedule.LAST_STEP,
        max_epochs=-1,
        callbacks=[schedule.BatchSchedule()],
        default_root_dir=FOLDER,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    left = sorted(Path().glob("stage-*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    loader = torch.utils.data.DataLoader(data, batch_size=batch)
    trainer.fit(Module(), loader, ckpt_path=left[-1] if left else None)
    report(trainer.global_step, trainer.optimizers[0])


for size in (4, 16):
    {"transformers": with_transformers, "lightning": with_lightning}[FRAMEWORK](size)
