"""DistributedDataParallel of torchft (github.com/meta-pytorch/torchft) with compressed gradients.

    zero_grad() -> the manager starts a quorum; replicas that fell behind load another's model
    backward    -> the communication thread waits for the quorum, then TransactionalExchange.mean_(bucket)
    step()      -> should_commit: if a replica failed, the step is discarded

Errors in an exchange are reported to the manager and not raised.
"""

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torchft
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's, where types see it
from torch.autograd import Variable

from laconic.comm.communication_thread import Answer, CommunicationThread, drop_traceback
from laconic.core.errors import AttachError, NonFiniteError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.ddp.attach import sparse_embeddings, trained
from laconic.ddp.bucket_layout import layout_of, real_shape
from laconic.ddp.unused_parameters import Mean, UnusedParameters
from laconic.exchange.gathers import expensive_gathers
from laconic.exchange.method import lift
from laconic.exchange.state import RankState
from laconic.exchange.stats import Stats
from laconic.integrations.replica_comm import ReplicaComm
from laconic.integrations.transactional import TransactionalExchange

log = logging.getLogger("laconic")


class Every:
    def trains(self, name: str) -> bool:
        return True


EVERY = Every()


@outside_inference_mode("stats", "state_dict", "load_state_dict")
class ReplicaHandle:
    """Handle of a compressed replica."""

    def __init__(self, manager: torchft.Manager, module: nn.Module, spec: Any, seed: int) -> None:
        self._manager = manager
        self._group = gloo_of(manager)
        if sparse_embeddings(module):
            raise AttachError(
                "an embedding has sparse=True, and replicas send dense gradients: use sparse=False"
            )
        self._names = {id(parameter): name for parameter, name in trained(module).items()}
        layout = Layout.of((name, real_shape(parameter)) for parameter, name in trained(module).items())
        self._exchange = TransactionalExchange(lift(spec), layout, seed)
        self._unused_parameters = UnusedParameters(trained(module))
        self._means: dict[str, Mean] = {}
        self._thread = CommunicationThread("laconic replica")
        self._quorum: int | None = None

    def __repr__(self) -> str:
        return f"<{self._exchange.method} on {self._exchange.layout.numel:,} elements of a replica>"

    def stats(self) -> Stats:
        """Return bytes and seconds of this replica, including discarded steps."""
        return self._exchange.stats()

    def state_dict(self) -> RankState:
        """Return this replica's state between steps, for `torch.load(weights_only=True)`.

        Raises `StateError` before the first step.
        """
        return self._exchange.state_dict(self._manager.current_step())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. When other replicas rejoin, each gets the mean of all.

        Raises `StateError` after a step, and for a different model, method or seed.
        """
        self._exchange.load_state_dict(state)

    def hook(self, manager: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, first, last = bucket.buffer(), bucket.index() == 0, bucket.is_last()
        layout = layout_of([self._names[id(each)] for each in bucket.parameters()], bucket)
        self._unused_parameters.clear_stale_(buffer, layout)
        if first:
            self._means.clear()
        for entry, view in zip(layout, layout.segments.views(buffer), strict=True):
            self._means[entry.name] = Mean(view, 1.0)

        def job() -> Tensor:
            self._manager.wait_quorum()
            if self._manager.errored() is None:
                try:
                    self._mean_(buffer, layout, first, last)
                except Exception as error:
                    log.warning("step %d is discarded: %s", self._manager.current_step(), error)
                    self._manager.report_error(error)
                    drop_traceback(error)
            return buffer

        answer = self._thread.submit(job, buffer.device)
        if last:  # DDP would raise again, as a C++ error about a cast
            Variable._execution_engine.queue_callback(partial(self._finish_backward, answer))
        return answer

    def _finish_backward(self, last: Answer) -> None:
        self._thread.wait(last)
        means = self._means if self._manager.errored() is None else {}
        # after DDP's callback, which writes no gradients for unused parameters
        Variable._execution_engine.queue_callback(partial(self._unused_parameters.note, means, EVERY))

    def end(self) -> None:
        self._unused_parameters.remove()
        self._thread.end()

    def _mean_(self, buffer: Tensor, layout: Layout, first: bool, last: bool) -> None:
        manager, exchange = self._manager, self._exchange
        takes_part = manager.is_participating()
        if first:
            same, self._quorum = manager._quorum_id == self._quorum, manager._quorum_id
            if not same:  # logged, as a thread's warning has no line
                for text in expensive_gathers(exchange.method, exchange.layout, self._group.size()):
                    log.warning("%s", text)
            group = None if same else ReplicaComm(self._group)
            exchange.begin(manager.current_step(), group, behind=not takes_part)
        flat = buffer.to(torch.float32)
        if takes_part:  # others have no gradient but are counted: memories add up to a mean over all
            flat.mul_(self._group.size() / manager.num_participants())
        else:
            flat.zero_()
        at_fault = exchange.mean_(flat, layout)
        if flat is not buffer:
            buffer.copy_(flat)
            if at_fault is None and not bool(buffer.isfinite().all()):
                at_fault = f"the mean of {layout.names[0]} does not fit into {buffer.dtype}"
        if at_fault is not None:
            raise NonFiniteError(f"the gradients are not finite: {at_fault}")
        if last:
            exchange.end()


class TorchftDDP(torchft.DistributedDataParallel):
    """DistributedDataParallel of torchft, with gradients exchanged by a method.

    A step that is not committed does not change the method's memory. When replicas join or leave, each
    remaining one starts with the mean of the remaining memories.

    Attributes:
        handle: Statistics and state: `model.handle.stats().ratio`.

    Args:
        manager: The replica's Manager, on a `ProcessGroupGloo`.
        module: The model. No gradient may be sparse.
        spec: A string such as "cgx(bits=4)", or a parsed spec; equal on all replicas.
        seed: Seed of sampling and stochastic rounding; equal on all replicas.
        options: Those of `DistributedDataParallel` except `process_group` and `find_unused_parameters`.

    Raises:
        AttachError: The process group is of another type, a gradient is sparse, or the method changes the
            optimiser's step.
        SpecError: The spec is invalid.
    """

    def __init__(
        self, manager: torchft.Manager, module: nn.Module, spec: Any, *, seed: int = 0, **options: Any
    ) -> None:
        handle = ReplicaHandle(manager, module, spec, seed)
        self._comm_hook = handle.hook  # torchft's constructor registers this attribute
        super().__init__(manager, module, **options)
        self.handle = handle
        weakref.finalize(self, handle.end).atexit = False


def gloo_of(manager: torchft.Manager) -> torchft.ProcessGroupGloo:
    group = manager._pg
    if not isinstance(group, torchft.ProcessGroupGloo):
        raise AttachError(
            f"the manager's process group is {type(group).__name__}, and messages of a method need"
            " ProcessGroupGloo, which copies GPU tensors via the host: pass that to the Manager"
        )
    return group
