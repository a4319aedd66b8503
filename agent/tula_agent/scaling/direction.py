"""Computes a step's direction, in which all singular directions that exceed the noise have the same length.

    D = (U U^T + nu I)^(-1/2) U, scaled to the length |U|_F;     nu = c V / ((1 - mu^2) m),     c = 1/4

U (m x n, m <= n) is the update of a weight in SGD before multiplication by the learning rate; it is usually the
momentum buffer. V is the average squared norm of the noise in this tensor's mean gradient, and mu is the momentum; the
divisor (1 - mu^2) m distributes the noise in the buffer over the m singular directions. All directions well above the
noise get the same length, as in Muon (Jordan et al. 2024) and Shampoo (Gupta et al. 2018), and directions below the
noise keep the proportions of the gradient. If noise dominates everywhere, D is U. The length of the step does not
change (grafting: Agarwal et al. 2020), so the learning rate, its schedule, the decay and the momentum keep their
meaning. docs/evidence/direction.md presents the evidence.

On a CPU, the inverse root is computed from LAPACK's eigenvectors. On a GPU, computing eigenvectors is slow and waits
for the host, so the inverse root is computed with matrix products only:

    Y <- Y T, Z <- T Z, T = (3 a I - a^3 Z Y) / 2     (Newton's coupled iteration: Higham 2008, equation 6.35)

The iteration starts from Y = A / |A|_F and Z = I. The scale a = sqrt(3 / (1 + l + l^2)) maps the interval [l, 1], which
contains the singular values of Y^(1/2), to the narrowest possible interval (Chen and Chow 2014). nu is at least 1e-6
|U|^2, so l starts at 1e-3. Ten steps compute D to within 2 % if nu is at its minimum, and to within 0.01 % if nu is
1e-3 |U|^2.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional

from tula_agent.guard import logger
from tula_agent.scaling.ranks import Ranks, owners
from tula_agent.torch_private import BatchNorm, exact_products, foreach_subtract_, norms, to_device

DAMPING = 0.25
"""The constant c, chosen from 0, 1/4, 1 and 4 on development cases; with batch normalization, 1/4 and 1 work equally
well.
"""
ROWS = 256
"""Maximum number of rows in a block.

A matrix with more rows is split into blocks, each with a separate D, since the root's cost grows with the cube of the
number of rows.
"""
MOST_OPERATIONS = 0.05
"""Maximum number of operations for turning, as a fraction of the operations of the forward and backward passes; the
largest matrices are left out first.
"""
_HEIGHTS = 64
"""On a GPU, the number of rows in a block is a multiple of this number, so that few different heights occur."""
DEVICE_COST = 4
"""Time of an operation for turning on a GPU, relative to an operation of the forward and backward passes.

On an H100, turning all matrices of ResNet-50 took 6.5 ms (11 TFLOP/s in float32); the passes ran at 44 TFLOP/s (TF32).
"""
POSITIONS = 64
"""Number of positions per example at which a convolution is assumed to use its weight (8 x 8); 1 for a dense layer."""
NORMALIZED_UP_TO = 4.0
"""B / b up to which networks with batch normalization keep the gradient's directions.

On development cases at 2 and 4 times the base batch, turning made such networks up to 2.3 points less accurate. At 8 to
32 times, turning made networks more accurate if they lost several points without it.
"""

FROZEN = (
    "gradient scaling: gc.freeze() hides the model's modules, so embeddings and batch normalization are not "
    "recognised: call gc.freeze() after the first optimizer step, or put the weights of embeddings into a parameter "
    "group with direction=False"
)

_SEARCHED_KINDS = (torch.nn.Embedding, torch.nn.EmbeddingBag, BatchNorm)
_LEAST = 1e-6  # minimum of nu / |U|^2
_NOISY = 1e4  # nu / |U|^2 above which D differs from U by less than 1e-4 of its length


def noise_level(noise: float, momentum: float, rows: int, damping: float = DAMPING) -> float:
    """Return nu = c V / ((1 - mu^2) m); `noise` is V, and `rows` is m. If mu is 1, nu is infinite."""
    kept = 1.0 - momentum**2
    return damping * noise / (kept * rows) if kept > 0.0 else math.inf


@exact_products()
def corrections(updates: Sequence[torch.Tensor], levels: torch.Tensor) -> list[torch.Tensor]:
    """Return D - U, where |D| = |U|, in float32 for each matrix U (m, n), m <= n; `levels` (k,) contains each nu.

    The correction is zero for a matrix that is zero or contains NaN or infinity, and for a matrix whose level is not
    finite or is far larger than |U|^2; such a matrix keeps the step that SGD took. All matrices must be on one device.
    Products of consecutive matrices with the same shape are batched, and the inverse roots of all blocks of the same
    height are computed together, because launching operations on a GPU takes longer than running them. Products are
    computed in full precision, because the rounding that a script may allow exceeds the smallest eigenvalues and would
    make the iteration diverge.
    """
    matrices = [update.float() for update in updates]
    lengths = torch.stack(norms(matrices))
    damping = levels.to(lengths) / lengths.square()
    kept = ~((damping < _NOISY) & torch.isfinite(lengths))  # `masked_fill` launches one operation, `where` launches two
    damping = damping.clamp_min(_LEAST).masked_fill_(kept, 1.0)
    stacks: list[_Stack] = []
    for shape, members in groupby(range(len(matrices)), key=lambda place: matrices[place].shape):
        start, *rest = members
        part = slice(start, start + 1 + len(rest))
        whole = torch.stack(matrices[part])
        unit = (whole / lengths[part, None, None]).masked_fill_(kept[part, None, None], 0.0)
        stacks.append(_Stack(part, whole, *_in_blocks(unit, shape[0])))
    for height in dict.fromkeys(stack.height for stack in stacks):
        same = [stack for stack in stacks if stack.height == height]
        grams = torch.cat([stack.unit @ stack.unit.mT for stack in same])
        diagonal = torch.cat([damping[stack.part, None].expand(-1, stack.blocks).reshape(-1) for stack in same])
        grams.diagonal(dim1=-2, dim2=-1).add_(diagonal[:, None])
        roots = torch.split(inverse_root(grams), [len(stack.unit) for stack in same])
        for stack, root in zip(same, roots, strict=True):
            stack.turned = stack.joined(root @ stack.unit)
            del stack.unit  # frees as much memory as the matrices use
    sizes = torch.cat([torch.linalg.vector_norm(stack.turned, dim=(1, 2)) for stack in stacks])
    kept = kept | ~((sizes > 0.0) & torch.isfinite(sizes))
    scales = lengths / sizes
    changes: list[torch.Tensor] = []
    for stack in stacks:
        change = stack.turned.mul_(scales[stack.part, None, None]).sub_(stack.whole)
        changes += change.masked_fill_(kept[stack.part, None, None], 0.0).unbind()
    return changes


class _Stack:
    """Matrices of one shape, in order: `whole` (k, m, n), and `unit`, which is normalized and split into blocks of
    rows.
    """

    def __init__(self, part: slice, whole: torch.Tensor, unit: torch.Tensor, blocks: int) -> None:
        self.part, self.whole, self.unit, self.blocks = part, whole, unit, blocks
        self.height = unit.shape[1]
        self.turned = whole

    def joined(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the matrices (k, m, n), joined from their blocks."""
        count, rows, columns = self.whole.shape
        return blocks.reshape(count, self.blocks * self.height, columns)[:, :rows]


def _in_blocks(unit: torch.Tensor, rows: int) -> tuple[torch.Tensor, int]:
    """Return matrices (k, m, n) split into equal, zero-padded blocks of rows, and the number of blocks per matrix."""
    blocks, height = _block(rows, host=unit.is_cpu)
    filled = functional.pad(unit, (0, 0, 0, blocks * height - rows)) if blocks * height > rows else unit
    return filled.reshape(-1, height, unit.shape[-1]), blocks


def _block(rows: int, *, host: bool) -> tuple[int, int]:
    """Return the number and the height of a matrix's blocks of rows; on a GPU, use only a few heights."""
    blocks = -(-rows // ROWS)
    height = -(-rows // blocks)
    return blocks, height if host else -(-height // _HEIGHTS) * _HEIGHTS


def inverse_root(matrices: torch.Tensor) -> torch.Tensor:
    """Return A^(-1/2) of symmetric matrices A (k, m, m), or NaN if it does not exist.

    The eigenvalues must be at least 1e-6 |A|_F.
    """
    if not matrices.is_cpu:
        return newton_inverse_root(matrices)
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except RuntimeError:  # LAPACK did not converge, so steps are not turned
        return torch.full_like(matrices, math.nan)
    root: torch.Tensor = (vectors * values.clamp_min(_LEAST).rsqrt().unsqueeze(-2)) @ vectors.mT
    return root


def newton_inverse_root(matrices: torch.Tensor) -> torch.Tensor:
    """Return A^(-1/2) by Newton's iteration (see the module's docstring), in the precision of `matrices`."""
    size = torch.linalg.matrix_norm(matrices, keepdim=True)
    y = matrices / size
    identity = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    first, *scales = _scales(math.sqrt(_LEAST))
    z = t = torch.sub(1.5 * first * identity, y, alpha=0.5 * first**3)
    for scale in scales:
        y = y @ t
        t = torch.baddbmm(identity, z, y, beta=1.5 * scale, alpha=-0.5 * scale**3)
        z = t @ z
    root: torch.Tensor = z / size.sqrt()
    return root


@lru_cache(maxsize=1)
def _scales(least: float) -> tuple[float, ...]:
    """Return the scales a of the iterations that bring singular values between `least` and 1 to within 0.001 of 1."""
    scales = []
    while least < 0.999:
        scale = math.sqrt(3.0 / (1.0 + least + least**2))
        scales.append(scale)
        least = scale * (3.0 - scale**2) / 2.0
    return tuple(scales)


@dataclass(frozen=True)
class Shape:
    """Shape of a weight as a matrix with `rows` <= `columns`; `transposed`: True if the weight's first dimension is
    longer.
    """

    rows: int
    columns: int
    transposed: bool
    positions: int

    def operations(self, *, host: bool) -> int:
        """Return the number of floating-point operations for computing D in blocks of rows.

        The operations are U U^T, the inverse root, and the root's product with U. The eigenvectors of a symmetric
        matrix count as 9 m^3 (Golub and Van Loan 2013, section 8.3).
        """
        blocks, height = _block(self.rows, host=host)
        root = 9 + 2 if host else 2 * (3 * len(_scales(math.sqrt(_LEAST))) - 2)
        return blocks * (4 * height**2 * self.columns + root * height**3)

    @property
    def operations_of_an_example(self) -> int:
        """Return the weight's floating-point operations in the forward and backward pass of one example."""
        return 6 * self.rows * self.columns * self.positions


def weights_of(kinds: Sequence[type[torch.nn.Module]], parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Return a flag for each of `parameters`, True if it is the `weight` of a module of these kinds.

    An optimizer refers only to tensors, so this function asks the garbage collector for the instances of the classes in
    this process, which takes tens of milliseconds. The collector does not list objects that `gc.freeze` has hidden, so
    a warning is logged if a parameter is hidden. The search does not run any code of the modules.
    """
    classes = tuple(kind for ancestor in kinds for kind in _family(ancestor))
    modules = [item for item in gc.get_referrers(*classes) if any(type(item) is kind for kind in classes)]
    # Do not read `module.weight`: a parametrized module would compute the weight, which may change buffers or raise.
    weights = {id(vars(module).get("_parameters", {}).get("weight")) for module in modules}
    if gc.get_freeze_count() and _hidden(parameters):
        logger.warning(FROZEN)
    return [id(parameter) in weights for parameter in parameters]


def _family(kind: type) -> Iterator[type]:
    """Yield `kind` and all its subclasses."""
    yield kind
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        yield from _family(subclass)


def _hidden(parameters: Sequence[torch.Tensor]) -> bool:
    """Return True if the garbage collector does not list all `parameters`."""
    missing = {id(parameter) for parameter in parameters}
    for generation in range(3):  # the youngest is the smallest, and has the parameters of a model that was just built
        missing.difference_update(map(id, gc.get_objects(generation)))
        if not missing:
            return False
    return True


def matrix_shape(parameter: torch.Tensor) -> Shape | None:
    """Return the shape of `parameter` as (first dimension, all others); None if the matrix is smaller than 2 x 2."""
    if parameter.ndim < 2 or not parameter.is_floating_point() or not parameter.numel():
        return None
    first = parameter.shape[0]
    rest = parameter.numel() // first
    if min(first, rest) < 2:
        return None
    return Shape(min(first, rest), max(first, rest), first > rest, POSITIONS if parameter.ndim > 2 else 1)


@lru_cache(maxsize=8)
def affordable(shapes: tuple[Shape, ...], batch_size: float | None, *, host: bool) -> tuple[bool, ...]:
    """Return a flag for each matrix, True if its steps are turned (see `Directions`).

    The matrices whose steps are most expensive to turn are left out if the total would exceed the share MOST_OPERATIONS
    of a step's operations. The forward and backward passes of a step count as 6 operations per weight, position and
    example of the global batch; if the batch size is unknown, all matrices are turned. On a GPU, each operation for
    turning counts DEVICE_COST times. The result depends only on the arguments, so it is the same on every rank.
    """
    if batch_size is None:
        return (True,) * len(shapes)
    allowed = MOST_OPERATIONS * batch_size * sum(shape.operations_of_an_example for shape in shapes)
    chosen = [False] * len(shapes)
    costs = [shape.operations(host=host) * (1 if host else DEVICE_COST) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: costs[index]):
        allowed -= costs[index]
        if allowed < 0.0:
            break
        chosen[index] = True
    return tuple(chosen)


def sgd_update(
    parameter: torch.Tensor, group: Mapping[str, Any], buffer: torch.Tensor | None, rate: float | torch.Tensor
) -> torch.Tensor:
    """Return U of the step w <- w - rate U that torch's SGD has just taken, from the state after that step.

    `parameter`: the weight after the step, with its gradient; `group`: the weight's parameter group; `buffer`: the
    weight's momentum buffer, or None.
    """
    if buffer is not None and not group["nesterov"]:
        return buffer
    assert parameter.grad is not None
    update = -parameter.grad if group["maximize"] else parameter.grad
    # The decay applies to the weight before the step, w + rate U; solve the equation for U.
    update = (update + group["weight_decay"] * parameter) if group["weight_decay"] else update
    if buffer is not None:
        update = update + group["momentum"] * buffer
    solved: torch.Tensor = update / (1.0 - rate * group["weight_decay"])
    return solved


@dataclass(frozen=True)
class _Matrix:
    """A weight whose steps are turned, with its index among all parameters, its options and its shape."""

    index: int
    parameter: torch.Tensor
    group: Mapping[str, Any]
    shape: Shape

    def update(self, inner: torch.optim.Optimizer, factor: float) -> torch.Tensor:
        """Return U in shape (rows, columns), or zeros if the step did not change the weight."""
        if self.parameter.grad is None or self.parameter.grad.is_sparse:
            return self.parameter.new_zeros(self.shape.rows, self.shape.columns)
        buffer = inner.state.get(self.parameter, {}).get("momentum_buffer")  # `state[...]` would add an entry
        update = sgd_update(self.parameter, self.group, buffer, self.group["lr"] * factor).flatten(1)
        return update.mT if self.shape.transposed else update

    def shaped(self, correction: torch.Tensor) -> torch.Tensor:
        """Return `correction`, which is D - U in any shape, as a contiguous tensor in the shape of the weight.

        One kernel can subtract many tensors only if they have the same strides as the weights.
        """
        matrix = correction.view(self.shape.rows, self.shape.columns)
        return (matrix.mT if self.shape.transposed else matrix).contiguous().view(self.parameter.shape)


class Directions:
    """Turns the steps of a model's matrices, which means that D replaces U (see the module's docstring).

    Each matrix has an owner rank, and all ranks apply the owner's correction. The replicas therefore remain
    bit-identical even on different devices, and each of N ranks does 1/N of the work. Corrections are sent in bfloat16,
    in one exchange per step, because training does not need their last bits but slow networks need small messages.
    `left_out` is the number of matrices whose steps are not turned because turning all steps would cost too much. The
    steps of embeddings are not turned either, since their rows are not directions of a linear map, nor are the steps of
    parameter groups with `direction=False`. In a network with batch normalization, no step is turned if B / b is at
    most NORMALIZED_UP_TO.
    """

    def __init__(self, inner: torch.optim.Optimizer, ranks: Ranks, damping: float = DAMPING) -> None:
        self._inner, self._ranks, self._damping = inner, ranks, damping
        self.left_out = 0
        self._tables: frozenset[int] = frozenset()
        self._normalized = False
        self._searched = 0
        self._levels: dict[torch.device, tuple[list[float], torch.Tensor]] = {}

    @property
    def acts(self) -> bool:
        """Return True if all steps of matrices are turned, except for embeddings and groups with `direction=False`.

        False for a network with batch normalization, in which the batch decides whether steps are turned.
        """
        if not self._turns or self._normalized or self.left_out:
            return False
        return any(group.get("direction", True) for group in self._inner.param_groups)

    @property
    def _turns(self) -> bool:
        return type(self._inner) is torch.optim.SGD

    def search(self) -> None:
        """Find embeddings and batch normalization if there are new parameters; all ranks must call this within a step.

        The optimizer calls this method in every step, also after a resume, so that all ranks know the modules before
        they compute a factor.
        """
        number = sum(len(group["params"]) for group in self._inner.param_groups)
        if self._turns and number != self._searched:
            self._find_modules([parameter for group in self._inner.param_groups for parameter in group["params"]])
            self._searched = number

    def plan(self, batch_size: float | None) -> tuple[int, ...]:
        """Choose the matrices to turn at this global batch size, after `search`.

        Returns the indices, among all parameters, of the matrices whose noise must be measured. They include matrices
        whose steps are too expensive to turn.
        """
        matrices = self._matrices()
        self._choose(matrices, batch_size)
        return tuple(matrix.index for matrix in matrices)

    def keeps(self, ratio: float) -> bool:
        """Return True if steps keep their directions at this B / b, because the network has batch normalization."""
        return self._normalized and ratio <= NORMALIZED_UP_TO

    def _choose(self, matrices: Sequence[_Matrix], batch_size: float | None) -> list[_Matrix]:
        host = all(matrix.parameter.is_cpu for matrix in matrices)
        chosen = affordable(tuple(matrix.shape for matrix in matrices), batch_size, host=host)
        self.left_out = len(matrices) - sum(chosen)
        return [matrix for matrix, use in zip(matrices, chosen, strict=True) if use]

    def turn(self, factor: float, noise: Mapping[int, float], batch_size: float | None) -> None:
        """Turn the step just taken, whose learning rates were multiplied by `factor`. `noise`: V by index, if known."""
        matrices = self._choose(self._matrices(), batch_size)
        if not matrices:
            return
        costs = tuple(matrix.shape.operations(host=matrix.parameter.is_cpu) for matrix in matrices)
        shares: list[list[_Matrix]] = [[] for _ in range(self._ranks.size)]
        for matrix, owner in zip(matrices, owners(costs, self._ranks.size), strict=True):
            shares[owner].append(matrix)
        # A script may step inside autocast, but the root cannot be computed in half precision.
        with torch.autocast(matrices[0].parameter.device.type, enabled=False):
            corrected = self._correct(shares[self._ranks.rank], factor, noise)
        if self._ranks.size > 1:
            corrected = self._exchange(shares, corrected)
        rates = {id(group): group["lr"] * factor for group in self._inner.param_groups}
        # w <- w - rate (D - U) turns the step taken along U into a step along D.
        foreach_subtract_(
            [matrix.parameter for matrix in matrices],
            [matrix.shaped(corrected[matrix.index]) for matrix in matrices],
            [rates[id(matrix.group)] for matrix in matrices],
        )

    def _matrices(self) -> list[_Matrix]:
        """Return all matrices of torch's own SGD, in the order of parameters; empty for other optimizers."""
        if not self._turns:
            return []
        places = [(group, parameter) for group in self._inner.param_groups for parameter in group["params"]]
        return [
            _Matrix(index, parameter, group, shape)
            for index, (group, parameter) in enumerate(places)
            if parameter.requires_grad and group.get("direction", True) and index not in self._tables
            if (shape := matrix_shape(parameter)) is not None
        ]

    def _find_modules(self, parameters: Sequence[torch.Tensor]) -> None:
        """Find embedding tables and batch normalization that at least one rank sees, since ranks may have different
        modules.

        This method computes a sum over ranks, so all ranks must call it in the same step.
        """
        flags = torch.tensor(weights_of(_SEARCHED_KINDS, parameters), dtype=torch.float32, device="cpu")
        found = self._ranks.sum_(flags.to(parameters[0].device)).tolist()
        owned = [place for place, ranks in enumerate(found) if ranks]
        self._tables = frozenset(place for place in owned if parameters[place].ndim >= 2)
        self._normalized = any(parameters[place].ndim == 1 for place in owned)

    def _correct(
        self, matrices: Sequence[_Matrix], factor: float, noise: Mapping[int, float]
    ) -> dict[int, torch.Tensor]:
        """Return D - U of each matrix, keyed by the matrix's index."""
        by_device: dict[torch.device, list[_Matrix]] = {}
        for matrix in sorted(matrices, key=lambda matrix: (matrix.shape.rows, matrix.shape.columns)):
            by_device.setdefault(matrix.parameter.device, []).append(matrix)
        corrected: dict[int, torch.Tensor] = {}
        for device, group in by_device.items():
            updates = [matrix.update(self._inner, factor) for matrix in group]
            levels = self._levels_on(device, [self._level(matrix, noise) for matrix in group])
            changes = corrections(updates, levels)
            corrected |= {matrix.index: change for matrix, change in zip(group, changes, strict=True)}
        return corrected

    def _levels_on(self, device: torch.device, levels: list[float]) -> torch.Tensor:
        """Return `levels` on `device`; reuse the previous step's tensor if no new measurement has arrived."""
        before, tensor = self._levels.get(device, ([], None))
        if tensor is None or before != levels:
            tensor = to_device(levels, torch.float32, device)
            self._levels[device] = levels, tensor
        return tensor

    def _level(self, matrix: _Matrix, noise: Mapping[int, float]) -> float:
        """Return nu of a matrix, or NaN if the matrix was added after the last measurement."""
        variance = noise.get(matrix.index, math.nan)
        return noise_level(variance, matrix.group["momentum"], matrix.shape.rows, self._damping)

    def _exchange(
        self, shares: Sequence[Sequence[_Matrix]], corrected: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the corrections of all ranks by index, identical on all ranks; `corrected` is this rank's
        contribution.
        """
        most = max(sum(matrix.parameter.numel() for matrix in share) for share in shares)
        own = [corrected[matrix.index].reshape(-1) for matrix in shares[self._ranks.rank]]
        device = shares[0][0].parameter.device
        parcel = torch.zeros(most, dtype=torch.bfloat16, device=device)
        if own:
            packed = torch.cat([piece.to(device) for piece in own])
            parcel[: len(packed)] = packed
        everything: dict[int, torch.Tensor] = {}
        for share, received in zip(shares, self._ranks.gather(parcel), strict=True):
            sizes = [matrix.parameter.numel() for matrix in share]
            pieces = torch.split(received[: sum(sizes)].float(), sizes)
            for matrix, piece in zip(share, pieces, strict=True):
                everything[matrix.index] = piece.to(matrix.parameter.device)
        return everything
