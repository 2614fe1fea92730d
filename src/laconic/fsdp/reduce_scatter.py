"""Compressed reduce-scatter of FSDP2: each rank's shard of the mean gradient.

FSDP2 passes flat chunks of a module: a codec sees one tensor. On a GPU the host reads all checks in one copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import kernels
from laconic.comm.metered import Metered
from laconic.comm.partition import Partition
from laconic.comm.skippable import NonFiniteSum, not_finite
from laconic.core import arguments
from laconic.core.deferred import check, deferred
from laconic.core.layout import Layout
from laconic.core.turn import Turn, mix
from laconic.core.warning import warn
from laconic.exchange.stopwatch import Seconds
from laconic.fsdp.backward import OverlappedExchanges
from laconic.fsdp.backward_pass import BackwardPass
from laconic.fsdp.chunks import Trained, chunks, factor, trained_suffix
from laconic.fsdp.memory import ShardMemory, identifies_tensors
from laconic.fsdp.models import default_collective, param_group_of, scatter_of, sharded_modules, trained_of
from laconic.fsdp.verdict import Verdict
from laconic.reducers.scatter_reduce import ScatterReduce


class Shards:
    def __init__(self, comm: Metered, seed: int) -> None:
        arguments.whole("seed", seed)
        self.comm = comm
        self.seed = seed
        self.step = 0
        self.dense_bytes = 0
        self.seconds = Seconds()


class MeanOverflow(Exception):
    """Mean that overflows on this rank's GPU."""


class Scatter:
    def __init__(
        self, reducer: ScatterReduce, model: nn.Module, shards: Shards, memory: ShardMemory | None = None
    ) -> None:
        self.reducer = reducer
        self.memory = memory
        self.shards = shards
        self.dense_bytes = self.made = 0  # number of reduce-scatters
        self.beside: OverlappedExchanges | None = None
        self.skipped = False  # equal on all ranks
        self._overflows = False  # not yet known to others
        self._pass = BackwardPass()
        self._detach: list[Callable[[], None]] = []
        self._verdict = Verdict(shards.comm.comm)
        self._bound = reducer.bind(Layout(()), shards.comm)
        self._before = {
            name: default_collective(name, scatter_of(module), ScatterMean, "reduce-scatter")
            for name, module in sharded_modules(model)
        }

    def attach(self, model: nn.Module) -> None:
        self.beside = OverlappedExchanges(f"shards of rank {self.shards.comm.rank}")
        self._detach.append(self._pass.watch(model).remove)
        for name, module in sharded_modules(model):
            scatter = ScatterMean(self, name, self._before[name], param_group_of(module))
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]

    def detach(self, model: nn.Module) -> None:
        for name, module in sharded_modules(model):
            if isinstance(scatter_of(module), ScatterMean):
                module.set_custom_reduce_scatter(self._before[name])
        for detach in self._detach:
            detach()
        self._detach.clear()
        if self.beside is not None:
            self.beside.close()

    @property
    def keeps(self) -> bool:
        return self.memory is not None

    @property
    def counts(self) -> dict[str, int]:
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.memory is None else self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        if self.memory is not None:
            self.memory.load_state_dict(state)

    def discard(self) -> None:
        if self.memory is not None:
            self.memory.load_state_dict({})

    def begins(self, group: Any) -> bool:
        if first := self._pass.enter(self._end):
            self._verdict.begin()
        if group is not None:
            self._verdict.add(group)
        return first

    def begin(self) -> None:
        self.skipped = self._overflows = False
        if self.memory is not None:
            self.memory.begin()

    def note(self, output: Tensor) -> None:
        """Check that this mean fits its dtype; on a GPU `mean` has."""
        if output.is_cpu and not self._overflows:
            self._overflows = not bool(output.isfinite().all())

    def skip(self) -> None:
        self.skipped = True
        if self.memory is not None:
            self.memory.put_back()

    def _end(self) -> None:
        def agree() -> None:
            if not self.skipped and self._verdict.is_skipped(self._overflows):
                self.skip()
            if self.memory is not None:
                self.memory.settle()

        if self._verdict.device.type == "cpu":
            assert self.beside is not None
            self.beside.finish(agree)
        elif self.memory is not None:  # without memory, do not wait for the GPU
            agree()
        if self.skipped:
            self._verdict.set_nan()
        self._verdict.begin()  # free the references to modules

    def mean(
        self, x: Tensor, partition: Partition, module: str, call: int = 0, remembers: bool = True
    ) -> Tensor | None:
        """Return this rank's chunk of the mean of flat x, float32; None if x is not finite on some rank.

        May overwrite x. `call`: number of earlier calls in this step, which seeds rounding. `remembers`: x
        has a residual.
        """
        began = time.perf_counter()
        shards, comm = self.shards, self.shards.comm
        self.made += 1
        comm.mark()
        memory, left = self.memory if remembers else None, None
        turn = Turn(shards.step, comm.rank, mix(shards.seed, call) if call else shards.seed)
        mean: Tensor | None = None
        try:
            with comm.phase(repr(self.reducer)), deferred():
                if memory is not None:
                    memory.add_to_(x, module)
                finite = self._is_finite(x, partition)
                mean, sent = self._bound.scatter(x if finite else None, partition, turn, x)
                if memory is not None and sent is not None:
                    left = memory.encoded(x, sent)
                    if mean is not None and mean.numel() and not mean.is_cpu:
                        check(not_finite(mean), lambda _: MeanOverflow())
        except NonFiniteSum:
            mean = left = None
        except MeanOverflow:  # the others receive the flag at the end
            self._overflows, left = True, None
        if memory is not None and left is not None:
            memory.keep(left, x.numel(), module)
        self.dense_bytes += comm.dense_scattered(4 * x.numel())
        shards.seconds.add(began, time.perf_counter(), *comm.since_mark())
        return mean

    def _is_finite(self, x: Tensor, partition: Partition) -> bool:
        """Return whether x is finite.

        On a GPU x is made finite instead, and a deferred flag of all ranks raises `NonFiniteSum`.
        """
        if x.is_cpu:
            return kernels.all_finite(x, partition.bucket.segments)
        flag = not_finite(x) if len(x) else torch.zeros(1, dtype=torch.int32, device=x.device)
        check(self.shards.comm.all_reduce(flag, "max"), lambda _: NonFiniteSum())
        x.nan_to_num_(0.0, 0.0, 0.0)
        return True


class ScatterMean:
    def __init__(self, scatter: Scatter, module: str, before: object = None, group: Any = None) -> None:
        self.before = before
        self._group = group
        self._scatter = scatter
        self._module, self._name = module, f"shards of {module}"
        self._partitions: dict[int, Partition] = {}
        self._sets: dict[tuple[int, Trained], bool] = {}
        self._step, self._call = -1, 0  # each micro-batch of a step is one call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write `op` over ranks of this rank's chunk of input (size * m,) to output (m,), maybe as NaN."""
        shards = self._scatter.shards
        gain = factor(op, shards.comm.size)
        n = input_tensor.numel()
        if n not in self._partitions:
            self._partitions[n] = chunks(self._name, n, shards.comm.rank, shards.comm.size)
        self._step, self._call = shards.step, self._call + 1 if self._step == shards.step else 0
        call, partition = self._call, self._partitions[n]
        trained = () if self._group is None else trained_of(self._group)
        remembers, whose = self._remembers(n, trained), f"{self._module}{trained_suffix(trained)}"

        first = self._scatter.begins(self._group)

        def job() -> None:
            scatter = self._scatter
            if first:
                scatter.begin()
            mean = None
            if not scatter.skipped:
                mean = scatter.mean(input_tensor.to(torch.float32), partition, whose, call, remembers)
            if mean is None:
                scatter.skip()
                output_tensor.fill_(torch.nan)
            else:
                scatter.note(output_tensor.copy_(mean.mul_(gain)))

        if self._scatter.beside is None:
            job()
        else:
            self._scatter.beside.fill(output_tensor, job, self._group)
        return None

    def _remembers(self, n: int, trained: Trained) -> bool:
        """Return whether n elements always belong to the same parameters, as a residual requires."""
        if self._scatter.memory is None or self._group is None:
            return True
        if (n, trained) not in self._sets:
            size, parts = self._scatter.shards.comm.size, self._group.fsdp_params
            able = (part for part, can in zip(parts, trained, strict=True) if can)
            sizes = [size * part.padded_sharded_param_size.numel() for part in able]
            self._sets[n, trained] = identifies_tensors(n, sizes)
            if not self._sets[n, trained]:
                warn(
                    f"{self._module or 'the model'} has gradients for {n:,} of {sum(sizes):,} elements in a"
                    " step, and several sets of its parameters have so many: nothing is kept of what is not"
                    " sent then. Shard what is used by turns as modules of their own",
                )
        return self._sets[n, trained]
