"""The Hugging Face Trainer, with a model built from its configuration: nothing is downloaded."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from tula_agent.callbacks.transformers import TulaTrainerCallback

torch.manual_seed(0)
config = BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30, num_labels=2
)
rows = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.tensor(n % 2)} for n in range(64)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=int(sys.argv[1]),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:8],
        compute_metrics=lambda got: {"accuracy": float((got.predictions.argmax(1) == got.label_ids).mean())},
        callbacks=[TulaTrainerCallback(dataset_size=64)],
    )
    trainer.train()
print("steps", trainer.state.global_step)
