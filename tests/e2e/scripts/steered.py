"""Two ranks whose scaling the service changes; accuracy falls as soon as the service has tuned a threshold.

Each rank prints thresholds when they take effect.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from tula_agent.scaling import thresholds

LAST_STEP = 4000


def say(*words: object) -> None:
    # One write a line: ranks share the pipe.
    os.write(1, (" ".join(map(str, (*words, "rank", os.environ["RANK"]))) + "\n").encode())


def main() -> None:
    policy, ends_with = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = tula_agent.TulaOptimizer(inner, policy=None if policy == "open" else policy, small_batch_size=4)
    thresholds.POLL_EVERY_S = 0.05  # ten seconds would be the longest part of this test
    run = tula_agent.init()
    run.watch(model, optimizer)
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    inputs = torch.randn(LAST_STEP * 8, 16, generator=draw)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    known, version, accuracy, harmed = optimizer.thresholds, 0, 0.70, False
    for step, (x, y) in enumerate(run.steps(torch.utils.data.DataLoader(data, batch_size=8))):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = optimizer.thresholds
        if now.version != version:
            known, version = now, now.version
            say(
                "thresholds", version, known.policy, known.delta, known.small_batch_size, known.static_scale, "at", step
            )
            if ends_with == known.policy:
                break
        if ends_with == "roll-back" and harmed and now.delta == 0.5:
            break
        harmed = harmed or now.delta != 0.5
        if step % 20 == 0:
            # Accuracy rises under the script's settings and is low under tuned ones.
            accuracy += 0.001
            run.log(validation_accuracy=accuracy if now.delta == 0.5 else 0.3)
        time.sleep(0.002)
    run.finish()
    time.sleep(0.05)  # until gloo's threads release the last reduction: see docs/limits.md
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
