"""Trains with DDP without a DataLoader: as in nanoGPT, batches are cut from a long array and gradients accumulate."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

ACCUMULATE = 2
TOKENS, LENGTH = 65, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    text = torch.randint(0, TOKENS, (4096,))

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - LENGTH, (options.batch_size,)).tolist()
        x = torch.stack([text[start : start + LENGTH] for start in starts])
        y = torch.stack([text[start + 1 : start + 1 + LENGTH] for start in starts])
        return x, y

    embedding, head = nn.Embedding(TOKENS, 16), nn.Linear(options.width, TOKENS)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(embedding, nn.Linear(16, options.width), nn.ReLU(), head))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    x, y = get_batch()
    for _ in range(options.epochs):
        for _ in range(5):
            for micro_step in range(ACCUMULATE):
                model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
                loss = nn.functional.cross_entropy(model(x).transpose(1, 2), y) / ACCUMULATE
                x, y = get_batch()  # fetched while the device computes
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    print("complete", sum(float(p.detach().double().sum()) for p in model.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
