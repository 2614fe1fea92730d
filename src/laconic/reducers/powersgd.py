"""PowerSGD: the mean gradient of a layer as a product of two thin matrices, each summed over the ranks.

Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727, Algorithms 1 and 2. For each tensor of two or more
dimensions, as a matrix M of m = shape[0] rows and n columns, with ranks i = 0..N-1 and the last Q (n, r):

    1. P = sum over i of M_i Q        one all_reduce of the P of all matrices
    2. P = orthonormal(P)             Gram-Schmidt
    3. Q_i = M_i^T P                  Q = 1/N * sum over i of Q_i: one all_reduce of all Q_i
    4. mean = P Q^T                   rank i's share: P Q_i^T = P P^T M_i
    5. Q = orthonormal(Q)             for the next step: one subspace iteration per step

A zero column of Q is redrawn from the common key of (seed, step, name): Gram-Schmidt would leave it zero, or
NaN, for ever.

Differences from the paper. Each rank subtracts P Q_i^T from its error memory, the paper subtracts P Q^T: its
memory accumulates P (Q_i - Q)^T for ever; here |M_i - P P^T M_i| <= |M_i|. Q is orthonormalised (as in
PyTorch's hook).

Replicas agree to the bit on all CPUs (see `kernels.lowrank`), and on GPUs of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.comm.skippable import LARGEST, fits, largest_of, sum_or_skip, sum_unchecked
from laconic.core import arguments, deferred
from laconic.core.layout import Entry, Layout, PerLayout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.feedback.memory import Memory, Pending
from laconic.kernels.lowrank.matrices import MOST
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.sum import DenseShare


@dataclass(frozen=True, repr=False)
class PowerSGD(Reducer):
    """mean = P Q^T with `rank` columns: the part of the mean gradient in the space that P spans.

    A matrix is summed exactly if (m + n) * rank >= m * n, as are tensors of fewer than two dimensions.
    Rank 2 loses more (docs/own_rates.md).
    Payload: 4 * (m + n) * rank bytes per matrix, in two all-reduces, and 4 per element of the rest. State: Q,
    float32 (rank, n) per matrix, equal on all ranks. Error: |x - sent| <= |x|.

    >>> from laconic.core.layout import Layout
    >>> PowerSGD(rank=2).nbytes(Layout.of([("weight", (100, 10, 5)), ("bias", (100,))]))
    1600
    """

    rank: int = 4

    paper: ClassVar[str] = "Vogels et al. 2019, arXiv:1905.13727"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "epfml/powersgd"
    examples: ClassVar[tuple[str, ...]] = ("powersgd(rank=2)", "powersgd(rank=1)", "powersgd(rank=4)")

    def __post_init__(self) -> None:
        arguments.whole("powersgd: rank", self.rank, 1, MOST)

    @property
    def needs_feedback(self) -> bool:
        return True

    @property
    def local_momentum(self) -> bool:
        """False: local momentum gains nothing."""
        return False

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _PowerSGD(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        return 4 * max(1, sum(self.sent_of(entry) for entry in layout))

    def sent_of(self, entry: Entry) -> int:
        m, n = as_matrix(entry)
        return min(entry.numel, (m + n) * self.rank) if len(entry.shape) > 1 else entry.numel

    def pays(self, entry: Entry) -> bool:
        return self.sent_of(entry) < entry.numel


def as_matrix(entry: Entry) -> tuple[int, int]:
    rows = entry.shape[0] if entry.shape else 1
    return rows, entry.numel // rows if rows else 0


@dataclass(frozen=True)
class LowRank(Sent):
    """Share as factors, left (m, r) and right (n, r) of each matrix, and the exactly summed rest."""

    matrices: kernels.Matrices
    left: Tensor
    right: Tensor
    rest: DenseShare | None

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        if self.rest is not None:
            self.rest.add_to_(x, alpha)
        return kernels.product_add_(x, self.matrices, self.left, self.right, alpha)

    def clear_(self, memory: Tensor) -> Tensor:
        if self.rest is not None:
            self.rest.clear_(memory)
        return self.matrices.segments.zero_(memory)


@dataclass(frozen=True)
class Factored:
    matrices: kernels.Matrices
    right: Layout  # of consecutive factors Q, each (rank, n)
    columns: Segments  # of each factor
    rest: Segments

    @classmethod
    def of(cls, bucket: Layout, spec: PowerSGD) -> Factored:
        """Split the tensors. Matrices of one shape are adjacent."""
        low = sorted((entry for entry in bucket if spec.pays(entry)), key=as_matrix)
        rows, cols = tuple(as_matrix(entry)[0] for entry in low), tuple(as_matrix(entry)[1] for entry in low)
        return cls(
            kernels.Matrices(tuple(entry.offset for entry in low), rows, cols, spec.rank),
            Layout.of((entry.name, (spec.rank, n)) for entry, n in zip(low, cols, strict=True)),
            Segments.consecutive(n for n in cols for _ in range(spec.rank)),
            bucket.where(lambda entry: not spec.pays(entry)).segments.merged,
        )


class _PowerSGD(BoundReducer):
    def __init__(self, spec: PowerSGD, layout: Layout, comm: Comm) -> None:
        self._spec = spec
        self._comm = comm
        self._factored = PerLayout(lambda bucket: Factored.of(bucket, spec))
        low = ((entry.name, (spec.rank, as_matrix(entry)[1])) for entry in layout if spec.pays(entry))
        self._right = Memory("once/power", Layout.of(low))
        self._pending = Pending(self._finish)
        self._whole: dict[int, bool] = {}  # by id of a bucket's Factored: no column of Q is zero

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        self._pending.finish_before(turn.step)
        factored, size = self._factored(layout), self._comm.size
        matrices, rest = factored.matrices, factored.rest
        own, kept = None, None
        if x is not None:
            left = kernels.times(x, matrices, self._begin(factored, turn, x.device))
            own = torch.cat([left, *rest.views(x)])
            kept = (
                own[matrices.left :].clone() if rest.numel and (x is not out or deferred.is_late()) else None
            )
        sums = self._sum(own, matrices.left + rest.numel, out)
        if sums is None or (x is None and out.is_cpu):
            return None
        left = kernels.orthonormal_(sums[: matrices.left], matrices.rank, matrices.rows)
        share = None if x is None else kernels.transposed_times(x, matrices, left)
        right = None
        if matrices.right:
            going = None if share is None else share.clone()
            right = self._sum(going, matrices.right, out)
            if right is None:
                return None
        if x is None or share is None:
            return None
        if out.is_cpu and not self._fits(sums[matrices.left :], right, alpha / size):
            return None
        largest = [] if out.is_cpu else self._largest(sums[matrices.left :], right)
        if right is not None:
            factors = left, right.clone() if deferred.is_late() else right

            def product() -> None:
                matrices.segments.zero_(out)
                kernels.product_add_(out, matrices, *factors, alpha / size)

            deferred.write(product)
            kernels.orthonormal_(right, matrices.rank, matrices.cols)
        if not out.is_cpu and not self._found_finite(factored, largest, right, alpha / size):
            return None
        if right is not None:
            self._pending.add(right, factored.right, turn.step)
        if rest.numel:
            mean = sums[matrices.left :] * (alpha / size)
            deferred.write(lambda: torch._foreach_copy_(rest.views(out), torch.split(mean, list(rest.sizes))))
        return LowRank(matrices, left, share, DenseShare(rest, kept, 1.0) if rest.numel else None)

    def _fits(self, rest: Tensor, right: Tensor | None, alpha: float) -> bool:
        """Return whether the mean is certainly finite: columns of P have length 1."""
        return fits([rest], alpha) and (right is None or fits([right], alpha * self._spec.rank))

    def writes_late(self, step: int) -> bool:
        return True

    @property
    def checks_mean(self) -> bool:
        return True

    def _sum(self, x: Tensor | None, n: int, out: Tensor) -> Tensor | None:
        return (sum_or_skip if out.is_cpu else sum_unchecked)(self._comm, x, n, out.device)

    def _largest(self, rest: Tensor, right: Tensor | None) -> list[Tensor]:
        return [largest_of([each]) for each in (rest, right) if each is not None and each.numel()]

    def _found_finite(
        self, factored: Factored, largest: list[Tensor], right: Tensor | None, alpha: float
    ) -> bool:
        """Return whether the mean on a GPU is finite: the host's only wait.

        `right`: columns of length 1, or 0 if they must be redrawn.
        """
        found = [*largest]
        if right is not None:
            found.append(torch.linalg.vector_norm(right, dtype=torch.float64).reshape(1))
        read = torch.cat(found).tolist()
        if right is not None:
            self._whole[id(factored)] = read[-1] ** 2 > len(factored.columns) - 0.5
        bounds = read[: len(largest)]
        return all(map(math.isfinite, read)) and all(
            each * abs(alpha) * self._spec.rank < LARGEST for each in bounds
        )

    def _begin(self, factored: Factored, turn: Turn, device: torch.device) -> Tensor:
        """Return the last Q, float32 (matrices.right,), with zero columns redrawn. Do not modify it."""
        held = self._right.flat(factored.right, device)
        if not held.numel() or self._whole.get(id(factored), False):
            return held
        right = held.to("cpu", copy=True)
        spent = kernels.norms(right, factored.columns) == 0
        names = [name for name in factored.right.names for _ in range(self._spec.rank)]
        views = factored.columns.views(right)
        for i in spent.nonzero().flatten().tolist():
            key, n = turn.common(names[i]), views[i].numel()
            drawn = kernels.uniform(key, n, i % self._spec.rank * n, right.device)
            views[i].copy_(drawn).mul_(2).sub_(1)
        return right.to(device)

    def _finish(self, right: Tensor, layout: Layout) -> None:
        self._right.held(layout).copy_(right)

    def put_back(self, layout: Layout) -> None:
        factored = self._factored(layout)
        self._pending.drop(factored.right)
        self._whole.pop(id(factored), None)

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        return self._right.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._right.check(state)
        self._pending.finish_all()
        self._right.load_state_dict(state)
        self._whole.clear()
