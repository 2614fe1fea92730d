"""The handle that `compress` returns: one method working on one model."""

from __future__ import annotations

import weakref
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
from laconic.core.errors import AttachError, NonFiniteError, PeerError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.core.mask import MaskWatch, cleared
from laconic.ddp.buckets import Buckets, real_shape
from laconic.ddp.memory import Memory
from laconic.ddp.optimiser import OptimiserHooks, Optimisers, refuse_complex
from laconic.ddp.uneven import JoinedModel, UnevenInputs
from laconic.exchange.exchange import Exchange
from laconic.exchange.gathered import GatheredState, gather_states, same_states
from laconic.exchange.method import Method
from laconic.exchange.rule import BoundRule, Site
from laconic.exchange.save_watch import SaveWatch, saved_by_rank_0
from laconic.exchange.state import RankState, model_digest
from laconic.exchange.stats import Stats
from laconic.optim.entry import unwrap_all


@outside_inference_mode("stats", "state_dict", "load_state_dict", "discard", "meet", "remove")
class Handle(Joinable):
    """A compressed model on one rank: figures, state, and the way back. Made by `laconic.compress`.

    It may be given to torch's `Join` behind its model, `with Join([model, handle])`. If the method exchanges
    inside `optimizer.step()`, it has to be: a rank without further inputs then takes these steps too.
    """

    saved_by_each: ClassVar[bool] = False  # rank 0 may gather the memory of all ranks, as of no sharded model

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
        exchanging = unwatched if joint_calls is None else joint_calls.exchange
        self._saves = SaveWatch(comm.counter(), comm.size)
        optimizers, rules = unwrap_all(optimizer)[0], method.rules
        hooks = [
            OptimiserHooks(
                each,
                names,
                self._before_step,
                rules,
                [o for o in optimizers if o is not each],
                self._mean_of,
                exchanging,
            )
            for each in optimizers
        ]
        self._optimisers = Optimisers(hooks)
        self.exchange = Exchange(method, self.layout, comm, self._optimisers, seed, parameters=dense)
        self._masks = MaskWatch(dense)
        masters = weakref.WeakMethod(self._optimisers.have_masters)  # the thread must not keep this handle
        lone = weakref.WeakMethod(self._optimisers.lone)
        self.buckets = Buckets(
            self.exchange,
            names,
            scaler,
            keep_means=restore_unused,
            masters=lambda: bool((found := masters()) and found()),
            lone=lambda: found() if (found := lone()) else None,
            exchanging=exchanging,
        )
        site = Site(comm, seed, self.exchange.seconds)
        self._rules: list[BoundRule] = []
        self._apart: list[BoundRule] = []  # those between whose rounds replicas differ
        for each in hooks:
            own = self.layout.named(
                [name for name in self.layout.names if self._optimisers.may_hold(each, name)]
            )
            governed = method.governed(self.layout)
            bound = [rule.bind(part.named(own.names), each, site) for rule, part in governed]
            each.install(bound)
            self._rules += bound
            self._apart += [b for b, (rule, _) in zip(bound, governed, strict=True) if not rule.keeps_equal]
        self.buckets.watch(dense.values())
        self._memory = Memory(self.exchange, self._rules, self.buckets)
        self._uneven: UnevenInputs | None = None
        self._joined = joined
        if joined is not None and any(rule.exchanges_in_step for rule in method.rules):
            self._uneven = UnevenInputs(joined, comm, self.buckets, self._optimisers, self._rules)

    def __repr__(self) -> str:
        return (
            f"<{self.method} on {self.layout.numel:,} elements, rank {self._comm.rank} of {self._comm.size}>"
        )

    @property
    def fingerprint(self) -> dict[str, str]:
        """What all ranks must have alike."""
        return {
            "the spec": repr(self.method),
            "the seed": str(self.exchange.seed),
            "the scaler": "none" if self._scaler is None else "given",
            "the model": model_digest(self.layout),
        }

    def stats(self) -> Stats:
        """Bytes and seconds of this rank since the start; see `laconic.exchange.stats.Stats`."""
        meter, exchange = self._comm.snapshot(), self.exchange
        return Stats.of(
            meter,
            exchange.seconds,
            steps=exchange.step,
            dense=exchange.dense_bytes,
            buckets=self.buckets.per_step,
            noise=exchange.noise.noise,
        )

    @overload
    def state_dict(self, *, gather: Literal[False] = False) -> RankState: ...

    @overload
    def state_dict(self, *, gather: Literal[True]) -> GatheredState: ...

    def state_dict(self, *, gather: bool = False) -> RankState | GatheredState:
        """This rank's memory, to be saved by this rank, between steps. The rank is in every key.

        Args:
            gather: Whether rank 0 gets the memory of all ranks, for a checkpoint that it alone writes; the
                other ranks get an empty list. Then all ranks call it, or rank 0 alone if the method keeps no
                memory. Default: False; Accelerate's `register_for_checkpointing` gets the memory of all.

        Returns:
            Plain numbers, strings and tensors, which load under `torch.load(weights_only=True)`.

        Raises:
            PeerError: On every rank: it gathers, and another rank went on without this call.
        """
        gather = gather or saved_by_rank_0()
        state = self._memory.state_dict()
        if gather and (state["tensors"] or self.buckets.left_out is not None):  # equal on all ranks
            self.call_jointly("state_dict(gather=True)")
            return gather_states(state, self._comm.comm)
        if gather:
            return same_states(state, self._comm)
        if state["tensors"]:
            self._saves.saved(state["step"])
        return state

    def call_jointly(self, call: str) -> None:
        """Wait until every rank makes this call. Raises `PeerError` on all if one does something else."""
        if self._joint_calls is not None:
            self._joint_calls.make(call)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken.

        Args:
            state: What `state_dict()` returned on this rank, or `state_dict(gather=True)` on rank 0.

        Raises:
            StateError: With nothing changed: it is no state of a handle, or one of another rank, world size
                (see `laconic.resize`), model, method or seed.
        """
        self._memory.load_state_dict(state)

    def discard(self) -> None:
        """Forget what is held back: nothing of any gradient so far comes back in a later step.

        For a step that is skipped now and then, by zero_grad() in place of step(): the unsent share of its
        gradients would come with later ones. It also drops residuals of earlier steps, and momentum that is
        applied before the exchange. Run a backward pass whose gradients are never used, such as that of a
        GAN's generator, under `model.no_sync()`: nothing is exchanged or lost. Call it on every rank.
        """
        self.exchange.discard()
        self.buckets.discard()

    def meet(self) -> None:
        """Make replicas equal, where a method has them differ between its rounds. Called by all ranks."""
        if self._apart:
            self.call_jointly("finish()")
        with self._optimisers.on_masters():
            for rule in self._apart:
                rule.close()

    def remove(self) -> None:
        """Restore DDP's own all-reduce; what was not sent is dropped. The model can be compressed again.

        Call it on every rank, between steps. Momentum that was applied before the exchange is dropped.
        """
        try:
            if self.buckets.failure is None:
                if self._apart:
                    self.call_jointly("remove()")
                with self._optimisers.on_masters():
                    for rule in self._rules:
                        rule.close()
        finally:
            self.let_go()
            self.buckets.close()
            detach, self._detach = self._detach, ()
            for callback in detach:
                callback()

    def let_go(self) -> None:
        """Let the optimiser step by itself."""
        for hooks in self._optimisers.hooks:
            hooks.remove()

    def when_removed(self, *callbacks: Callable[[], None]) -> None:
        """Call these once, in this order, at the end of `remove`, before those of earlier calls."""
        self._detach = (*callbacks, *self._detach)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join`."""
        return self.join_hook_of(self)

    def join_hook_of(self, joinable: Joinable) -> JoinHook:
        """The same for a joinable that is given to `Join` in the handle's place."""
        if self._uneven is None:
            return JoinHook()
        self._uneven.begin(joinable, repr(self.method))
        return self._uneven

    @property
    def join_device(self) -> torch.device:
        """Of the model."""
        return torch.device("cpu") if self._joined is None else self._joined.device

    @property
    def join_process_group(self) -> Any:
        """The model's process group."""
        return dist.group.WORLD if self._joined is None else self._joined.group

    def _mean_of(self, name: str) -> Tensor | None:
        """The present step's mean in float32, if DDP has it in 16 bits; None if it is not kept."""
        return self.buckets.float_mean(name)

    def _before_step(self, hooks: OptimiserHooks) -> int:
        """The step that the optimiser is about to take. Raises if it must not be taken."""
        exchange, rank = self.exchange, self._comm.rank
        if self.buckets.failure is not None:
            raise PeerError(f"rank {rank}: the exchange has failed: {self.buckets.failure}")
        if exchange.void is not None:
            raise NonFiniteError(
                f"rank {rank}: the gradients of step {exchange.step - 1} are not finite ({exchange.void}): no"
                " parameter was changed, and every memory is as before the step. Skip the step with"
                " optimizer.zero_grad(), or train with a GradScaler, which skips it by itself"
            )
        if self._uneven is not None:
            self._uneven.check(repr(self.method))
            self._uneven.stepped(exchange.step - 1)
        self._follow_masks()
        self._saves.check(exchange.step - 1)
        self.buckets.before_step(hooks)
        return exchange.step - 1

    def _follow_masks(self) -> None:
        """Let the rules forget what they keep for entries that are no longer in use."""
        masks = self._masks.changed()
        if not masks:
            return
        if any(rule.exchanges_in_step for rule in self.method.rules):
            raise AttachError(
                f"{self.method} exchanges inside optimizer.step(), and sparse training wants gradients that"
                " are exchanged before it: take another method, such as 'dgc(density=0.01)' or 'cgx()'"
            )
        for rule in self._rules:
            kept = cleared(rule.state_dict(), masks)
            if kept is not None:
                rule.load_state_dict(kept)
