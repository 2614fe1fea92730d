"""Float32 weights in place of half-precision parameters inside an optimiser's step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError, StateError
from laconic.core.turn import mix
from laconic.optim.step_hooks import between_hooks
from laconic.optim.stochastic_rounding import HALF, round_at_random

MASTER, ROUNDINGS = "master_weight", "roundings"  # in a parameter's state
SCALING = ("grad_scale", "found_inf")  # set by a GradScaler


class Masters:
    """Master weights of one optimiser. `at_random`: made for each step, then rounded at random.

    Between steps, state belongs to the parameter; inside, to its master.
    """

    def __init__(self, optimizer: Optimizer, *, at_random: bool, seed: int) -> None:
        self._optimizer = optimizer
        self._at_random = at_random
        self._seed = seed
        self._masters: dict[Tensor, Tensor] = {}
        self._roundings = 0
        self._versions: dict[Tensor, int] = {}  # to detect writes in a step
        self._inside: dict[Tensor, Tensor] = {}  # masters by parameter
        self._behind: dict[Tensor, Tensor] = {}  # parameters by master
        for parameter in self._halves():
            self.of(parameter)
            if parameter in optimizer.state:  # Adagrad creates its state in __init__
                optimizer.state[parameter] = {k: _single(v) for k, v in optimizer.state[parameter].items()}

    def now(self, parameter: Tensor) -> Tensor:
        return self._inside.get(parameter, parameter)

    def kept(self, parameter: Tensor) -> Tensor | None:
        return self._masters.get(parameter)

    def behind(self, held: Tensor) -> Tensor:
        return self._behind.get(held, held)

    def of(self, parameter: Tensor) -> Tensor | None:
        if self._at_random or parameter.dtype not in HALF:
            return None
        if parameter not in self._masters:
            self._masters[parameter] = parameter.detach().float()
        return self._masters[parameter]

    def step(self, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        given = vars(self._optimizer)
        scaling = {
            name: given.pop(name) for name in SCALING if name in given
        }  # applied here, not in the kernel
        try:
            if bool(scaling.get("found_inf", False)):
                return None
            return between_hooks(
                self._optimizer, partial(self._stepped, step, scaling.get("grad_scale")), closure
            )
        finally:
            given.update(scaling)

    def _stepped(
        self, step: Callable[..., Any], scale: Tensor | None, closure: Callable[[], Any] | None
    ) -> Any:
        with self.inside():
            self._take_gradients(scale)
            return step() if closure is None else step(lambda: self._evaluated(closure))

    @contextmanager
    def inside(self, also: Collection[Tensor] = ()) -> Iterator[None]:
        """Put masters of trained parameters and `also` in the groups; round them at the end."""
        try:
            for parameter in self._halves(also):
                self._inside[parameter] = self._fresh(parameter)
            self._behind = {master: parameter for parameter, master in self._inside.items()}
            self._exchange(self._inside)
            self._versions = {each: each._version for each in self._inside}
            yield
            if any(each._version != self._versions[each] for each in self._inside):
                raise AttachError(
                    f"{type(self._optimizer).__name__} steps the model's parameters directly instead of its"
                    " groups, as a wrapper does: pass the inner optimiser to master_weights"
                )
        finally:
            self._exchange(self._behind)
            held, self._inside, self._behind = self._inside, {}, {}
            self._publish(held)

    def _halves(self, also: Collection[Tensor] = ()) -> list[Tensor]:
        known = {*self._masters, *self._optimizer.state, *also}
        return [
            each
            for each in self._in_order()
            if each.dtype in HALF and (each.requires_grad or each.grad is not None or each in known)
        ]

    @torch.no_grad()
    def _fresh(self, parameter: Tensor) -> Tensor:
        master = self.of(parameter)
        if master is None:
            return parameter.detach().float()
        same = master.to(parameter.dtype) == parameter
        if not (same.is_cpu and bool(same.all())):  # elsewhere copying is cheaper than checking
            master.copy_(torch.where(same, master, parameter.float()))
        return master

    def _exchange(self, others: Mapping[Tensor, Tensor]) -> None:
        """Replace keys of `others` by its values, in place: LBFGS has a reference to the groups."""
        for group in self._optimizer.param_groups:
            group["params"][:] = [others.get(each, each) for each in group["params"]]
        state = self._optimizer.state
        for each in [key for key in state if isinstance(key, Tensor) and key in others]:
            state[others[each]] = state.pop(each)

    @torch.no_grad()
    def _take_gradients(self, scale: Tensor | None = None) -> None:
        for parameter, master in self._inside.items():
            grad = None if parameter.grad is None else _single_like(parameter.grad, master)
            master.grad = grad if grad is None or scale is None else grad.div_(scale)
        for other in self._in_order():
            if scale is not None and other not in self._behind and other.grad is not None:  # in float32
                other.grad.div_(scale)

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        held, behind = self._inside, self._behind
        with torch.no_grad():
            for parameter, master in held.items():
                parameter.copy_(master)
        self._exchange(behind)  # for the closure's zero_grad()
        self._inside, self._behind = {}, {}
        try:
            result = closure()
        finally:
            self._exchange(held)
            self._inside, self._behind = held, behind
        self._versions = {each: each._version for each in held}
        self._take_gradients()
        return result

    @torch.no_grad()
    def _publish(self, held: Mapping[Tensor, Tensor]) -> None:
        self._roundings += 1
        for place, parameter in enumerate(self._in_order()):
            if (master := held.get(parameter)) is None:
                continue
            if self._at_random:
                key = mix(self._seed, place, self._roundings)
                parameter.copy_(round_at_random(master, parameter.dtype, key))
            else:
                parameter.copy_(master)
            master.grad = None

    def _in_order(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def added_to(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = dict(state_dict["state"])
        for number, parameter in enumerate(self._in_order()):
            if (master := self._masters.get(parameter)) is not None:
                state[number] = {**state.get(number, {}), MASTER: master}
            elif self._at_random and parameter.dtype in HALF:
                state[number] = {
                    **state.get(number, {}),
                    ROUNDINGS: torch.tensor(self._roundings, dtype=torch.int64, device="cpu"),
                }
        return {**state_dict, "state": state}

    def copied(self, optimizer: Optimizer, memo: dict[int, Any]) -> Masters:
        made = Masters(optimizer, at_random=self._at_random, seed=self._seed)
        made._masters = {copy.deepcopy(each, memo): master.clone() for each, master in self._masters.items()}
        made._roundings = self._roundings
        return made

    def load(self, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
        """Load a state in float32. Raises `StateError`, changing nothing, for another shape."""
        parameters = self._in_order()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        pairs = dict(zip(numbers, parameters, strict=False))
        saved = {pairs[i]: one for i, one in state_dict["state"].items() if i in pairs}
        for parameter, one in saved.items():
            if MASTER in one and one[MASTER].shape != parameter.shape:
                raise StateError(
                    f"the saved state has a master weight of shape {tuple(one[MASTER].shape)} for a parameter"
                    f" of shape {tuple(parameter.shape)}: load the state of the same model"
                )
        own = {
            number: {key: value for key, value in one.items() if key not in (MASTER, ROUNDINGS)}
            for number, one in state_dict["state"].items()
        }
        with self.inside(saved):
            load({**state_dict, "state": {number: one for number, one in own.items() if one}})
            for parameter, one in saved.items():
                master = self.of(parameter)
                if master is not None and MASTER in one:
                    with torch.no_grad():
                        master.copy_(one[MASTER])
        self._roundings = max((int(one[ROUNDINGS]) for one in saved.values() if ROUNDINGS in one), default=0)


def _single_like(grad: Tensor, master: Tensor) -> Tensor:
    """Return a float32 gradient with its master's strides, as fused kernels require."""
    single = grad.float()
    if single.layout != torch.strided or single.stride() == master.stride():
        return single
    return torch.empty_like(master).copy_(single)


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
