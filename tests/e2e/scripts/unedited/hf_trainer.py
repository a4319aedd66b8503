"""Trains with the Hugging Face Trainer, with gradient accumulation and an evaluation after each epoch."""

import argparse
import tempfile
import time

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=options.width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=options.width,
        vocab_size=30,
        num_labels=2,
    )
    rows = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.tensor(n % 2)} for n in range(160)]
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=2,
            eval_strategy="epoch",
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8]).train()
    print("complete", sum(float(p.detach().double().sum()) for p in model.parameters()), flush=True)
    time.sleep(0.1)  # gloo's threads free the last reduction; without the wait, destroying the model can hang


if __name__ == "__main__":
    main()
