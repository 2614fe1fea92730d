"""Several optimisers as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError, StateError
from laconic.ddp.optimiser import held_by
from laconic.optim.closure import evaluate
from laconic.optim.unwrapping import after_steps, before_steps

KEY = "several"


class Several(Optimizer):
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # without Optimizer.__init__: groups are shared with the wrapped optimisers
        self.optimizers = tuple(optimizers)
        taken: set[Tensor] = set()
        for each in self.optimizers:
            shared = held_by(each) & taken
            if shared:
                shape = tuple(next(iter(shared)).shape)
                raise AttachError(
                    f"two of the optimisers hold the same parameter, of shape {shape}: pass it to one"
                )
            taken |= held_by(each)
        self.share()

    def share(self) -> None:
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        self.state = defaultdict(dict, {p: its for each in self.optimizers for p, its in each.state.items()})
        known: set[str] = reduce(set.__and__, (set(each.defaults) for each in self.optimizers))
        self.defaults = {key: value for key, value in self.optimizers[0].defaults.items() if key in known}

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for each in self.optimizers:
            each.step()
        self.share()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {KEY: [each.state_dict() for each in self.optimizers]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        saved = state.get(KEY, [None])
        if KEY not in state or len(saved) != len(self.optimizers):
            raise StateError(
                f"the saved state has {len(saved)} optimiser(s), here are {len(self.optimizers)}: pass"
                " those of the run that saved it to distribute(), in the same order"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state(state_dict)
        for each, state in zip(self.optimizers, state_dict[KEY], strict=True):
            each.load_state_dict(state)
        self.share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise AttachError(
            f"these are {len(self.optimizers)} optimisers: call add_param_group() of the one that shall hold"
            " the parameters"
        )

    def register_step_pre_hook(self, hook: Any) -> Any:
        return Removable([before_steps(each, hook) for each in self.optimizers])

    def register_step_post_hook(self, hook: Any) -> Any:
        return Removable([after_steps(each, hook) for each in self.optimizers])


class Removable:
    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = tuple(handles)

    def remove(self) -> None:
        for each in self._handles:
            each.remove()


def as_one(optimizers: Sequence[Optimizer]) -> Optimizer:
    return optimizers[0] if len(optimizers) == 1 else Several(optimizers)


def each_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)
