"""Tests the measured memory of each component, and the estimate of a model's memory before any training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tula_agent.measure.estimate import estimate_memory, state_ratios
from tula_agent.measure.launches import launch_time_s
from tula_agent.measure.memory import MemoryMonitor, allocator_reading, capacity_bytes, resident_bytes
from tula_wire.memory import assumed_context_bytes, usable_bytes


def test_components_are_counted_and_fit_under_the_peak() -> None:
    model = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 10))
    optimizer = torch.optim.Adam(model.parameters())
    probe = MemoryMonitor(1)
    probe.before_training([model])
    x = torch.randn(64, 1000)
    probe.saw_batch(64, x, torch.utils.data.DataLoader([0]))
    model(x).sum().backward()
    probe.at_optimizer([model])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    resident = resident_bytes()
    memory = probe.read([model], [optimizer])
    weights = (1000 * 500 + 500 + 500 * 10 + 10) * 4
    assert memory["parameter_bytes"] == memory["gradient_bytes"] == weights
    assert memory["optimizer_bytes"] == 2 * weights + 4 * 4  # two moments, and a step counter for each of four tensors
    assert memory["batch_bytes"] == 64 * 1000 * 4
    assert memory["peak_bytes"] >= resident
    assert memory["peak_bytes"] < memory["capacity_bytes"]


def test_ranks_of_a_node_share_its_memory() -> None:
    whole, half = capacity_bytes(torch.device("cpu")), capacity_bytes(torch.device("cpu"), 2)
    assert whole is not None
    assert half == whole // 2


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


def test_an_estimate_counts_exactly_what_is_held_at_the_peak_and_touches_nothing() -> None:
    model = Convolutional()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    estimate = estimate_memory(model, torch.randn(4, 3, 8, 8), torch.optim.SGD(model.parameters(), lr=1, momentum=0.9))
    # Kept: the convolution's output (for the norm), the relu's output (for itself and the head). When the backward pass
    # is in the relu, there are the gradients of its output and of its input too.
    assert estimate.activation_bytes_per_sample == 4 * 16 * 64 * 4
    forward = 2 * 3 * 16 * 9 * 64 + 2 * 1024 * 10
    weight_and_input_gradients = 2 * 3 * 16 * 9 * 64 + 2 * 2 * 1024 * 10  # the first layer needs no input gradient
    assert estimate.flops_per_sample == forward + weight_and_input_gradients
    assert estimate.parameters == sum(p.numel() for p in model.parameters())
    assert estimate.optimizer_bytes == estimate.gradient_bytes == 4 * estimate.parameters
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Blocks(nn.Module):
    """A network of four blocks, which can be recomputed in the backward pass."""

    def __init__(self, *, recomputed: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.recomputed, self.reentrant = recomputed, reentrant
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU()) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.recomputed else block(x)
        return x


def test_recomputed_activations_are_seen_and_their_flops_count_once() -> None:
    """The specification excludes recomputed FLOPs, since the service adds a third for `activation_checkpointing`."""
    sample = torch.randn(8, 64, requires_grad=True)
    plain, recomputed = (estimate_memory(Blocks(recomputed=each), sample) for each in (False, True))
    assert not plain.model_spec("net")["activation_checkpointing"]
    assert recomputed.model_spec("net")["activation_checkpointing"]
    assert recomputed.flops_per_sample == pytest.approx(4 / 3 * plain.flops_per_sample)
    assert recomputed.model_spec("net")["flops_per_sample"] == pytest.approx(plain.flops_per_sample)
    # A block keeps outputs of 256, 256, 64 and 64 numbers; recomputed, one block does at a time, and each its input.
    assert 4 * 640 * 4 < plain.activation_bytes_per_sample < 5 * 640 * 4
    assert (640 + 3 * 64) * 4 < recomputed.activation_bytes_per_sample < 2 * (640 + 4 * 64) * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_block_has_the_weights_without_data(reentrant: bool) -> None:
    model = Blocks(recomputed=True, reentrant=reentrant)
    estimate = estimate_memory(model, torch.randn(8, 64, requires_grad=True))
    assert all(p.grad is None for p in model.parameters())
    assert estimate.fixed_activation_bytes < 1.1 * 4 * 64 * 256, "more than a gradient under way"


def test_precision_is_that_of_autocast_or_of_most_parameters() -> None:
    sample = torch.randn(2, 4)
    assert estimate_memory(nn.Linear(4, 4), sample).model_spec("net")["precision"] == "fp32"
    half = nn.Linear(4, 4).to(torch.bfloat16)
    assert estimate_memory(half, sample.to(torch.bfloat16)).precision == "bf16"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert estimate_memory(nn.Linear(4, 4), sample).precision == "bf16"
    torch.set_float32_matmul_precision("high")
    try:
        assert estimate_memory(nn.Linear(4, 4), sample).precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_largest_batch_is_the_last_of_which_three_steps_fit_beside_the_context() -> None:
    estimate = estimate_memory(nn.Linear(100, 100), torch.randn(2, 100))
    assert estimate.allocations is not None
    for gib in (1, 8):
        capacity = gib * 2**30
        room = usable_bytes(capacity) - assumed_context_bytes(capacity)
        largest = estimate.largest_local_batch_size(capacity)
        assert estimate.allocations.fits(largest, room)
        assert not estimate.allocations.fits(largest + 1, room)
        assert 0.9 * room < estimate.total_bytes(largest) < room
    assert estimate.largest_local_batch_size(10) == 0


def test_where_segments_grow_the_bytes_alone_bound_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 32, 32))
    estimate = estimate_memory(model, torch.zeros(2, 3, 32, 32))
    room = usable_bytes(2**34) - assumed_context_bytes(2**34)
    fragmented = estimate.largest_local_batch_size(2**34)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    largest = estimate.largest_local_batch_size(2**34)
    assert estimate.total_bytes(largest) <= room < estimate.total_bytes(largest + 1)
    assert fragmented < largest
    assert estimate.reserved_ratio(2**34) == 1.0
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert estimate.largest_local_batch_size(2**34) == fragmented, "torch reads the first variable that is set"


class Classifier(nn.Module):
    """A network with a loss over so many classes that the logits need most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4096)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(inputs), torch.zeros(len(inputs), dtype=torch.long))


def test_half_precision_logits_are_copied_to_single_precision_by_no_kernel_of_a_gpu() -> None:
    """At the peak, the log-softmax and its gradient are in float32; the logits' gradient is in half precision."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        estimate = estimate_memory(Classifier(), torch.randn(4, 8))
    assert estimate.activation_bytes_per_sample == pytest.approx(4096 * (4 + 4 + 2), rel=0.01)
    single = estimate_memory(Classifier(), torch.randn(4, 8))
    assert single.activation_bytes_per_sample == pytest.approx(4096 * (4 + 4 + 4), rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "ratio"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    ],
)
def test_optimizer_state_is_measured_on_a_small_parameter(optimizer, ratio) -> None:
    assert sum(state_ratios(optimizer([nn.Parameter(torch.zeros(3))]))) == ratio


def test_a_sample_without_a_batch_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="sample contains no tensor with a batch dimension"):
        estimate_memory(nn.Linear(2, 2), torch.tensor(1.0))


def test_a_depthwise_network_costs_what_its_groups_do_and_recomputes_nothing() -> None:
    """PyTorch's FLOP counter counts the backward pass of a grouped convolution as if the convolution had no groups."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
        torch.nn.ConvTranspose2d(16, 8, 2, stride=2, groups=4),
    )
    estimate = estimate_memory(net, torch.zeros(2, 3, 8, 8))
    first, depthwise, upward = 2 * 16 * 3 * 9 * 64, 2 * 16 * 9 * 64, 2 * 16 * 2 * 4 * 64
    assert estimate.flops_per_sample == 2 * first + 3 * depthwise + 3 * upward, "the input needs no gradient"
    assert not estimate.activation_checkpointing


@pytest.mark.parametrize(
    ("settings", "advised"), [("", True), ("max_split_size_mb:64", True), ("expandable_segments:True", False)]
)
def test_peaks_and_retries_of_the_allocator_are_read_and_a_full_device_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, settings: str, advised: bool
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    statistics = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 7, "num_alloc_retries": 3}
    assert allocator_reading(statistics, 1) == {"peak_bytes": 5, "reserved_bytes": 7, "alloc_retries": 2}
    assert allocator_reading({}) == {"peak_bytes": 0, "reserved_bytes": 0, "alloc_retries": 0}
    monitor = MemoryMonitor(1)
    for memory in ({"alloc_retries": 0}, allocator_reading(statistics), allocator_reading(statistics)):
        monitor.report_retries(memory)
    (record,) = caplog.records
    assert "the device was full 3 times" in record.getMessage()
    assert ("expandable_segments:True" in record.getMessage()) is advised


def test_operations_that_start_a_kernel_are_counted_whatever_the_batch_and_views_are_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(inplace=True))
    small, large = (estimate_memory(model, torch.randn(size, 8)).operations_per_step for size in (2, 300))
    assert small == large
    assert small is not None
    assert 4 <= small <= 14  # forward: product, ReLU, sum; backward: what undoes these


def test_the_largest_tensor_of_a_convolution_is_counted_by_example() -> None:
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3))
    assert estimate_memory(network, torch.randn(2, 3, 10, 10)).convolution_elements_per_sample == 16 * 100
    assert estimate_memory(nn.Linear(4, 4), torch.randn(2, 4)).convolution_elements_per_sample is None


def test_images_that_convolutions_read_or_make_in_channels_first_memory_are_counted_by_example() -> None:
    """A convolution transposes two tensors in the forward pass, and two more for each gradient that it computes."""
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3), nn.Sigmoid())
    images = torch.randn(2, 3, 10, 10)
    image, hidden, out = 3 * 100, 16 * 100, 4 * 64
    forward, weights = image + 2 * hidden + out, image + hidden + hidden + out
    of_hidden = hidden + out  # nobody asks for a gradient of the images
    counted = estimate_memory(network, images).transposed_elements_per_sample
    assert counted == forward + weights + of_hidden
    last = torch.channels_last
    network.to(memory_format=last)  # type: ignore[call-overload]
    assert estimate_memory(network, images.to(memory_format=last)).transposed_elements_per_sample == 0
    assert estimate_memory(nn.Linear(4, 4), torch.randn(2, 4)).transposed_elements_per_sample == 0


def test_a_launch_takes_some_microseconds_and_its_measurement_draws_no_random_number() -> None:
    before = torch.random.get_rng_state()
    assert 1e-7 < launch_time_s(torch.device("cpu")) < 1e-2
    assert torch.equal(before, torch.random.get_rng_state())
