"""DDP's buckets as jobs: what dtype, which tensors, which step.

DDP hands its buckets over in index order, and regroups them after the first step; so a layout is read from
each new group of parameters, by name. Buckets of other dtypes than float32 are exchanged in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, where types see it

from laconic.core.layout import Entry, Layout
from laconic.strategies.exchange import Exchange
from laconic.strategies.fifo import Answer, Fifo
from laconic.strategies.watch import GradientWatch


@dataclass(frozen=True)
class Mean:
    """A tensor's mean as it lies in DDP's bucket, times the scaler's scale."""

    view: Tensor
    scale: float


class Buckets:
    """Turns each bucket of a backward pass into a job on one FIFO thread."""

    def __init__(
        self,
        exchange: Exchange,
        names: Mapping[Tensor, str],
        scaler: torch.amp.GradScaler | None,
        *,
        keep_means: bool,
    ) -> None:
        self.exchange = exchange
        self.watch = GradientWatch()
        self.means: dict[str, Mean] = {}  # of the present step, by tensor name, if they are kept
        self._keep_means = keep_means
        self.fifo = Fifo(f"laconic rank {exchange.comm.rank}")
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._scaler = scaler
        self._scale = 1.0
        self._unused = False  # whether the means of a backward pass wait for the optimiser
        self.cut = 0  # buckets of the present step so far
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def submit(self, bucket: GradBucket) -> Answer:
        """Queue one bucket; the Future will hold its mean."""
        buffer, first, last = bucket.buffer(), bucket.index() == 0, bucket.is_last()
        self.cut = bucket.index() + 1
        if first:
            self._check_stepped()
            self._scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        scale, layout = self._scale, None if buffer.is_sparse else self._layout_of(bucket, buffer)
        ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None

        def job() -> Tensor:
            if ready is not None:
                torch.cuda.current_stream(buffer.device).wait_event(ready)
            if first:
                self.exchange.begin()
                self.means.clear()
            mean = self._mean_(buffer, layout, scale)
            if last:
                self.exchange.end()
            return mean

        return self.fifo.submit(job, [buffer.device] if buffer.is_cuda else None)

    def stepped(self) -> None:
        """The optimiser has taken the present step: its means are used up."""
        self._unused = False
        self.means.clear()

    def _check_stepped(self) -> None:
        """Warn where a second backward pass would take what the first has sent for a gradient."""
        exchange = self.exchange
        if self._unused and exchange.void is None and exchange.owns_momentum(exchange.step - 1):
            warnings.warn(
                "two synchronised backward passes without optimizer.step() between them:"
                f" {exchange.method} would take the velocity that the first has sent for a gradient."
                " Accumulate under model.no_sync()",
                stacklevel=2,
            )
        self._unused = True

    def _layout_of(self, bucket: GradBucket, buffer: Tensor) -> Layout:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        known = self._layouts.get(key)
        if known is None:
            starts = [int(grad.storage_offset() - buffer.storage_offset()) for grad in bucket.gradients()]
            known = Layout(
                tuple(
                    Entry(self._names[id(parameter)], tuple(parameter.shape), start)
                    for parameter, start in zip(parameters, starts, strict=True)
                )
            )
            self._layouts[key] = known
        return known

    def _mean_(self, buffer: Tensor, layout: Layout | None, scale: float) -> Tensor:
        if layout is None:
            return self.exchange.sparse_mean(buffer)
        flat = buffer if buffer.dtype == torch.float32 else buffer.to(torch.float32)
        finite = self.exchange.mean_(flat, layout, scale)
        if flat is not buffer:
            buffer.copy_(flat)
            if finite and not bool(buffer.isfinite().all()):
                self.exchange.cancel(f"the mean of {layout.names[0]} does not fit into {buffer.dtype}")
                buffer.fill_(torch.nan)
        owned = self.exchange.owns_momentum(self.exchange.step)
        self.watch.note(flat, layout, owned, scale)
        for entry in layout if self._keep_means else ():
            view = buffer[entry.offset : entry.offset + entry.numel]
            self.means[entry.name] = Mean(view.view(entry.shape), scale)
        return buffer
