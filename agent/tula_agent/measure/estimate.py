"""Computes a model's memory and FLOPs without using a device, launching a run or allocating activations."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tula_agent.allocations import Allocation, AllocationModel, segments_grow
from tula_agent.batches import map_tensors, tensors_in
from tula_agent.torch_private import (
    AllocationTrace,
    BatchNorm,
    autocast_dtype,
    rounds_products,
    storage_key,
    tensors_without_data,
)
from tula_wire.memory import SURE, room_bytes

_RECOMPUTED = 4.0 / 3.0
_EXAMPLES = 128
"""Number of examples in a dry run.

With few examples, memory use peaks where the weights are largest; with many, it peaks where the activations are
largest.
"""
_STEPS = 10
"""Number of steps to simulate for the largest batch; later steps only reuse the allocator's existing blocks."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory and FLOPs of training on one rank, available before the first run (equation 3); sizes are in
    bytes.

    `flops_per_sample` counts the forward and the backward pass.

    `activation_bytes_per_sample` is the memory that each additional example needs at the peak of the forward and
    backward pass: tensors that autograd keeps, gradients of activations and, if `activation_checkpointing` is True
    (part of the forward pass is recomputed), recomputed activations. `fixed_activation_bytes` is the part of the
    activation memory that does not depend on the batch size. The kernels' scratch space is not included; if it matters,
    calibrate the estimate with one measured run. The FLOPs include the recomputation. `allocations` lists a process's
    allocations in its first ten steps, in order; None if their order depends on the batch size. `operations_per_step`
    counts the operations of the forward and backward pass that launch a kernel. `convolution_elements_per_sample` is
    the largest number of elements per example in a convolution's input or output; None if there is no convolution.
    `transposed_elements_per_sample` counts the elements per example that the convolutions of both passes read or write
    in channels-first memory. `precision` is the autocast dtype if autocast was on, or else the dtype of most
    parameters, named as in a job specification.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    flops_per_sample: float
    activation_bytes_per_sample: int
    fixed_activation_bytes: int
    batch_bytes_per_sample: int
    activation_checkpointing: bool = False
    precision: str = "fp32"
    batch_normalization: bool = False
    operations_per_step: int | None = None
    convolution_elements_per_sample: int | None = None
    transposed_elements_per_sample: int | None = None
    allocations: AllocationModel | None = field(default=None, repr=False, compare=False)

    def total_bytes(self, local_batch_size: int) -> int:
        """Return the memory of one rank at `local_batch_size` examples, in bytes (equation 3)."""
        static = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.fixed_activation_bytes
        return static + local_batch_size * (self.activation_bytes_per_sample + self.batch_bytes_per_sample)

    def largest_local_batch_size(self, capacity_bytes: float) -> int:
        """Return the largest batch size at which ten steps are expected to fit; 0 if not even one example fits.

        The result comes from a simulation of PyTorch's caching allocator (which reserves more memory than is allocated)
        within the device memory that the CUDA context leaves free. If the environment enables expandable segments (as
        `tula tune` and `tula run` do), or if the order of allocations depends on the batch size, the allocator is not
        simulated, and only the allocated bytes must fit.
        """
        return self._largest_within(room_bytes(capacity_bytes))

    def safe_local_batch_size(self, capacity_bytes: float) -> int:
        """Return the largest batch size that leaves a reserve for the kernels' scratch space, or 0 if none does."""
        return self._largest_within(SURE * room_bytes(capacity_bytes))

    def reserved_ratio(self, capacity_bytes: float) -> float:
        """Return the ratio of reserved to allocated bytes when the device is full; at least 1.

        The ratio is 1 with expandable segments, since the allocator then reserves no memory that it does not need.
        """
        if segments_grow():
            return 1.0
        room = room_bytes(capacity_bytes)
        largest = self.largest_local_batch_size(capacity_bytes)
        return max(1.0, room / self.total_bytes(largest)) if largest else 1.0

    def _largest_within(self, room: float) -> int:
        per_sample, allocations = self.activation_bytes_per_sample + self.batch_bytes_per_sample, self.allocations
        if not per_sample:
            return 0
        if allocations is None or segments_grow():
            return max(0, math.floor((room - self.total_bytes(0)) / per_sample))
        batches = range(1, math.floor(room / per_sample) + 2)
        return bisect_left(batches, True, key=lambda batch: not allocations.fits(batch, room))

    def model_spec(self, name: str, optimizer: str = "momentum", capacity_bytes: float | None = None) -> dict[str, Any]:
        """Return the `model` field of a job specification (`POST /v1/jobs`), for devices with this capacity."""
        return {
            "name": name,
            "parameters": self.parameters,
            # The specification does not include recomputation.
            "flops_per_sample": self.flops_per_sample / (_RECOMPUTED if self.activation_checkpointing else 1.0),
            "precision": self.precision,
            "activation_bytes_per_sample": self.activation_bytes_per_sample or None,
            "reserved_ratio": None if capacity_bytes is None else round(self.reserved_ratio(capacity_bytes), 3),
            "activation_checkpointing": self.activation_checkpointing,
            "operations_per_step": self.operations_per_step,
            "convolution_elements_per_sample": self.convolution_elements_per_sample,
            "transposed_elements_per_sample": self.transposed_elements_per_sample,
            "optimizer": optimizer,
            "batch_normalization": self.batch_normalization,
        }


def estimate_memory(
    model: torch.nn.Module, sample: Any, optimizer: torch.optim.Optimizer | None = None
) -> MemoryEstimate:
    """Estimate how much memory and how many FLOPs the training of `model` takes.

    `sample` contains the model's arguments for a small batch (a tensor, tuple or mapping). The forward and backward
    pass run on tensors without data (FakeTensor mode, or meta tensors if torch lacks this mode), once with about a
    hundred examples and once with twice as many. The difference is the cost of the additional examples. The model is
    not changed. Raises ValueError if `sample` contains no tensor with a batch dimension.
    """
    tensors = [tensor for tensor in tensors_in(sample) if tensor.dim() > 0]
    if not tensors:
        raise ValueError("sample contains no tensor with a batch dimension: pass the model's arguments")
    size = int(tensors[0].shape[0])
    times = math.ceil(_EXAMPLES / size)
    states = state_ratios(optimizer)
    once, twice = (_dry_run(model, sample, factor * times, states) for factor in (1, 2))
    per_sample = max(0, twice.peak_bytes - once.peak_bytes) / (times * size)
    parameters = {id(p): p for p in model.parameters()}.values()
    buffers = {id(b): b for b in model.buffers()}.values()
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return MemoryEstimate(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(t.numel() * t.element_size() for t in (*parameters, *buffers)),
        gradient_bytes=trained,
        optimizer_bytes=int(trained * sum(states)),
        flops_per_sample=(twice.flops - once.flops) / (times * size),
        activation_bytes_per_sample=round(per_sample),
        fixed_activation_bytes=max(0, round(once.peak_bytes - times * size * per_sample)),
        batch_bytes_per_sample=sum(t.numel() * t.element_size() for t in tensors) // size,
        activation_checkpointing=twice.recomputes,
        precision=_find_precision(model),
        batch_normalization=any(isinstance(module, BatchNorm) for module in model.modules()),
        operations_per_step=twice.operations,
        convolution_elements_per_sample=(twice.convolution_elements - once.convolution_elements) // (times * size)
        or None,
        transposed_elements_per_sample=(twice.transposed - once.transposed) // (times * size),
        allocations=_allocation_model(times * size, once, twice),
    )


def _allocation_model(first_batch: int, once: _DryRun, twice: _DryRun) -> AllocationModel | None:
    """Return a model of the allocations at any batch size, or None if the two runs make different allocations."""
    try:
        return AllocationModel(first_batch, 2 * first_batch, once.allocations, twice.allocations)
    except ValueError:
        return None


def _find_precision(model: torch.nn.Module) -> str:
    """Return the autocast dtype, or else the dtype of most parameters, named as in `ModelSpec.precision`.

    float32 is named tf32 if the script lets torch round the operands of matrix products.
    """
    dtype = autocast_dtype()
    if dtype is None:
        sizes: dict[torch.dtype, int] = {}
        for parameter in model.parameters():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        dtype = max(sizes, key=sizes.__getitem__, default=torch.float32)
    single = "tf32" if rounds_products() else "fp32"
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, single)


def state_ratios(optimizer: torch.optim.Optimizer | None) -> list[float]:
    """Return the size of each of the optimizer's state tensors relative to its parameter; empty without an optimizer.

    The sizes are measured on a new optimizer of the same class after one step on a small parameter.
    """
    if optimizer is None:
        return []
    inner = getattr(optimizer, "optimizer", optimizer)
    probe = torch.nn.Parameter(torch.zeros(64, 64, device="cpu"))
    accepted = inspect.signature(type(inner).__init__).parameters
    group = {name: value for name, value in inner.param_groups[0].items() if name in accepted}
    for name in ("params", "capturable", "fused", "differentiable"):
        group.pop(name, None)
    like = type(inner)([probe], **group)
    probe.grad = torch.ones_like(probe)
    like.step()
    state = [v for v in like.state.get(probe, {}).values() if isinstance(v, torch.Tensor) and v.numel() > 1]
    return [v.numel() * v.element_size() / (probe.numel() * probe.element_size()) for v in state]


class _Step(nn.Module):
    """Runs both passes in one call, so that forward passes repeated during the backward pass use the same weights.

    `recomputed`: the modules whose forward pass ran during the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.recomputed: list[nn.Module] = []

    def forward(self, *arguments: Any, **named: Any) -> None:
        loss = _scalar(self.model(*arguments, **named))
        hook = nn.modules.module.register_module_forward_pre_hook(lambda module, _: self.recomputed.append(module))
        try:
            torch.clear_autocast_cache()  # as at the end of an autocast block in a script
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            hook.remove()


@dataclass(frozen=True)
class _DryRun:
    """Memory and FLOPs of training at one batch size.

    `peak_bytes` excludes parameters, buffers, inputs and the gradients of parameters. `flops` and `operations` count
    one forward and backward pass. `convolution_elements`: the largest number of elements in a convolution's input or
    output. `transposed`: the number of elements that convolutions read or write in channels-first memory. `recomputes`:
    True if modules ran again during the backward pass. `allocations`: the events of ten steps, in order.
    """

    peak_bytes: int
    flops: int
    operations: int
    convolution_elements: int
    transposed: int
    recomputes: bool
    allocations: list[Allocation]


def _dry_run(model: torch.nn.Module, sample: Any, times: int, state_ratios: Sequence[float]) -> _DryRun:
    """Trace two steps with `times` copies of the sample, repeat the second step's allocations, and return the results.

    The first step also creates the optimizer's state. `state_ratios`: the result of the function `state_ratios`.
    """
    step = _Step(model)
    with tensors_without_data() as convert:
        state = {name: convert(tensor) for name, tensor in (*step.named_parameters(), *step.named_buffers())}
        inputs = map_tensors(
            sample, lambda tensor: torch.cat([convert(tensor)] * times) if tensor.dim() else convert(tensor)
        )
        trained = [tensor for tensor in {id(t): t for t in state.values()}.values() if tensor.requires_grad]
        formulas = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
        trace = AllocationTrace((*state.values(), *tensors_in(inputs)), formulas)

        def leave_out(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                trace.leave_out(parameter.grad)

        for tensor in trained:
            tensor.register_post_accumulate_grad_hook(leave_out)  # type: ignore[no-untyped-call]
        named = dict(inputs) if isinstance(inputs, Mapping) else {}
        arguments = () if named else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        torch.clear_autocast_cache()  # it may contain weights that an earlier run converted in another mode
        for tensor in {storage_key(t): t for t in state.values()}.values():
            trace.allocate(tensor.untyped_storage().nbytes())
        _take_steps(
            trace,
            lambda: torch.func.functional_call(step, state, arguments, named),
            trained,
            inputs,
            state_ratios,
        )
        return _DryRun(
            peak_bytes=trace.peak(),
            flops=trace.step_flops,
            operations=trace.step_operations,
            convolution_elements=trace.largest_convolution,
            transposed=trace.step_transposed,
            recomputes=bool(step.recomputed),
            allocations=trace.events_with_step_repeated(_STEPS - 2),
        )


def _take_steps(
    trace: AllocationTrace,
    run: Callable[[], Any],
    trained: Sequence[torch.Tensor],
    inputs: Any,
    state_ratios: Sequence[float],
) -> None:
    """Trace two steps as in a script: load a batch, clear gradients, run both passes, create the optimizer's state."""
    batch: list[int] = []
    for number in range(2):
        trace.begin_step()
        earlier, batch = batch, [trace.allocate(t.untyped_storage().nbytes()) for t in tensors_in(inputs)]
        for key in earlier:  # a loop keeps each batch until it has the next one
            trace.release(key)
        for tensor in trained:
            tensor.grad = None
        with trace:
            run()
        for ratio in state_ratios if number == 0 else ():
            for tensor in trained:
                trace.allocate(round(ratio * tensor.untyped_storage().nbytes()))


def _convolution_backward_flops(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass; each of the two gradients costs as much as a forward pass.

    PyTorch's own formula ignores groups, so it counts a depthwise convolution as if it had only one group.
    """
    transposed, gradients = bool(rest[4]), rest[7]
    positions = inputs if transposed else grad
    forward = 2 * weight.numel() * len(inputs) * math.prod(positions.shape[2:])
    return forward * sum(map(bool, gradients[:2]))


def _scalar(output: Any) -> torch.Tensor:
    """Return a loss for the backward pass: the output's `loss` if it has one (transformers), or else the sum of all
    outputs.

    Raises ValueError if no output needs a gradient.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss
    parts = [tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts:
        raise ValueError("the model returns no tensor that needs a gradient: use a model that can be trained")
    return torch.stack(parts).sum()
