"""Runs one kind of training loop that never calls the agent: `kinds.py KIND`.

The loops use batches of 8, and two ranks if the environment variables say so; a loop that runs to its end prints
"complete".
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

BATCH, WIDTH, CLASSES, PASSES = 8, 16, 4, 60


def examples(count: int, width: int = WIDTH) -> TensorDataset:
    return TensorDataset(torch.randn(count, width), torch.randint(0, CLASSES, (count,)))


def wrapped(*layers: nn.Module) -> Any:
    return nn.parallel.DistributedDataParallel(nn.Sequential(*layers)) if dist.is_initialized() else layers[0]


def classifier() -> tuple[Any, Optimizer]:
    model = wrapped(nn.Linear(WIDTH, CLASSES))
    return model, SGD(model.parameters(), lr=0.1)


def step(optimizer: Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def cycle() -> None:
    """Train with `itertools.cycle`, which keeps the batches of the first pass and requests no more from the loader."""
    model, optimizer = classifier()
    for x, y in itertools.islice(itertools.cycle(DataLoader(examples(32), BATCH)), 4 * PASSES):
        step(optimizer, cross_entropy(model(x), y))


def zip_of_two() -> None:
    """Train with labelled and unlabelled batches, as in semi-supervised learning."""
    model, optimizer = classifier()
    labelled, unlabelled = DataLoader(examples(64), BATCH), DataLoader(examples(192), 3 * BATCH)
    for _ in range(PASSES):
        for (x, y), (other, _) in zip(labelled, unlabelled, strict=True):
            step(optimizer, cross_entropy(model(x), y) + model(other).square().mean())


def own_batches(accumulation: int = 1) -> None:
    """Train without a DataLoader: batches are slices of a tensor."""
    model, optimizer = classifier()
    x, y = torch.randn(512, WIDTH), torch.randint(0, CLASSES, (512,))
    for _ in range(4 * PASSES):
        for _ in range(accumulation):
            chosen = torch.randint(512, (BATCH,))
            (cross_entropy(model(x[chosen]), y[chosen]) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()


def own_batches_accumulated() -> None:
    own_batches(4)


def loader_per_episode(batches: int = 1) -> None:
    """Train in episodes that each have new data, as in federated learning; only rank 0 frees past data."""
    model, optimizer = classifier()
    kept = []
    for _ in range(4 * PASSES // batches):
        data = examples(batches * BATCH)
        if dist.is_initialized() and dist.get_rank() > 0:
            kept.append(data)
        for x, y in DataLoader(data, BATCH):
            step(optimizer, cross_entropy(model(x), y))


def loader_per_episode_of_three() -> None:
    loader_per_episode(3)


def loader_per_step(*, of_lists: bool = False) -> None:
    """Train on several batches of a new task in each step, as in meta learning; only rank 0 frees the past tasks."""
    model, optimizer = classifier()
    kept = []
    for _ in range(4 * PASSES):
        data: Any = list(examples(32)) if of_lists else examples(32)
        if dist.get_rank() > 0:
            kept.append(data)
        for x, y in itertools.islice(DataLoader(data, BATCH), 2):
            cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def list_per_step() -> None:
    loader_per_step(of_lists=True)


def evaluated_with_gradients() -> None:
    """Train, and evaluate without `no_grad` after each epoch."""
    model, optimizer = classifier()
    held_out = DataLoader(examples(9), 3)
    for _ in range(PASSES):
        for x, y in DataLoader(examples(32), BATCH):
            step(optimizer, cross_entropy(model(x), y))
        for x, _ in held_out:
            model(x)


def critic_twice() -> None:
    """Train a GAN with two critic steps per batch; the generator's backward pass also reaches the critic."""
    critic, maker = wrapped(nn.Linear(WIDTH, 1)), wrapped(nn.Linear(2, WIDTH))
    of_critic, of_maker = SGD(critic.parameters(), lr=0.01), SGD(maker.parameters(), lr=0.01)
    for _ in range(PASSES):
        for x, _ in DataLoader(examples(64), BATCH):
            for _ in range(2):
                made = maker(torch.randn(len(x), 2)).detach()
                step(of_critic, critic(torch.cat([made, x])).mean())
            step(of_maker, critic(maker(torch.randn(len(x), 2))).mean())


def gradient_penalty() -> None:
    """Train with a call to `autograd.grad` for all parameters in each step; the call is not a micro-step."""
    model, optimizer = classifier()
    x, y = torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))
    for _ in range(4 * PASSES):
        loss = cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        step(optimizer, loss + 1e-4 * sum(gradient.square().sum() for gradient in gradients))


def second_phase() -> None:
    """Train the head for four steps, and then all parameters with another optimizer."""
    body, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    for parameters, passes in ((head.parameters(), 1), ([*body.parameters(), *head.parameters()], PASSES)):
        optimizer = SGD(parameters, lr=0.1)
        for _ in range(passes):
            for x, y in DataLoader(examples(32), BATCH):
                step(optimizer, cross_entropy(head(body(x)), y))


def optimizer_per_layer() -> None:
    """Train with forty optimizers, which all step after each backward pass."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(39)] + [nn.Linear(WIDTH, CLASSES)]
    optimizers = [SGD(layer.parameters(), lr=0.1) for layer in layers]
    for _ in range(PASSES):
        for x, y in DataLoader(examples(32), BATCH):
            cross_entropy(nn.Sequential(*layers)(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.randn(WIDTH), number % CLASSES) for number in range(4 * PASSES * BATCH))


def dispatched() -> None:
    """Train on a stream that the first rank reads for all ranks, as accelerate does by default."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = nn.Linear(WIDTH, CLASSES)
    model, optimizer, loader = accelerator.prepare(net, SGD(net.parameters(), lr=0.1), DataLoader(Stream(), BATCH))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
    accelerator.end_training()


def finds_its_batch(first: int = BATCH, fits: int = 5) -> None:
    """Try batches of 8, 7, 6 and 5; only the last fits."""
    from accelerate.utils import find_executable_batch_size

    model, optimizer = classifier()

    def train(size: int) -> None:
        for _ in range(PASSES // 5):
            for x, y in DataLoader(examples(64), size):
                if len(x) > fits:
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                step(optimizer, cross_entropy(model(x), y))

    find_executable_batch_size(train, starting_batch_size=first)()


def lowers_to_its_batch() -> None:
    """Try batches from 16 down to the batch of the run, which is the first that fits."""
    finds_its_batch(2 * BATCH, BATCH)


def detection() -> None:
    """Train on torchvision's detection batches: a tuple of images of different sizes and a tuple of dictionaries."""
    model, optimizer = classifier()
    images = [(torch.randn(3, 4 + number % 2, 4), {"label": number % CLASSES}) for number in range(64)]

    def columns(batch: list[Any]) -> tuple[Any, ...]:
        return tuple(zip(*batch, strict=True))

    for _ in range(PASSES):
        loader: DataLoader[Any] = DataLoader(images, BATCH, collate_fn=columns)  # type: ignore[arg-type]
        for shown, targets in loader:
            x = torch.stack([image.flatten()[:WIDTH] for image in shown])
            step(optimizer, cross_entropy(model(x), torch.tensor([target["label"] for target in targets])))


def time_first() -> None:
    """Train on sequences with the dimensions time, batch and features."""
    model, optimizer = classifier()
    data = [(torch.randn(WIDTH), number % CLASSES) for number in range(64)]

    def collate(batch: list[Any]) -> Any:
        return torch.stack([x for x, _ in batch]).expand(50, -1, -1), torch.tensor([y for _, y in batch])

    for _ in range(PASSES):
        for x, y in DataLoader(data, BATCH, collate_fn=collate):  # type: ignore[arg-type]
            step(optimizer, cross_entropy(model(x[-1]), y))


def reduced_every_micro_step() -> None:
    """Accumulate two micro-steps without `no_sync`."""
    model, optimizer = classifier()
    for _ in range(PASSES):
        for index, (x, y) in enumerate(DataLoader(examples(64), BATCH)):
            (cross_entropy(model(x), y) / 2).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()


def joined(most: int = 104) -> None:
    """Train ranks with different numbers of batches; the first rank has the fewest."""
    model, optimizer = classifier()
    for _ in range(PASSES // 10):
        with model.join():
            for x, y in DataLoader(examples(most if dist.get_rank() else 40), BATCH):
                step(optimizer, cross_entropy(model(x), y))


def joined_nearly_even() -> None:
    """Train so that the other rank's tenth step takes place during the eighth step of the first rank."""
    joined(56)


def accumulation_rises() -> None:
    """Train with one micro-step per step at first, then two and then four."""
    model, optimizer = classifier()
    data = examples(32)
    for number in range(PASSES):
        for x, y in itertools.islice(DataLoader(data, BATCH), min(4, 2 ** (number // 6))):
            cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def head_first() -> None:
    """Train only the head in a first phase, as in transfer learning."""
    body, head = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, CLASSES)
    model = wrapped(body, head)
    optimizer = SGD(head.parameters(), lr=0.1)
    for _ in range(PASSES):
        for x, y in DataLoader(examples(32), BATCH):
            step(optimizer, cross_entropy(model(x), y))


def main() -> None:
    torch.manual_seed(0)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    print("complete", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
