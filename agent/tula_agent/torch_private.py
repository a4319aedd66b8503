"""Contains all code of the agent that uses private parts of PyTorch, since torch may change them without notice.

Each docstring explains why the public interface does not suffice. The private names were tested with torch 2.4.1 and
2.13.0, unless a docstring says otherwise; the agent supports torch 2.4 and later. If torch lacks an optional name, the
function returns None or False, and the agent measures less.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tula_agent.allocations import Allocation

_HALVES = (torch.float16, torch.bfloat16)
_EXACT = ("none", "ieee")  # values of `fp32_precision`

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
"""Base class of all batch normalization, also of other libraries; torch has no public class for this."""

# Process groups.


def default_store() -> Any | None:
    """Return the key-value store of the default process group, or None; no public function returns it.

    Ranks use this store to exchange the address of the agent's own store; otherwise they would need a fixed port.
    """
    getter = getattr(getattr(dist, "distributed_c10d", None), "_get_default_store", None)
    try:
        return getter() if getter is not None else None
    except (RuntimeError, ValueError):  # there is no default process group
        return None


# Data loaders.


def loader_iterator_class() -> Any | None:
    """Return the base class of all DataLoader iterators; no public name covers the loaders of every framework."""
    return getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)


def has_yielded(value: object) -> bool:
    """Return True if `value` is a DataLoader's iterator that has delivered a batch; no public attribute shows this."""
    kind = loader_iterator_class()
    return kind is not None and issubclass(type(value), kind) and getattr(value, "_num_yielded", 1) > 0


def index_sampler(iterator: Any) -> Any:
    """Return the sampler from which an iterator over a DataLoader takes the indices of each batch, or None.

    This is the loader's batch sampler, which has a `batch_size`, or the sampler if the loader has no batch sampler. An
    iterator keeps no reference to its loader, so the sampler cannot be reached through public attributes.
    """
    return getattr(iterator, "_index_sampler", None)


def loader_workers(iterator: Any) -> Any:
    """Return the number of workers of a DataLoader's iterator, which keeps no reference to its loader."""
    return getattr(iterator, "_num_workers", None)


# Compilation and the backward pass.


def compiled_frames() -> int:
    """Return the number of frames that torch.compile has compiled in this process; there is no public counter."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", {})
    return int(counters["frames"]["ok"]) if "frames" in counters else 0


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if `module` was returned by `torch.compile`, or if its `compile` method was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def in_backward() -> bool:
    """Return True if this thread is in a backward pass, which may include recomputed forward passes."""
    getter = getattr(torch._C, "_current_graph_task_id", None)
    return getter is not None and getter() >= 0


# DistributedDataParallel.


def joins_uneven_inputs(model: Any) -> bool:
    """Return True inside `with model.join()`, a state that DDP records only in a private attribute."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))


def ddp_models(models: Iterable[torch.nn.Module]) -> list[Any]:
    """Return the DDP modules among `models`, including those inside the wrapper of `torch.compile` (`_orig_mod`)."""
    inner = [getattr(model, "_orig_mod", model) for model in models]
    return [model for model in inner if isinstance(model, torch.nn.parallel.DistributedDataParallel)]


def has_ddp_statistics(model: Any) -> bool:
    """Return True if DDP times its own reductions (`_get_ddp_logging_data`); no public function returns these times."""
    return hasattr(model, "_get_ddp_logging_data")


def ddp_statistics(model: Any) -> Mapping[str, Any]:
    """Return DDP's timings of one iteration in nanoseconds, such as `backward_comm_time` and its overlapped part."""
    statistics: Mapping[str, Any] = model._get_ddp_logging_data()
    return statistics


def set_ddp_statistics_interval(model: Any, steps: int) -> None:
    """Make DDP time one of every `steps` iterations (100 by default) after the first ten, which DDP always times."""
    setter = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
    if setter is not None:
        setter(steps)


def ddp_buckets(model: Any) -> list[list[int]] | None:
    """Return the parameters in each bucket, in the order of reduction, as indices into the parameters that need
    gradients.

    Returns None until the first backward pass has ordered DDP's buckets. If DDP searches for unused parameters, it
    never orders the buckets, and the result is always None.
    """
    text = str(ddp_statistics(model).get("rebuilt_per_bucket_param_indices", "")) if has_ddp_statistics(model) else ""
    return [[int(index) for index in bucket.split()] for bucket in text.split(",")] if text else None


def ddp_model_in_forward() -> Any | None:
    """Return the DDP module whose forward pass is running; some frameworks give no other access to their DDP module.

    Tested with torch 2.13.0.
    """
    return getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


# Sharded parameters (FSDP 1 and 2, tensor parallelism).


def is_sharded(parameters: Iterable[torch.Tensor], models: Iterable[torch.nn.Module] = ()) -> bool:
    """Return True if the model uses FSDP 1 or 2 or tensor parallelism, so that no rank has whole parameters or
    gradients.

    Pass `models` if they are available, since FSDP 1 wraps modules. Classes are compared by name, because importing
    FSDP takes a second; with `use_orig_params`, FSDP 1 marks parameters only by `_fsdp_flattened`.
    """
    if any(
        hasattr(parameter, "to_local")
        or type(parameter).__name__ == "FlatParameter"
        or getattr(parameter, "_fsdp_flattened", False)
        for parameter in parameters
    ):
        return True
    return any(type(module).__name__ == "FullyShardedDataParallel" for model in models for module in model.modules())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without a collective; return any other tensor unchanged.

    `to_local` is public, but in torch 2.4 the DTensor class was in a private module, `torch.distributed._tensor`.
    """
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


# Operations on many tensors in one kernel.


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each dense tensor as a 0-d tensor in float32 or wider.

    `_foreach_norm` launches one kernel per device and type; separate calls would cost the host about 5 us per tensor.
    """
    if any(tensor.dtype in _HALVES for tensor in tensors):
        # A norm in half precision would be off by up to half a percent, or infinite.
        return [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return list(torch._foreach_norm(list(tensors))) if tensors else []


def norm_squared(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return |G|^2 over all tensors as a 0-d tensor in the widest type of the first tensor's device.

    Without tensors, the result is 0. The public `torch.nn.utils.get_total_norm` exists only since torch 2.6 and has no
    `dtype` argument.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    device = gradients[0].device
    by_gradient = norms([g.coalesce().values() if g.is_sparse else g for g in gradients])
    # Stack the norms first: converting them one by one on a device would launch one kernel per norm.
    stacked = torch.stack([norm if norm.device == device else norm.to(device) for norm in by_gradient])
    return stacked.to(wide_dtype(device)).square().sum()


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type in which `device` can compute."""
    return torch.float32 if device.type == "mps" else torch.float64


def add_squares(sums: list[torch.Tensor | None], places: Sequence[int], values: list[torch.Tensor]) -> None:
    """Add the square of each value to the sum at its index (None means 0) with two kernels; overwrite the values."""
    if not values:
        return
    torch._foreach_mul_(values, values)
    further = [(held, value) for place, value in zip(places, values, strict=True) if (held := sums[place]) is not None]
    if further:
        torch._foreach_add_([held for held, _ in further], [value for _, value in further])
    for place, value in zip(places, values, strict=True):
        if sums[place] is None:
            sums[place] = value


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by `factor` (one element, on their device) in place, in one kernel."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_subtract_(
    tensors: Sequence[torch.Tensor], changes: Sequence[torch.Tensor], rates: Sequence[float | torch.Tensor]
) -> None:
    """Subtract rate times change (float32) from each dense tensor; overwrite the changes.

    All tensors with the same rate, device and type together need two kernels.
    """
    groups: dict[tuple[int | float, torch.device, torch.dtype], list[int]] = {}
    for place, (tensor, rate) in enumerate(zip(tensors, rates, strict=True)):
        key = id(rate) if isinstance(rate, torch.Tensor) else rate
        groups.setdefault((key, tensor.device, tensor.dtype), []).append(place)
    for (_, _, dtype), places in groups.items():
        steps, rate = [changes[place] for place in places], rates[places[0]]
        # torch's optimizers also accept a rate of shape (1,), which `_foreach_mul_` rejects.
        torch._foreach_mul_(steps, rate.reshape(()) if isinstance(rate, torch.Tensor) else rate)
        steps = steps if dtype == torch.float32 else [step.to(dtype) for step in steps]
        torch._foreach_sub_([tensors[place] for place in places], steps)


def rounds_products() -> bool:
    """Return True if the script lets torch round the operands of float32 matrix products on a GPU to TF32 or fewer
    bits.
    """
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:  # before torch 2.9; since then, this call raises if a script sets `fp32_precision`
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in _EXACT


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices on a GPU in full float32 precision inside the context, regardless of the script's
    settings.

    Since torch 2.9, the precision can be set through two interfaces, and torch raises an error during a product if the
    two settings contradict each other. So the precision is changed through the interface that the script used.
    `allow_tf32` does not affect products on the host.
    """
    matmul = torch.backends.cuda.matmul
    try:
        allowed = torch.get_float32_matmul_precision()
    except RuntimeError:  # the script set `fp32_precision`
        own, matmul.fp32_precision = matmul.fp32_precision, "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = own
        return
    if allowed == "highest":
        yield
        return
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = True
        if allowed != "high":
            torch.set_float32_matmul_precision(allowed)


# Tensors without data, and devices.


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `numbers` as a tensor on `device`; a GPU copies them from pinned memory, so the host does not wait."""
    host = torch.tensor(numbers, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def autocast_dtype() -> torch.dtype | None:
    """Return this thread's autocast dtype for the GPU or, if it is off there, for the CPU; None if both are off."""
    return next((torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)


@contextmanager
def tensors_without_data() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside the context, create tensors that have shapes but no data; yield a function that converts real tensors.

    FakeTensorMode keeps the device of each tensor, unlike meta tensors (the fallback), but its module is private.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
    except (ImportError, TypeError):
        yield lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        return
    with mode:
        yield lambda tensor: mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)


class AllocationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the memory that operations inside the context would allocate and release on a CUDA device.

    `own`: existing tensors, which are not recorded. `step_operations`: the number of operations since `begin_step` that
    launch a kernel, because they create a tensor or write to one. `step_flops`: the FLOPs of these operations, computed
    with torch's formulas and `formulas`; `FlopCounterMode` is not used, since it would keep the tensors alive.
    `largest_convolution`: the largest number of elements in a tensor that a convolution reads or creates.
    `step_transposed`: the number of image elements that convolutions have read or created in channels-first memory
    since `begin_step`. torch has trackers of its own (`torch.distributed._tools`), which are private.

    On a CPU, autocast copies half-precision logits to float32 for `log_softmax`, and copies the gradient back to half
    precision. CUDA kernels read and write half precision directly, so these copies are not recorded.
    """

    def __init__(self, own: Iterable[torch.Tensor], formulas: Mapping[Any, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step_flops = self.step_operations = self.step_transposed = self.largest_convolution = 0
        self._formulas = {**flop_registry, **formulas}
        self._events: list[Allocation] = []
        self._steps: list[tuple[int, int]] = []  # (last key, number of events) when each step began
        self._last_key = 0
        self._keys = {storage_key(tensor): 0 for tensor in own}  # by `storage_key`
        self._left_out: dict[int, int] = {}  # by key, the number of events before the call of `leave_out`
        self._fused: set[int] = set()
        self._uncounted: set[int] = set()
        self._last_made: torch.Tensor | None = None

    def events(self) -> list[Allocation]:
        """Return every allocation and release in order."""
        return [event for event in self._events if event.key not in self._fused]

    def peak(self) -> int:
        """Return the peak of allocated bytes, excluding memory that was passed to `allocate` or `leave_out`."""
        live = peak = 0
        sizes: dict[int, int] = {}
        passed_over = self._fused | self._uncounted
        left_out = sorted((place, key) for key, place in self._left_out.items())
        for place, event in enumerate(self._events):
            while left_out and left_out[0][0] <= place:
                live -= sizes.pop(left_out.pop(0)[1], 0)
            if event.size is None:
                live -= sizes.pop(event.key, 0)
            elif event.key not in passed_over:
                sizes[event.key] = event.size
                live += event.size
                peak = max(peak, live)
        return peak

    def begin_step(self) -> None:
        """Mark the beginning of a training step."""
        self._steps.append((self._last_key, len(self._events)))
        self.step_flops = self.step_operations = self.step_transposed = 0

    def events_with_step_repeated(self, times: int) -> list[Allocation]:
        """Return the events, followed by `times` repetitions of the last step's events.

        Each repetition releases, in the same order, the memory that the previous step left allocated, such as
        gradients.
        """
        (before, _), (began, place) = self._steps[-2:]
        earlier, later = began - before, self._last_key - began
        step = [event for event in self._events[place:] if event.key not in self._fused]

        def moved(key: int, repeat: int) -> int:
            if key > began:
                return key + repeat * later
            return key + earlier + (repeat - 1) * later if key > before else key

        again = (Allocation(moved(key, repeat), size) for repeat in range(1, times + 1) for key, size in step)
        return [*self.events(), *again]

    def allocate(self, num_bytes: int) -> int:
        """Record an allocation that is not made by an operation; return the key for its release."""
        key = self._allocate(num_bytes)
        self._uncounted.add(key)
        return key

    def release(self, key: int) -> None:
        """Record the release of an allocation that `allocate` recorded."""
        self._events.append(Allocation(key, None))

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting `tensor` in `peak`; its events remain in the trace."""
        self._left_out[self._keys[storage_key(tensor)]] = len(self._events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a query about a tensor, such as its device
            return made
        last, self._last_made = self._last_made, None
        if last is not None and func in _READS_HALVES and storage_key(args[0]) == storage_key(last):
            self._fuse(last, made)
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            self.step_flops += formula(*args, **(kwargs or {}), out_val=made)
        if func.overloadpacket in _CONVOLUTIONS:
            sizes = (tensor.numel() for tensor in tree_leaves((args, made)) if isinstance(tensor, torch.Tensor))
            self.largest_convolution = max(self.largest_convolution, *sizes)
            self.step_transposed += _transposed_elements(func, args, made)
        before = self._last_key
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (memory := storage_key(tensor)) not in self._keys:
                self._keys[memory] = self._allocate(tensor.untyped_storage().nbytes())
                weakref.finalize(tensor.untyped_storage(), self._free, memory)
                if _may_be_fused(func, args, tensor):
                    self._last_made = tensor
        self.step_operations += self._last_key > before or func._schema.is_mutable
        return made

    def _fuse(self, last: torch.Tensor, made: torch.Tensor) -> None:
        """Treat two operations as one kernel: one that created `last`, and one that read it and created `made`."""
        key = self._keys[storage_key(last)]
        if made.dtype == torch.float32:  # log_softmax, which reads half precision
            self._fused.add(key)
            return
        # The gradient of log_softmax, which is written in half precision.
        place = next(i for i in reversed(range(len(self._events))) if self._events[i].key == key)
        self._events[place] = Allocation(key, made.untyped_storage().nbytes())
        self._keys |= {storage_key(made): key, storage_key(last): 0}
        weakref.finalize(made.untyped_storage(), self._free, storage_key(made))

    def _allocate(self, num_bytes: int) -> int:
        self._last_key += 1
        self._events.append(Allocation(self._last_key, num_bytes))
        return self._last_key

    def _free(self, memory: int) -> None:
        self.release(self._keys.pop(memory))


_CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


def _transposed_elements(convolution: Any, args: Sequence[Any], made: Any) -> int:
    """Return the number of image elements that a convolution reads or creates in channels-first memory.

    A backward pass consists of two convolutions that both read the gradient: one creates the gradient of the images,
    and the other reads the images to compute the gradient of the weights.
    """
    images = [args[0], made]
    if convolution.overloadpacket is torch.ops.aten.convolution_backward:
        of_images, of_weights = made[:2]
        images = [] if of_images is None else [args[0], of_images]
        images += [] if of_weights is None else [args[0], args[1]]
    return sum(
        image.numel()
        for image in images
        if image.dim() == 4
        and image.stride(1) > 1  # 0 if the gradient is one repeated number
        and not image.is_contiguous(memory_format=torch.channels_last)
    )


_READS_HALVES = (torch.ops.aten._log_softmax.default, torch.ops.aten._to_copy.default)


def _may_be_fused(func: Any, args: Any, made: torch.Tensor) -> bool:
    """Return True if CUDA would keep the float32 tensor `made` in registers until one of `_READS_HALVES` reads it."""
    if made.dtype != torch.float32:
        return False
    if func is torch.ops.aten._to_copy.default:
        return args[0].dtype in _HALVES  # before log_softmax
    return func is torch.ops.aten._log_softmax_backward_data.default  # before the copy to half precision


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory; unlike `data_ptr()`, it also works without data."""
    return int(tensor.untyped_storage()._cdata)
