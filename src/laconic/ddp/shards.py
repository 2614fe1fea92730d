"""FSDP2's reduce-scatter with few bits: each rank's shard of the mean gradient.

FSDP2 calls it once per module, on the autograd thread, with the module's gradients as one flat chunk per
rank, without names. So a codec sees a chunk as one tensor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.comm.metered import Metered
from laconic.comm.partition import Partition, piece
from laconic.core.errors import AttachError
from laconic.core.layout import Entry, Layout
from laconic.core.turn import Turn, mix
from laconic.ddp.shard_memory import ShardMemory
from laconic.exchange.stats import Seconds
from laconic.reducers.scatter_reduce import ScatterReduce


class Shards:
    """What the modules of one model share: reduction, group, step, statistics; and `memory`, or None."""

    def __init__(
        self, reducer: ScatterReduce, comm: Metered, seed: int, memory: ShardMemory | None = None
    ) -> None:
        self.reducer = reducer
        self.memory = memory
        self.bound = reducer.bind(Layout(()), comm)
        self.comm = comm
        self.seed = seed
        self.step = 0
        self.dense_bytes = 0
        self.seconds = Seconds()

    def mean(self, x: Tensor, partition: Partition, module: str, call: int = 0) -> Tensor | None:
        """This rank's chunk of the mean of flat x, float32; None if x is not finite on some rank.

        With a memory x is overwritten. `call`: the number of earlier calls in this step; each call rounds by
        its own keys.
        """
        began = time.perf_counter()
        self.comm.mark()
        if self.memory is not None:
            self.memory.add_to_(x, module)
        finite = kernels.all_finite(x, partition.bucket.segments)
        turn = Turn(self.step, self.comm.rank, mix(self.seed, call) if call else self.seed)
        with self.comm.phase(repr(self.reducer)):
            mean, sent = self.bound.scatter(x if finite else None, partition, turn, x)
        if self.memory is not None and sent is not None:
            self.memory.keep(x, sent, module)
        self.dense_bytes += self.comm.dense_scattered(4 * x.numel())
        self.seconds.add(began, time.perf_counter(), *self.comm.since_mark())
        return mean


class ScatterMean:
    """The reduce-scatter of one module, as `torch.distributed.fsdp` calls it. It replaces `before`."""

    def __init__(self, shards: Shards, module: str, before: object = None) -> None:
        self.before = before
        self._shards = shards
        self._module, self._name = module, f"shards of {module}"
        self._partitions: dict[int, Partition] = {}  # by elements: parameters without a gradient are left out
        self._step, self._call = -1, 0  # of the last call; each micro-batch of a step makes one

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for the input or the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """output (m,) = `op` over ranks of this rank's chunk of input (size * m,); NaN if not finite."""
        shards = self._shards
        gain = factor(op, shards.comm.size)
        n = input_tensor.numel()
        if n not in self._partitions:
            self._partitions[n] = chunks(self._name, n, shards.comm.rank, shards.comm.size)
        self._step, self._call = shards.step, self._call + 1 if self._step == shards.step else 0
        x = input_tensor.to(torch.float32)
        mean = shards.mean(x, self._partitions[n], self._module, self._call)
        if mean is None:
            output_tensor.fill_(torch.nan)
        else:
            output_tensor.copy_(mean.mul_(gain))
        return None


def factor(op: Any, size: int) -> float:
    """The factor of the mean. Raises `AttachError` if `op` is neither a mean nor a sum."""
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(size)
    raise AttachError(
        f"a compressed reduce-scatter makes means and sums, not {op}: after set_gradient_divide_factor(...)"
        " call set_force_sum_reduction_for_comms(True)"
    )


def chunks(name: str, n: int, rank: int, size: int) -> Partition:
    """n elements in equal chunks, one per rank."""
    whole = Entry(name, (n,), 0)
    each = n // size
    parts = (Layout((piece(whole, each * r, each * (r + 1)),) if each else ()) for r in range(size))
    return Partition.of(Layout((whole,)), parts, rank)


def own_of(module: str, found: Any, ours: type[Any], what: str) -> Any:
    """FSDP's own collective of a module, of which `found` is in use, and `ours` is what we put there.

    Raises:
        AttachError: The user has set another.
    """
    if isinstance(found, ours):  # of a handle that is gone, and was not removed
        return found.before
    if not type(found).__module__.startswith("torch."):
        raise AttachError(
            f"{module or 'the model'} has a custom {what} already, {type(found).__name__}, and takes one:"
            " shard a new model without it"
        )
    return found
