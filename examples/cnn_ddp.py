"""Trains one of the paper's four networks with DDP on synthetic images; the lines that Tula adds end in `# tula`.

    torchrun --nproc-per-node 1 examples/cnn_ddp.py --model resnet50 --batch-size 64

`examples/paper/MODEL.toml` is the job file with which `tula tune` tunes the network on the paper's 16 nodes. The script
needs torchvision (`pip install 'tula[examples]'`). Its images are drawn at random once, so that neither a data set nor
a loader limits the speed. The numbers of images and classes are those of the paper's data sets. The paper does not
state the image sizes; here, CIFAR-100's images are 32 x 32, and all others are 224 x 224.

`--facts` prints the network's `[model]` values for a job file, and does not train.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tula_agent  # tula

try:
    from torchvision import models
except (ImportError, RuntimeError) as error:  # RuntimeError if torchvision was built for another torch
    fits = f"a torchvision that matches torch {torch.__version__}"
    sys.exit(f"examples/cnn_ddp.py needs {fits}; install it with pip install 'tula[examples]' ({error}).")

DATA = {
    "resnet50": ("ImageNet-1K", 1_281_167, 224, 1000),
    "vgg11": ("CIFAR-100", 50_000, 32, 100),
    "alexnet": ("Caltech-101", 9_146, 224, 101),
    "mobilenet_v3_large": ("Caltech-256", 30_607, 224, 257),
}
"""For each network, the paper's data set, its number of images, their side in pixels, and the number of classes."""
DIFFERENT_IMAGES = 64


class Images(Dataset[tuple[torch.Tensor, int]]):
    """A data set with the paper's number of examples, in which a few random images are used repeatedly."""

    def __init__(self, size: int, side: int, classes: int) -> None:
        self.size = size
        self.images = torch.randn(DIFFERENT_IMAGES, 3, side, side)
        self.labels = torch.randint(classes, (DIFFERENT_IMAGES,)).tolist()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % DIFFERENT_IMAGES], self.labels[index % DIFFERENT_IMAGES]


def print_facts(name: str) -> None:
    """Print the network's `[model]` values for a job file; a step takes three times the forward pass's FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    _, _, side, classes = DATA[name]
    network = models.get_model(name, num_classes=classes)
    estimate = tula_agent.estimate_memory(network, torch.randn(2, 3, side, side))
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        network.eval()(torch.randn(1, 3, side, side))
    print(f'name = "{name}"\nparameters = {estimate.parameters}\nflops_per_sample = {3 * forward.get_total_flops()}')
    print(f'activation_bytes_per_sample = {estimate.activation_bytes_per_sample}\nprecision = "fp32"')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(DATA), default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--size", type=int, help="images per epoch (default: the data set's size)")
    parser.add_argument("--facts", action="store_true", help="print the network's `[model]` values, and do not train")
    args = parser.parse_args()
    if args.facts:
        print_facts(args.model)
        return

    _, size, side, classes = DATA[args.model]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    data = Images(args.size or size, side, classes)
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, drop_last=True), drop_last=True)
    model = DistributedDataParallel(models.get_model(args.model, num_classes=classes).to(device))
    # The paper's settings (IV-B).
    rate, decay = (0.05 if args.model == "resnet50" else 0.01), (1e-4 if args.model == "mobilenet_v3_large" else 5e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)

    run = tula_agent.init(dataset_size=len(data))  # tula
    batch = args.batch_size * dist.get_world_size()
    optimizer = tula_agent.TulaOptimizer(optimizer, global_batch_size=batch)  # tula
    run.watch(model, optimizer)  # tula

    for epoch in range(args.epochs):
        batches = loader
        batches = run.steps(loader)  # tula
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            run.log(loss=loss)  # tula
        if run.stopping:  # tula
            break  # tula
        optimizer.next_epoch()  # tula
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: global batch {batch}, loss {loss.item():.3f}", flush=True)

    run.finish()  # tula
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
