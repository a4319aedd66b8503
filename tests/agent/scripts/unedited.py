"""Trains in a loop that never calls the agent, with the hook's optimizer callback; evaluates after every fifth step."""

import argparse

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from tula_agent.unedited import stepped

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--without-loader", action="store_true")
options = parser.parse_args()
register_optimizer_step_post_hook(lambda optimizer, *_: stepped(optimizer))
data = TensorDataset(torch.randn(64, 4))
held_out = DataLoader(TensorDataset(torch.randn(6, 4)), batch_size=3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
done = 0
while done < options.steps:
    batches = [(torch.randn(8, 4),)] * 8 if options.without_loader else DataLoader(data, batch_size=8)
    for index, (x,) in enumerate(batches):
        model(x).sum().backward()
        if index % options.accumulate == options.accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % 5 == 0 and not options.without_loader:
                for (x,) in held_out:  # with gradients, as some frameworks do
                    model(x)
print("complete", model.weight.sum().item())
