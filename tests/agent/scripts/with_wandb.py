"""Trains for two epochs; logs to the run and to an offline wandb run in the folder WANDB_DIR."""

import torch
import wandb

import tula_agent

theirs = wandb.init(project="none", mode="offline")
run = tula_agent.init(log_to_wandb=True)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.watch(model, optimizer)
data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
for epoch in range(2):
    for batch in run.steps(data):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.log(grad_norm=loss + 1, absent=None)
        wandb.log({"train/loss": loss, "note": "text", "Tokens per s": 5})
    theirs.log(data={"val/acc": 0.5 + epoch}, step=20 + epoch)
run.finish()
wandb.finish()
