"""Trains with accelerate in a hand-written loop; accelerate accumulates gradients, and batches are BatchEncodings."""

import sys

import torch
from accelerate import Accelerator
from transformers import BatchEncoding

import tula_agent
from tula_agent.callbacks.accelerate import TulaTracker, watch

torch.manual_seed(0)
run = tula_agent.init(dataset_size=64)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=[TulaTracker(run)])
accelerator.init_trackers("tula")


def encode(rows):
    x, y = torch.utils.data.default_collate(rows)
    return BatchEncoding({"x": x, "y": y})


data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
model = torch.nn.Linear(8, 2)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    torch.utils.data.DataLoader(data, batch_size=8, collate_fn=encode),
)
watch(run, model, optimizer)
seen = 0
for _ in range(int(sys.argv[1])):
    for batch in run.steps(loader):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"train_loss": loss.item()})
        seen += 1
print("steps", seen // 2)
accelerator.end_training()
