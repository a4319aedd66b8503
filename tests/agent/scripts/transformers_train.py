"""Uses the Hugging Face Trainer to train a model that is built from a configuration, so nothing is downloaded."""

import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from tula_agent.callbacks.transformers import TulaTrainerCallback

torch.manual_seed(0)
SLOW_S = float(os.environ.get("SLOW_EVALUATION_S", "0"))


def metrics(got):
    time.sleep(SLOW_S)
    return {"accuracy": float((got.predictions.argmax(1) == got.label_ids).mean())}


config = BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30, num_labels=2
)
rows = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.tensor(n % 2)} for n in range(64)]
with tempfile.TemporaryDirectory() as temporary:
    folder = sys.argv[2] if len(sys.argv) > 2 else temporary
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=int(sys.argv[1]),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps" if SLOW_S else "epoch",
        eval_steps=3,
        logging_steps=2,
        report_to=[],
        save_strategy="steps" if folder != temporary else "no",
        save_steps=12,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:8],
        compute_metrics=metrics,
        callbacks=[pickle.loads(pickle.dumps(TulaTrainerCallback(dataset_size=64)))],
    )
    checkpoint = Path(folder, "checkpoint-12")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint.is_dir() else None)
print("steps", trainer.state.global_step)
