"""Meetings: the collectives of a Replicator, on pytrees of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from laconic.core import arguments
from laconic.replicator.collectives import Group
from laconic.replicator.leaves import Pytree, flatten

Op = Literal["mean", "sum"]


class Meetings(ABC):
    """What replicas in sync do together. All make the same calls, in one order."""

    @property
    @abstractmethod
    def _meets(self) -> Group:
        """The replicas in sync with this one."""

    @property
    def replica(self) -> int:
        """This replica's number among those in sync."""
        return self._meets.comm.rank

    @property
    def replicas(self) -> int:
        """How many are in sync."""
        return self._meets.comm.size

    def all_sum(self, tree: Pytree) -> Pytree:
        """The sum over replicas of each leaf of a pytree. One message a dtype; differentiable."""
        tensors, structure = flatten(tree)
        return structure.rebuilt(self._meets.sums(tensors, "all_sum({})", structure))

    def all_mean(self, tree: Pytree) -> Pytree:
        """The mean over replicas of each leaf of a pytree. One message a dtype; differentiable."""
        tensors, structure = flatten(tree)
        sums = self._meets.sums(tensors, "all_mean({})", structure)
        return structure.rebuilt(each / self.replicas for each in sums)

    def all_gather(self, tree: Pytree) -> Pytree:
        """All replicas' rows of each leaf, in replica order; of a 0-dim one a vector. Differentiable.

        The first dimension may differ between replicas.
        """
        tensors, structure = flatten(tree)
        return structure.rebuilt(self._meets.gathers(tensors, "all_gather({})", Kinds(tensors)))

    def broadcast(self, tree: Pytree, root: int = 0) -> Pytree:
        """The root's tensors on every replica. Differentiable: the root gets the sum of all gradients."""
        arguments.whole("root", root, 0, self.replicas - 1)
        tensors, structure = flatten(tree)
        sent = self._meets.broadcasts(tensors, root, "broadcast({}, root={})", structure, root)
        return structure.rebuilt(sent)

    def map_reduce(self, fn: Callable[..., Pytree], *arguments_: Any, op: Op = "mean") -> Pytree:
        """`fn(*arguments_)` on every replica, and the "mean" (default) or "sum" of what they return."""
        arguments.choice("op", op, get_args(Op))
        made = fn(*arguments_)
        return self.all_mean(made) if op == "mean" else self.all_sum(made)


class Kinds:
    """Dtypes and shapes of tensors without the first dimension, in which replicas may differ, as text."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tensors

    def __str__(self) -> str:
        pairs = ((str(each.dtype).removeprefix("torch."), tuple(each.shape[1:])) for each in self._tensors)
        return ", ".join(f"{dtype} (..., {shape})" for dtype, shape in pairs)
