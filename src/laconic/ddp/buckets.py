"""Communication hook of DistributedDataParallel: its buckets are jobs for the communication thread.

    loss.backward() -> hook(bucket): queues a job and returns a Future
                    -> the communication thread: Attached.mean_(bucket), over a separate process group
                    -> optimizer.step()

DDP regroups its buckets after the first step, so layouts are built by parameter name. All dtypes are
exchanged in float32.
"""

# no `from __future__ import annotations`: DDP reads the types of its hook
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket has no type
from torch.autograd import Variable

from laconic.comm.communication_thread import Answer, CommunicationThread
from laconic.core.errors import AttachError, LaconicError, PeerError
from laconic.core.layout import Layout
from laconic.ddp.bucket_layout import Bucket, layout_of
from laconic.ddp.gradient_watch import GradientWatch, LostGradientCheck
from laconic.ddp.optimiser import OptimiserHooks, Optimisers
from laconic.ddp.unused_parameters import Mean, UnusedParameters
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method
from laconic.exchange.rule import OptimiserView
from laconic.optim.stochastic_rounding import HALF
from laconic.reducers.sum import Sum

UNSTEPPED = "two exchanged backward passes without optimizer.step() between them"


class Buckets:
    """Queue of a model's buckets. `keep_means`: keep the means of parameters that no rank used."""

    def __init__(
        self,
        exchange: Attached,
        names: Mapping[Tensor, str],
        optimisers: Optimisers,
        scaler: torch.amp.GradScaler | None,
        *,
        keep_means: bool,
        joins: Callable[[], bool],
    ) -> None:
        self.per_step = 0
        self.exchange = exchange
        self._watch = GradientWatch(exchange.momentum.release)
        self.means: dict[str, Mean] = {}
        self._keep_means = keep_means
        self._joins = joins
        self.unused_parameters = UnusedParameters(names) if keep_means else None
        self._optimisers = optimisers
        self._float_means: dict[str, Mean] = {}  # for parameters in 16 bits
        self._thread = CommunicationThread(f"laconic rank {exchange.comm.rank}")
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._scaler = scaler
        self._scale = 1.0
        self._compresses = compresses(exchange.method)
        self._zeroed: LostGradientCheck | None = None
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._unnoted: list[Callable[[], None]] = []  # writes of means at the end

    @property
    def failure(self) -> BaseException | None:
        return self._thread.error

    def submit(self, bucket: Bucket) -> Answer:
        buffer, first, last = bucket.buffer(), bucket.index() == 0, bucket.is_last()
        self.per_step = bucket.index() + 1
        if first and self._zeroed is not None and self._zeroed.take_unstepped():
            self.exchange.momentum.release(UNSTEPPED, "accumulate under model.no_sync()")
        backward = in_backward()
        if last and self._zeroed is not None and backward:
            self._zeroed.pending = True  # not earlier: this pass was still adding gradients
        layout = None if buffer.is_sparse else self._layout_of(bucket, buffer)
        if self.unused_parameters is not None and layout is not None:
            self.unused_parameters.clear_stale_(buffer, layout)

        def job() -> Tensor:
            if first:
                self._scale = 1.0 if self._scaler is None else self._scaler.get_scale()  # waits for a GPU
                self.exchange.begin(agree_on=buffer.device if self._joins() else None)
                self.means.clear()
                self._float_means.clear()
                self._unnoted.clear()
            mean = self._mean_(buffer, layout, self._scale)
            if self._zeroed is not None and self.exchange.skip_reason is not None:
                self._zeroed.pending = False  # a skipped step leaves no residual
            if last:
                self.exchange.end()
                if not backward:
                    self.exchange.momentum.end_without_step()
                for note in self._unnoted:
                    note()
                self._unnoted.clear()
            return mean

        # on a CPU means are written at the end of the step
        answer = self._thread.submit(job, buffer.device, hold=buffer.is_cpu and not last)
        # raised here: DDP would raise a C++ error about a cast to a tensor
        if last and backward:
            Variable._execution_engine.queue_callback(partial(self._finish_backward, answer))
        return answer

    def wait(self, answer: Answer) -> None:
        self._thread.wait(answer)

    def _finish_backward(self, last: Answer) -> None:
        self._thread.wait(last)
        if self.unused_parameters is not None:  # after DDP's own callback, which writes gradients
            means = self.means if self.exchange.skip_reason is None else {}
            note = partial(self.unused_parameters.note, means, self._optimisers.lone())
            Variable._execution_engine.queue_callback(note)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        if self.exchange.holds_back:
            trained = [each for each in parameters if each.requires_grad]
            self._zeroed = LostGradientCheck(trained, repr(self.exchange.method))

    def keep_all_means(self, always: bool) -> None:
        self._keep_means = always or self.unused_parameters is not None

    def discard(self) -> None:
        self.means.clear()
        if self.unused_parameters is not None:
            self.unused_parameters.discard()
        self._stepped()

    def check(self) -> None:
        if self.failure is not None:
            raise PeerError(f"rank {self.exchange.comm.rank}: the exchange has failed: {self.failure}")

    def before_step(self, optimiser: OptimiserView, step: int) -> None:
        """Give unused parameters the mean of the residuals, masters the mean before rounding."""
        assert isinstance(optimiser, OptimiserHooks)
        if self.unused_parameters is not None:
            self.unused_parameters.give(optimiser, self._scale)
        for name in self._watch.noted():
            grad = optimiser.parameter(name).grad
            if grad is not None and optimiser.holds(name):
                self._watch.compare(name, grad, optimiser.scale)
        for name, mean in self._float_means.items():
            optimiser.refine(name, mean.view / mean.scale)
        self._stepped()

    def _stepped(self) -> None:
        if self._zeroed is not None:
            self._zeroed.pending = False

    def end(self, last: Callable[[], object] | None = None) -> None:
        self._unwatch()
        self._thread.end(last)

    def close(self) -> None:
        self._thread.close()
        self._unwatch()

    def _unwatch(self) -> None:
        for watch in (self._zeroed, self.unused_parameters):
            if watch is not None:
                watch.remove()

    def _layout_of(self, bucket: Bucket, buffer: Tensor) -> Layout:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        known = self._layouts.get(key)
        if known is None:
            if not self._names.keys() >= {*key}:
                raise AttachError(
                    "DistributedDataParallel exchanges a parameter that was frozen later, before compress,"
                    " and a sparse embedding: freeze before DistributedDataParallel(...), or call compress"
                    " after the first backward pass"
                )
            names = [self._names[each] for each in key]
            known = self._layouts[key] = layout_of(names, bucket)
        return known

    def _mean_(self, buffer: Tensor, layout: Layout | None, scale: float) -> Tensor:
        if layout is None:
            if buffer.is_cuda:  # autograd may free it while this stream reads it
                for part in (buffer._indices(), buffer._values()):
                    part.record_stream(torch.cuda.current_stream(buffer.device))
            return self.exchange.sparse_mean(buffer)
        flat = buffer if buffer.dtype == torch.float32 else buffer.to(torch.float32)
        wait = flat is buffer and flat.is_cpu
        finite = self.exchange.mean_(flat, layout, scale, wait=wait)
        if flat is not buffer:
            buffer.copy_(flat)
            if buffer.dtype in HALF and self._optimisers.have_masters():
                views = zip(layout.names, layout.segments.views(flat), strict=True)
                self._float_means |= {name: Mean(view, scale) for name, view in views}
            if finite and not bool(buffer.isfinite().all()):
                self.exchange.cancel(f"the mean of {layout.names[0]} does not fit into {buffer.dtype}")
                buffer.fill_(torch.nan)
        note = partial(self._note, buffer, flat, layout, scale, self.exchange.step)
        if wait:
            self._unnoted.append(note)
        else:
            note()
        return buffer

    def _note(self, buffer: Tensor, flat: Tensor, layout: Layout, scale: float, step: int) -> None:
        owned = self.exchange.momentum.names(step)
        self._watch.note(flat, layout, owned, scale, self._scaler is None and self._compresses)
        for entry in layout if self._keep_means else ():
            view = buffer[entry.offset : entry.offset + entry.numel]
            self.means[entry.name] = Mean(view, scale)


class Slot:
    """Queue of one DDP's buckets, if it is compressed. DDP accepts one hook, so the slot stays for life.

    A copied model has an empty one: it is a plain DDP.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.buckets: Buckets | None = None
        self._thread: CommunicationThread | None = None

    def __reduce__(self) -> "tuple[type[Slot], tuple[()]]":
        return Slot, ()

    def empty(self) -> None:
        self.buckets = None

    def mean(self, buffer: Tensor) -> Answer:
        """Return a Future of DDP's own mean.

        Our own thread waits: a callback of the work's future runs in gloo's thread, which may ask for the GIL
        after Python has ended.
        """
        buffer.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None

        def job() -> Tensor:
            work.wait()
            return buffer

        if self._thread is None:
            self._thread = CommunicationThread(f"plain all-reduce of rank {dist.get_rank(self.group)}")
        return self._thread.submit(job, buffer.device)


def hook(slot: Slot, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    if slot.buckets is None:
        return slot.mean(bucket.buffer())
    if bucket.buffer().is_cuda and torch.cuda.is_current_stream_capturing():
        raise LaconicError(
            "a CUDA graph cannot capture backward() of a model compressed with"
            f" {slot.buckets.exchange.method}: a thread exchanges its gradients, and a graph records only the"
            " calling thread. Call backward() outside of torch.cuda.graph(...), or the handle's remove()"
            " first"
        )
    return slot.buckets.submit(bucket)


def compresses(method: Method) -> bool:
    return any(
        not isinstance(route.reducer, Sum) or route.rule is not None or route.feedback.keeps_unsent
        for route in method.routes
    )


def in_backward() -> bool:
    """Return whether autograd runs: not in a Replicator's step, nor without inputs in Join."""
    return torch._C._current_graph_task_id() >= 0
