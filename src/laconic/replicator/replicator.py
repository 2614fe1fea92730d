"""Replicator: a script written as for one device, moved between deployments by a string.

The programming model of TF-Replicator (Buchlovsky et al. 2019, arXiv:1902.00465), on torch: a reconstruction,
from its abstract and from TensorFlow's RFC 20181016, which came of it; its code is not public.
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
from laconic.replicator.collectives import Group
from laconic.replicator.deployment import Seat, Terms, deployment_of
from laconic.replicator.inputs import PER_WORKER, InputFn, Replication, inputs
from laconic.replicator.meetings import Meetings
from laconic.replicator.optimizer import ReplicatedOptimizer
from laconic.replicator.order import END, CheckedOrder, Order
from laconic.replicator.stats import ReplicatorStats
from laconic.replicator.wrapping import check_free, controller_of

T = TypeVar("T")


class Replicator(Meetings):
    """One replica of a script, wherever it runs; `launch` runs as many as the deployment has.

    Every replica makes the same calls in the same order. Collectives, and the replicas that a batch is cut
    among, are those in sync with this one: all in "sync" and "local", those of its group in "groups", and it
    alone in "single" and "async". Tensors of collectives have equal shapes on all replicas, of `all_gather`
    beyond the first dimension.

    >>> import torch
    >>> def main(replicator):
    ...     x = torch.tensor(1.0 + replicator.replica, requires_grad=True)
    ...     replicator.all_sum({"x": x * x})["x"].backward()
    ...     return x.grad.item()
    >>> Replicator("local(replicas=2)").launch(main)
    [4.0, 8.0]

    Args:
        spec: "single", "sync", "async", "groups(size=4)" or "local(replicas=4)"; default: "single". All but
            "single" and "local" are started by torchrun, or in a process group that the script has joined.
        debug: Whether replicas compare each collective before it begins, and raise `PeerError`, which names
            the first that differs, where they would hang; costs 8 bytes and a round trip. Default: False.
        timeout_s: Seconds that a replica waits for another in one collective; default: 1800.
        devices: Devices of one replica, for a model that spans several; default: 1.
        checkpoints: Folder of the servers' checkpoints, in "async" and "groups", from which they go on when
            started again; default: none.
        checkpoint_every: Updates from one checkpoint of a server to its next; default: 100.

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
        self._terms = Terms(timeout_s, folder, checkpoint_every)
        self._seat: Seat | None = None
        self._close: Callable[[], object] = _nothing
        self._group: Group | None = None
        self._optimizers: dict[str, ReplicatedOptimizer] = {}

    def __repr__(self) -> str:
        return f"<Replicator {self.deployment!r}>"

    def launch(self, main: Callable[[Replicator], T]) -> list[T]:
        """Run `main(replicator)` once for each replica of this process.

        Args:
            main: The script of one replica, which builds its model, its optimisers and its input.

        Returns:
            The results of this process's replicas: one, as many as "local" has, or none on a server.

        Raises:
            PeerError: Another replica, or a server, has failed; or replicas differ (`debug`).
        """
        if self._seat is not None:
            raise AttachError("this Replicator is at work already: launch another one")

        def play(seat: Seat) -> T:
            replica = Replicator(self.deployment, debug=self._debug, devices=self._devices)
            replica._terms = self._terms
            replica._sit(seat)
            try:
                result = main(replica)
                replica._order.check(END)
            finally:
                replica._end()
            return result

        return self.deployment.launch(play, self._terms)

    def close(self) -> None:
        """Leave the group of a Replicator that was used without `launch`."""
        self._end()
        close, self._close, self._seat = self._close, _nothing, None
        close()

    def _end(self) -> None:
        for each in self._optimizers.values():
            if isinstance(each.controller, Averaging):
                each.controller.end()
        self._optimizers = {}

    def _sit(self, seat: Seat) -> None:
        self._seat = seat
        order = CheckedOrder(seat.comm.split(0)) if self._debug else Order()
        self._group = Group(seat.comm, order)
        if seat.terms.checkpoints is not None and not seat.served:
            warn(
                f"checkpoints= is for servers, and {self.deployment!r} has none: save the model yourself",
            )

    @property
    def _at(self) -> Seat:
        if self._seat is None:
            seat, self._close = self.deployment.seat(self._terms)
            self._sit(seat)
            return seat
        return self._seat

    @property
    def _meets(self) -> Group:
        _ = self._at
        assert self._group is not None
        return self._group

    @property
    def _order(self) -> Order:
        return self._meets.order

    @property
    def group(self) -> int:
        """The number of this group of replicas in sync, of `groups`."""
        return self._at.group

    @property
    def groups(self) -> int:
        """How many groups train side by side; 1 where all replicas are in sync."""
        return self._at.groups

    def run(
        self, step_fn: Callable[[Any], T], batches: Iterable[Any] | Iterator[Any], *, steps: int | None = None
    ) -> list[T]:
        """Call `step_fn(batch)` on this replica for one batch after the other.

        Args:
            step_fn: One step of training.
            batches: What `make_input` returned; an iterator goes on where it stopped. On other iterables each
                call begins anew.
            steps: How many; default: until the input of one of the replicas in sync ends, on which they agree
                at each step by 4 bytes.

        Returns:
            What `step_fn` returned on this replica, step by step.

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
                        f"the input of replica {self.replica} ended after {step} of {steps} batches: let"
                        " input_fn yield more, or leave steps= out"
                    )
                results.append(step_fn(batch))
            return results
        while True:
            batch = next(iterator, END)
            if not self._all_have(batch is not END):
                return results
            results.append(step_fn(batch))

    def _all_have(self, mine: bool) -> bool:
        if self.replicas == 1:
            return mine
        self._order.check(self._order.note("the next batch of run()"))
        return bool(
            self._at.comm.all_reduce(torch.tensor([int(mine)], dtype=torch.int32, device="cpu"), "min")
        )

    def make_input(self, input_fn: InputFn, replication: Replication = PER_WORKER) -> Iterator[Any]:
        """This replica's batches.

        Args:
            input_fn: Called with an `InputContext`, which tells its share and the size of its batches.
                Returns an iterable of batches: pytrees of tensors where they are cut, else anything.
            replication: "per_worker" (default): a pipeline a process, cut among its replicas; "single": one
                for all replicas in sync, whose first one reads, cuts and sends; "per_replica".

        Returns:
            An iterator. Where a pipeline feeds several replicas, they ask for batches together, and get them
            on the host.

        Raises:
            DataError: From the iterator: a batch does not divide among the replicas.
        """
        arguments.choice("replication", replication, get_args(Replication))
        return inputs(self._at, input_fn, replication)

    def wrap_optimizer(
        self,
        optimizer: Optimizer,
        *,
        compressor: Any = None,
        topology: Any = None,
        name: str = "optimizer",
        seed: int = 0,
    ) -> ReplicatedOptimizer:
        """An optimiser whose steps are those of the deployment. All replicas get the first one's parameters.

        In "single" it steps alone. In "sync" and "local" it steps by the mean of all gradients, or, with
        `topology`, by its own, and averages parameters with neighbours. In "async" and "groups" it pushes
        gradients to servers. Where gradients are exchanged, a parameter without one counts as zeros.

        Args:
            optimizer: Over this replica's parameters. Built from `model.named_parameters()` it gives the
                model's names to methods that go by them.
            compressor: How gradients travel: any method of `laconic.compress`, such as "dgc(density=0.01)";
                to servers, or with `topology`, a codec or selector, such as "topk(density=0.01)". Default:
                as they are.
            topology: Who averages with whom, such as "ring()"; only in "sync" and "local". Default: all.
            name: Tells several optimisers apart, such as those of a GAN; default: "optimizer".
            seed: Of sampling and stochastic rounding; default: 0.

        Returns:
            The optimiser to use in place of yours. Its `stats()` has bytes, updates and staleness.

        Raises:
            AttachError: Another has this name, replicas differ, or this optimiser cannot be shared.
            SpecError: `compressor` or `topology` is wrong, or not for this deployment.
        """
        optimizer = unwrap(optimizer)
        check_free(optimizer, name, self._optimizers)
        self._order.check(self._order.note("wrap_optimizer(name={!r})", name))
        controller = controller_of(
            self._at, optimizer, compressor, topology, name, seed, number=len(self._optimizers)
        )
        self._optimizers[name] = ReplicatedOptimizer(optimizer, controller, name, self._order)
        return self._optimizers[name]

    def logical_device(self, number: int = 0) -> torch.device:
        """A device of this replica: GPUs where there are any, else the host.

        Args:
            number: Which of its devices, 0 to `devices` - 1; default: 0.

        Raises:
            SpecError: This replica has no such device, or this machine too few GPUs.
        """
        arguments.whole("number", number, 0, self._devices - 1, hint="Replicator(..., devices=) has more")
        if not torch.cuda.is_available():
            return torch.device("cpu")
        index, there = self._at.place * self._devices + number, torch.cuda.device_count()
        if index >= there and self._devices == 1 and self._at.one_process:
            index %= there  # replicas of one process may share a GPU: they take turns
        if index >= there:
            raise SpecError(
                f"replica {self._at.place} of this machine wants GPU {index}, and it has {there}: start fewer"
                " replicas here, or give each fewer devices="
            )
        return torch.device("cuda", index)

    def stats(self) -> dict[str, ReplicatorStats]:
        """The figures of each wrapped optimiser, by name."""
        return {name: each.stats() for name, each in self._optimizers.items()}


def _nothing() -> None:
    """There is nothing to close."""
