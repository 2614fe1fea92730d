"""Replicator: run a script written for one device in a deployment named by a string.

Buchlovsky et al. 2019, arXiv:1902.00465 (TF-Replicator): a reconstruction from the abstract and TensorFlow's
RFC 20181016, as its code is not public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import AttachError, DataError, SpecError
from laconic.core.warning import warn
from laconic.optim.unwrapping import unwrap
from laconic.replicator.averaging import Averaging
from laconic.replicator.collectives import Collectives
from laconic.replicator.deployment import LaunchOptions, RankContext, deployment_of
from laconic.replicator.differentiable import Group
from laconic.replicator.inputs import PER_WORKER, InputFn, Replication, inputs
from laconic.replicator.optimizer import ReplicatedOptimizer
from laconic.replicator.order import END, CheckedOrder, Order
from laconic.replicator.stats import ReplicatorStats
from laconic.replicator.wrapping import check_name, make_controller

T = TypeVar("T")


class Replicator(Collectives):
    """One replica of a script in a deployment; `launch` runs all replicas of the deployment.

    Every replica makes the same calls in the same order. Collectives, and the split of a batch, cover the
    replicas in sync: all in "sync" and "local", those of a group in "groups", one in "single" and "async".
    Tensors in collectives have equal shapes, except the first dimension in `all_gather`.

    >>> import torch
    >>> def main(replicator):
    ...     x = torch.tensor(1.0 + replicator.replica, requires_grad=True)
    ...     replicator.all_sum({"x": x * x})["x"].backward()
    ...     return x.grad.item()
    >>> Replicator("local(replicas=2)").launch(main)
    [4.0, 8.0]

    Args:
        spec: "single" (default), "sync", "async", "groups(size=4)" or "local(replicas=4)". All except
            "single" and "local" need torchrun, or a joined process group.
        debug: Compare each collective across replicas, and raise `PeerError` at the first difference instead
            of a deadlock; costs 8 bytes and a round trip. Default: False.
        timeout_s: Seconds that a replica waits in one collective; default: 1800.
        devices: Devices per replica, for a model that spans several; default: 1.
        checkpoints: Folder of the servers' checkpoints, loaded on a restart; default: none.
        checkpoint_every: Updates between checkpoints of a server; default: 100.

    Raises:
        SpecError: The spec, or a number, is wrong.
    """

    def __init__(
        self,
        spec: Any = "single",
        *,
        debug: bool = False,
        timeout_s: float = 1800.0,
        devices: int = 1,
        checkpoints: Path | str | None = None,
        checkpoint_every: int = 100,
    ) -> None:
        self.deployment = deployment_of(spec)
        arguments.flag("debug", debug)
        arguments.number("timeout_s", timeout_s, above=0)
        arguments.whole("devices", devices, 1)
        arguments.whole("checkpoint_every", checkpoint_every, 1)
        folder = None if checkpoints is None else Path(checkpoints)
        self._debug, self._devices = debug, devices
        self._options = LaunchOptions(timeout_s, folder, checkpoint_every)
        self._rank_context: RankContext | None = None
        self._close: Callable[[], object] = lambda: None
        self._group: Group | None = None
        self._optimizers: dict[str, ReplicatedOptimizer] = {}

    def __repr__(self) -> str:
        return f"<Replicator {self.deployment!r}>"

    def launch(self, main: Callable[[Replicator], T]) -> list[T]:
        """Run `main(replicator)` once for each replica of this process.

        Args:
            main: The script of one replica, which builds its model, optimisers and input.

        Returns:
            The results of this process's replicas; none on a server.

        Raises:
            PeerError: Another replica or a server has failed, or replicas differ (`debug`).
        """
        if self._rank_context is not None:
            raise AttachError("this Replicator is running already: launch another one")

        def play(seat: RankContext) -> T:
            replica = Replicator(self.deployment, debug=self._debug, devices=self._devices)
            replica._options = self._options
            replica._attach(seat)
            try:
                result = main(replica)
                replica._order.check(END)
            finally:
                replica._end()
            return result

        return self.deployment.launch(play, self._options)

    def close(self) -> None:
        """Leave the process group of a Replicator used without `launch`."""
        self._end()
        close, self._close, self._rank_context = self._close, lambda: None, None
        close()

    def _end(self) -> None:
        for each in self._optimizers.values():
            if isinstance(each.controller, Averaging):
                each.controller.end()
        self._optimizers = {}

    def _attach(self, seat: RankContext) -> None:
        self._rank_context = seat
        order = CheckedOrder(seat.comm.split(0)) if self._debug else Order()
        self._group = Group(seat.comm, order)
        if seat.terms.checkpoints is not None and not seat.served:
            warn(
                f"checkpoints= is for servers, but {self.deployment!r} has none: save the model yourself",
            )

    @property
    def _context(self) -> RankContext:
        if self._rank_context is None:
            seat, self._close = self.deployment.seat(self._options)
            self._attach(seat)
            return seat
        return self._rank_context

    @property
    def _collective_group(self) -> Group:
        _ = self._context
        assert self._group is not None
        return self._group

    @property
    def _order(self) -> Order:
        return self._collective_group.order

    @property
    def group(self) -> int:
        """Number of this group of replicas in sync, of `groups`."""
        return self._context.group

    @property
    def groups(self) -> int:
        """Number of groups; 1 if all replicas are in sync."""
        return self._context.groups

    def run(
        self, step_fn: Callable[[Any], T], batches: Iterable[Any] | Iterator[Any], *, steps: int | None = None
    ) -> list[T]:
        """Call `step_fn(batch)` on this replica for each batch.

        Args:
            step_fn: One step of training.
            batches: Result of `make_input`; an iterator continues where it stopped, another iterable starts
                again.
            steps: Number of steps; default: until the input of one replica in sync ends, checked with 4 bytes
                per step.

        Raises:
            DataError: The input ended before `steps`.
        """
        iterator, results = iter(batches), list[T]()
        if steps is not None:
            arguments.whole("steps", steps, 0)
            for step in range(steps):
                batch = next(iterator, END)
                if batch is END:
                    raise DataError(
                        f"the input of replica {self.replica} ended after {step} of {steps} batches: yield"
                        " more in input_fn, or omit steps="
                    )
                results.append(step_fn(batch))
            return results
        while True:
            batch = next(iterator, END)
            if not self._all_have_batch(batch is not END):
                return results
            results.append(step_fn(batch))

    def _all_have_batch(self, mine: bool) -> bool:
        if self.replicas == 1:
            return mine
        self._order.check(self._order.note("the next batch of run()"))
        return bool(
            self._context.comm.all_reduce(torch.tensor([int(mine)], dtype=torch.int32, device="cpu"), "min")
        )

    def make_input(self, input_fn: InputFn, replication: Replication = PER_WORKER) -> Iterator[Any]:
        """Return this replica's batches.

        Args:
            input_fn: Function of an `InputContext`. Returns an iterable of batches: pytrees of tensors if
                they are split, else anything.
            replication: "per_worker" (default): one pipeline per process, split among its replicas; "single":
                one for all replicas in sync, sent by the first; "per_replica".

        Returns:
            An iterator. Replicas that share a pipeline request batches together, and get them on the host.

        Raises:
            DataError: From the iterator: a batch does not divide among the replicas.
        """
        arguments.choice("replication", replication, get_args(Replication))
        return inputs(self._context, input_fn, replication)

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        *,
        compressor: Any = None,
        topology: Any = None,
        name: str = "optimizer",
        seed: int = 0,
    ) -> ReplicatedOptimizer:
        """Return an optimiser that steps with the deployment, from the first replica's parameters.

        In "single" it steps alone. In "sync" and "local" it uses the mean gradient or, with `topology`, its
        own, and averages parameters with neighbours. In "async" and "groups" it pushes gradients to servers.
        Missing gradients count as zeros where gradients are exchanged.

        Args:
            optimizer: Optimiser of this replica's parameters, built from `model.named_parameters()` for
                methods that use names.
            compressor: Any method of `laconic.compress`, such as "dgc(density=0.01)"; with servers or
                `topology`, a codec or selector, such as "topk(density=0.01)". Default: none.
            topology: Neighbours to average with, such as "ring()"; only in "sync" and "local". Default: all.
            name: Name among several optimisers; default: "optimizer".
            seed: Seed of sampling and stochastic rounding; default: 0.

        Returns:
            The optimiser to use instead. Its `stats()` has bytes, updates and staleness.

        Raises:
            AttachError: Another optimiser has this name, replicas differ, or this optimiser is not supported.
            SpecError: `compressor` or `topology` is wrong, or not for this deployment.
        """
        optimizer = unwrap(optimizer)
        check_name(optimizer, name, self._optimizers)
        self._order.check(self._order.note("wrap_optimizer(name={!r})", name))
        controller = make_controller(
            self._context, optimizer, compressor, topology, name, seed, number=len(self._optimizers)
        )
        self._optimizers[name] = ReplicatedOptimizer(optimizer, controller, name, self._order)
        return self._optimizers[name]

    def logical_device(self, number: int = 0) -> torch.device:
        """Return a device of this replica: a GPU if available, else the CPU.

        Args:
            number: Number of its device, below `devices`; default: 0.

        Raises:
            SpecError: This replica has no such device, or this machine too few GPUs.
        """
        arguments.whole("number", number, 0, self._devices - 1, hint="Replicator(..., devices=) has more")
        if not torch.cuda.is_available():
            return torch.device("cpu")
        index, there = self._context.place * self._devices + number, torch.cuda.device_count()
        if index >= there and self._devices == 1 and self._context.one_process:
            index %= there  # they run in turns, so may share a GPU
        if index >= there:
            raise SpecError(
                f"replica {self._context.place} of this machine needs GPU {index}, but it has {there}: start"
                " fewer replicas here, or reduce devices="
            )
        return torch.device("cuda", index)

    def stats(self) -> dict[str, ReplicatorStats]:
        """Return the figures of each wrapped optimiser, by name."""
        return {name: each.stats() for name, each in self._optimizers.items()}
