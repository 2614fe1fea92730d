"""Collectives of a Replicator, on pytrees of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from laconic.core import arguments
from laconic.replicator.differentiable import Group
from laconic.replicator.leaves import Pytree, flatten

Op = Literal["mean", "sum"]


class Collectives(ABC):
    """Collectives of the replicas in sync, which all make the same calls in the same order."""

    @property
    @abstractmethod
    def _collective_group(self) -> Group:
        """Replicas in sync."""

    @property
    def replica(self) -> int:
        """Number of this replica among those in sync."""
        return self._collective_group.comm.rank

    @property
    def replicas(self) -> int:
        """Number of replicas in sync."""
        return self._collective_group.comm.size

    def all_sum(self, tree: Pytree) -> Pytree:
        """Return the sum over replicas of each leaf; one message per dtype. Differentiable."""
        tensors, structure = flatten(tree)
        return structure.rebuilt(self._collective_group.sums(tensors, "all_sum({})", structure))

    def all_mean(self, tree: Pytree) -> Pytree:
        """Return the mean over replicas of each leaf, like `all_sum`."""
        tensors, structure = flatten(tree)
        sums = self._collective_group.sums(tensors, "all_mean({})", structure)
        return structure.rebuilt(each / self.replicas for each in sums)

    def all_gather(self, tree: Pytree) -> Pytree:
        """Return all replicas' rows of each leaf, in replica order; for 0-dim leaves a vector.

        Differentiable. The first dimension may differ between replicas.
        """
        tensors, structure = flatten(tree)
        return structure.rebuilt(self._collective_group.gathers(tensors, "all_gather({})", Kinds(tensors)))

    def broadcast(self, tree: Pytree, root: int = 0) -> Pytree:
        """Return the root's tensors. Differentiable: the root gets the sum of all gradients."""
        arguments.whole("root", root, 0, self.replicas - 1)
        tensors, structure = flatten(tree)
        sent = self._collective_group.broadcasts(tensors, root, "broadcast({}, root={})", structure, root)
        return structure.rebuilt(sent)

    def map_reduce(self, fn: Callable[..., Pytree], *arguments_: Any, op: Op = "mean") -> Pytree:
        """Return the mean or sum over replicas of `fn(*arguments_)`."""
        arguments.choice("op", op, get_args(Op))
        made = fn(*arguments_)
        return self.all_mean(made) if op == "mean" else self.all_sum(made)


class Kinds:
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tensors

    def __str__(self) -> str:
        pairs = ((str(each.dtype).removeprefix("torch."), tuple(each.shape[1:])) for each in self._tensors)
        return ", ".join(f"{dtype} (..., {shape})" for dtype, shape in pairs)
