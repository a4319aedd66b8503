"""Trains in automatic mixed precision with DDP and a GradScaler; Tula's lines end in `# tula`.

    torchrun --standalone --nproc-per-node 2 examples/amp.py --batch-size 64

The same code uses half precision and NCCL on CUDA, and bfloat16 and gloo otherwise.
"""

import argparse
import os

import torch
import torch.distributed as dist
from digits_ddp import digits, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import tula_agent  # tula


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    precision = torch.float16 if cuda else torch.bfloat16
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    train, _ = digits()
    loader = DataLoader(train, args.batch_size, sampler=DistributedSampler(train, drop_last=True), drop_last=True)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=cuda) if hasattr(torch.amp, "GradScaler") else None
    scaler = scaler or torch.cuda.amp.GradScaler(enabled=cuda)

    run = tula_agent.init(dataset_size=len(train))  # tula
    optimizer = tula_agent.TulaOptimizer(optimizer, global_batch_size=args.batch_size * dist.get_world_size())  # tula
    run.watch(model, optimizer)  # tula

    for epoch in range(args.epochs):
        batches = loader
        batches = run.steps(loader)  # tula
        for images, labels in batches:
            optimizer.zero_grad()
            with torch.autocast(device.type, precision):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            run.log(loss=loss)  # tula
        if run.stopping:  # tula
            break  # tula
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    run.finish()  # tula
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
