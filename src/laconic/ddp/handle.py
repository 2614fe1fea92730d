"""Handle that `compress` returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from laconic.comm.joint_calls import JointCalls, unwatched
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.ddp.bucket_layout import real_shape
from laconic.ddp.buckets import Buckets
from laconic.ddp.handle_state import HandleState
from laconic.ddp.optimiser import Optimisers, refuse_complex
from laconic.ddp.uneven import JoinedModel, UnevenInputs
from laconic.exchange.attached import Attached
from laconic.exchange.gathered import GatheredState, gather_states, same_states
from laconic.exchange.method import Method
from laconic.exchange.save_watch import SaveWatch, saved_by_rank_0
from laconic.exchange.state import RankState, model_digest
from laconic.exchange.stats import Stats


@outside_inference_mode("stats", "state_dict", "load_state_dict", "discard", "synchronize", "remove")
class Handle(Joinable):
    """A compressed model on one rank: statistics, state and removal. `laconic.compress` returns it.

    It may follow its model in torch's `with Join([model, handle])`, and must if the method exchanges inside
    `optimizer.step()`: a rank without further inputs then takes these steps too.
    """

    saved_by_each: ClassVar[bool] = False  # rank 0 may gather all memory

    def __init__(
        self,
        method: Method,
        names: Mapping[Tensor, str],
        optimizer: Optimizer | Sequence[Optimizer],
        comm: Metered,
        *,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        sparse: Collection[str] = (),
        restore_unused: bool = False,
        joined: JoinedModel | None = None,
        joint_calls: JointCalls | None = None,
    ) -> None:
        Joinable.__init__(self)
        arguments.whole("seed", seed)
        self.method = method
        dense = {name: parameter for parameter, name in names.items() if name not in sparse}
        self.layout = Layout.of((name, real_shape(parameter)) for name, parameter in dense.items())
        refuse_complex(method, self.layout, dense)
        self._detach: tuple[Callable[[], None], ...] = ()
        self._scaler = scaler
        self._comm = comm
        self._joint_calls = joint_calls
        self._saves = SaveWatch(comm.counter(), comm.size)
        self._optimisers = Optimisers(optimizer, names, method.rules)
        exchanging = unwatched if joint_calls is None else joint_calls.exchange
        self.exchange = Attached(
            method, self.layout, comm, self._optimisers, seed, parameters=dense, exchanging=exchanging
        )
        self.buckets = Buckets(
            self.exchange,
            names,
            self._optimisers,
            scaler,
            keep_means=restore_unused,
            joins=lambda: joined is not None and joined.config is not None,
        )
        self.buckets.watch(dense.values())
        self._state = HandleState(self.exchange, self.buckets)
        self._uneven: UnevenInputs | None = None
        self._joined = joined
        if joined is not None and any(rule.exchanges_in_step for rule in method.rules):
            self._uneven = UnevenInputs(joined, self.buckets, self._optimisers)
            self.exchange.observers.append(self._uneven)
        self.exchange.observers += [self._saves, self.buckets]
        self.exchange.checks.append(self.buckets.check)

    def __repr__(self) -> str:
        return (
            f"<{self.method} on {self.layout.numel:,} elements, rank {self._comm.rank} of {self._comm.size}>"
        )

    @property
    def fingerprint(self) -> dict[str, str]:
        return {
            "the spec": repr(self.method),
            "the seed": str(self.exchange.seed),
            "the scaler": "none" if self._scaler is None else "given",
            "the model": model_digest(self.layout),
        }

    def stats(self) -> Stats:
        """Return this rank's bytes and seconds since the start."""
        return self.exchange.stats(self.buckets.per_step)

    @overload
    def state_dict(self, *, gather: Literal[False] = False) -> RankState: ...

    @overload
    def state_dict(self, *, gather: Literal[True]) -> GatheredState: ...

    def state_dict(self, *, gather: bool = False) -> RankState | GatheredState:
        """Return this rank's memory, for this rank to save between steps. The rank is in every key.

        Args:
            gather: Whether rank 0 gets the memory of all ranks, and the others an empty list. Call it on all
                ranks, or only on rank 0 if the method has no memory. Accelerate's
                `register_for_checkpointing` always gathers.

        Returns:
            Values that load under `torch.load(weights_only=True)`.

        Raises:
            PeerError: On every rank: with `gather`, a rank continued without this call.
        """
        gather = gather or saved_by_rank_0()
        state = self._state.state_dict()
        if gather and (state["tensors"] or self.buckets.unused_parameters is not None):  # equal on all ranks
            self.call_jointly("state_dict(gather=True)")
            return gather_states(state, self._comm.comm)
        if gather:
            return same_states(state, self._comm)
        if state["tensors"]:
            self._saves.saved(state["step"])
        return state

    def call_jointly(self, call: str) -> None:
        """Wait until every rank makes this call. Raises `PeerError` on all if one does not."""
        if self._joint_calls is not None:
            self._joint_calls.make(call)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`.

        Args:
            state: The result of `state_dict()` on this rank, or of `state_dict(gather=True)` on rank 0.

        Raises:
            StateError: With nothing changed: it is not a handle's state, or its rank, world size (see
                `laconic.resize`), model, method or seed differs.
        """
        self._state.load_state_dict(state)

    def discard(self) -> None:
        """Clear all residuals, so that no earlier gradient affects a later step. Call it on every rank.

        Use it after zero_grad() without step(), as unsent gradients are sent later. It also clears local
        momentum. For gradients that are never used, use `model.no_sync()`.
        """
        self.exchange.discard()
        self.buckets.discard()

    def synchronize(self) -> None:
        """Make replicas equal if the method lets them differ. Call it on all ranks."""
        if not self.exchange.rules.keep_equal:
            self.call_jointly("finish()")
        self.exchange.rules.finish()

    def remove(self) -> None:
        """Restore DDP's own all-reduce. Call it on every rank, between steps.

        Residuals and local momentum are dropped. The model can be compressed again.
        """
        try:
            if self.buckets.failure is None:
                if not self.exchange.rules.keep_equal:
                    self.call_jointly("remove()")
                self.exchange.rules.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Detach this rank alone: others may have no handle."""
        self.detach()
        self.buckets.close()
        detach, self._detach = self._detach, ()
        for callback in detach:
            callback()

    def detach(self) -> None:
        self._optimisers.remove()
        self.exchange.observers.clear()  # no cycles: the thread's last job frees the exchange
        self.exchange.checks.clear()

    def when_removed(self, *callbacks: Callable[[], None]) -> None:
        self._detach = (*callbacks, *self._detach)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self.join_hook_of(self)

    def join_hook_of(self, joinable: Joinable) -> JoinHook:
        if self._uneven is None:
            return JoinHook()
        self._uneven.begin(joinable)
        return self._uneven

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu") if self._joined is None else self._joined.device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD if self._joined is None else self._joined.group
