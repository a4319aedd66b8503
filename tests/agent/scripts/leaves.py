"""Trains on one rank and ends in a way that the agent does not see coming."""

from __future__ import annotations

import os
import sys

import torch

import tula_agent

how = sys.argv[1]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
run = tula_agent.init()
run.watch(model, optimizer)
for batch in run.steps([torch.randn(8, 4)] * 6):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if how == "schedule":
        schedule.step()
if how == "os._exit":
    os._exit(0)
if how == "exit(3)":
    exit(3)
if how == "raise SystemExit(3)":
    raise SystemExit(3)
