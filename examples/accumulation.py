"""Accumulates gradients with DDP, under `no_sync` in all but the last micro-step; Tula's lines end in `# tula`.

torchrun --standalone --nproc-per-node 2 examples/accumulation.py --batch-size 32 --accumulate 4
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from digits_ddp import digits, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import tula_agent  # tula


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and micro-step")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-steps per optimizer step")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, _ = digits()
    loader = DataLoader(train, args.batch_size, sampler=DistributedSampler(train, drop_last=True), drop_last=True)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    run = tula_agent.init(dataset_size=len(train), grad_accum_steps=args.accumulate)  # tula
    run.watch(model, optimizer)  # tula

    for epoch in range(args.epochs):
        batches = loader
        batches = run.steps(loader)  # tula
        for micro_step, (images, labels) in enumerate(batches, start=1):
            last = micro_step % args.accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(images), labels)
                (loss / args.accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)  # tula
        optimizer.zero_grad()
        if run.stopping:  # tula
            break  # tula
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    run.finish()  # tula
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
