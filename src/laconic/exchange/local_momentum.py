"""LocalMomentum: the tensors whose momentum is applied before the exchange, and the steps that apply them.

Momentum is local if the feedback asks for it and the tensor's optimiser is an SGD whose momentum can be
handed over. A reducer such as `autotune` may apply it in some steps only.

Velocities do not suit scripts that change gradients before the step, as by clipping, or sum two exchanged
passes. The next step then applies those that were sent; later momentum is the optimiser's. Each rank adds the
rest of its velocity to its residual; smaller gradients reduce it, by the ratio of one tensor per bucket.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.core.mask import Mask, cleared
from laconic.core.memory_order import flat
from laconic.core.warning import warn
from laconic.exchange.method import Route
from laconic.exchange.rule import OptimiserSide, OptimiserView
from laconic.exchange.state import under
from laconic.feedback import BoundFeedback
from laconic.reducers import BoundReducer

log = logging.getLogger("laconic")
PREFIX = "momentum/"
NO_BUFFER = "it cannot be handed back to this optimiser"
RELEASED = "released"  # key of a state whose momentum is back in the optimiser
KEPT = "kept"  # key of a state whose momentum goes back after the next step


class LocalMomentum:
    def __init__(self, routes: Sequence[tuple[Route, Layout]], optimisers: OptimiserSide, comm: Comm) -> None:
        self.bound: Sequence[tuple[BoundFeedback, BoundReducer]] = ()
        self._optimisers = optimisers
        self._comm = comm
        self._layouts = {entry.name: entry for _, part in routes for entry in part}
        self._wanting: list[tuple[float, frozenset[str]]] = []  # first steps, with their local tensors
        self._able: list[bool] = []  # by route: whether its reducer may apply momentum
        self._idle: set[str] = set()  # tensors without momentum so far
        reasons: dict[str, list[str]] = {}
        self._made_for_it = any(
            route.feedback.local_momentum and route.feedback.needs_optimiser for route, _ in routes
        )
        for route, part in routes:
            by_feedback = route.feedback.local_momentum
            wanted = part if by_feedback else route.reducer.momentum_tensors(part)
            self._able.append(not by_feedback and len(wanted) > 0)
            why = {name: optimisers.why_in_optimizer(name) for name in wanted.names}
            if not by_feedback:  # momentum comes and goes
                unable = {name for name in why if not optimisers.continues_momentum(name)}
                why |= {name: NO_BUFFER for name in unable if why[name] is None}
            own = frozenset(name for name, reason in why.items() if reason is None)
            self._idle |= {name for name, reason in why.items() if reason == ""}
            for name, reason in why.items():
                if reason:
                    reasons.setdefault(reason, []).append(name)
            self._wanting.append((route.feedback.dense_steps if by_feedback else math.inf, own))
        self._decay: dict[str, Tensor] = {}  # momentum of the weight decay
        self._own = frozenset[str]().union(*(own for _, own in self._wanting))
        self._stepped = True
        self._passes = 0  # with local momentum
        self._fresh = True  # no momentum before these passes
        self._in_gradients: frozenset[str] = frozenset()  # tensors whose gradients hold velocities
        self._handed: dict[int, int] = {}  # applied passes, by the optimiser's id
        self._releasing: str | None = None
        self._kept = 1.0  # share of the velocity to apply later
        self._released = False
        for reason, names in reasons.items():
            self._log(f"momentum of {names[0]}{_and_others(names)} stays in the optimiser: {reason}")
        missing = [name for name in self._layouts if not optimisers.held(name)]
        if missing and self._made_for_it:
            log.warning(
                "the optimiser does not have %s (tensors in all: %d): exchanged, and not updated before"
                " add_param_group brings them",
                missing[0],
                len(missing),
            )

    def settings(self, name: str) -> Mapping[str, Any]:
        return self._optimisers.settings(name)

    def is_local(self, name: str) -> bool:
        return name in self._own

    def momentum_buffer(self, name: str) -> Tensor | None:
        """Return SGD's momentum buffer; one that exists rules out a fresh start."""
        buffer = self._optimisers.momentum_buffer(name)
        self._fresh &= buffer is None
        return buffer

    def continue_momentum(self, name: str, velocity: Tensor) -> None:
        """Let SGD continue from the mean velocity, flat (n,), and the momentum of the weight decay."""
        settings = self.settings(name)
        factor = float(settings["momentum"]) if settings.get("nesterov") else 1.0
        buffer = velocity / factor if factor else torch.zeros_like(velocity)
        self._set_buffer(name, -buffer if settings.get("maximize") else buffer)

    def _set_buffer(self, name: str, buffer: Tensor) -> None:
        if (decay := self._decay.pop(name, None)) is not None:
            buffer = buffer + flat(decay).to(buffer)
        if self._optimisers.held(name) and self._optimisers.continues_momentum(name):
            self._optimisers.set_momentum_buffer(name, buffer)

    def names(self, step: int) -> frozenset[str]:
        if self._released:
            return frozenset()
        own = [own for first, own in self._wanting if step >= first]
        return frozenset[str]().union(*own, *(reducer.momentum_names for reducer in self._able_reducers()))

    def _able_reducers(self) -> list[BoundReducer]:
        return [reducer for able, (_, reducer) in zip(self._able, self.bound, strict=False) if able]

    def release(self, reason: str, instead: str | None = None, kept: float = 1.0) -> None:
        """Leave momentum to the optimiser after the next step; all ranks call it in one step.

        Warn if the method needs local momentum and `instead` names an alternative. `kept`: share of the
        velocity to apply later.
        """
        if not self._own or self._releasing is not None or self._released:
            return
        self._releasing, self._kept = reason, kept
        if instead is not None and self._made_for_it:
            warn(f"{reason}: from the next step on, momentum is left to the optimiser; {instead}")

    def agree(self, device: torch.device) -> None:
        """Decide as the other ranks do: under Join, a rank without inputs sees no changed gradient."""
        if not self._own or self._released:
            return
        releases = self._releasing is not None
        mine = [float(releases), (1 - self._kept) * releases, float(not self._stepped)]
        flags = torch.tensor(mine, dtype=torch.float32, device=device)
        found, lost, unstepped = self._comm.all_reduce(flags, "max").tolist()
        self._stepped = not unstepped
        if found:
            self._releasing, self._kept = self._releasing or "another rank needs it", 1 - lost

    def begin(self) -> None:
        """Begin a backward pass. Momentum stays in place while gradients with velocity await a step."""
        fresh = self._fresh and self._passes <= 1  # velocities are gradients, and SGD keeps their momentum
        if self._releasing is not None and not self._released and (fresh or self._stepped):
            self._log(f"momentum goes back to the optimiser: {self._releasing}")
            self._release(None if fresh else self._kept)
        for reducer in self._able_reducers():
            reducer.begin_pass(stepped=self._stepped)

    def _release(self, kept: float | None) -> None:
        self._released = True
        for feedback, reducer in self.bound:
            feedback.release_momentum(kept)
            reducer.release_momentum(kept)
        if kept is not None:
            self._in_gradients = frozenset()
            for name, decay in [*self._decay.items()]:
                self._set_buffer(name, torch.zeros_like(flat(decay)))

    def end(self, step: int) -> None:
        self._stepped = False
        if names := self.names(step):
            self._in_gradients = names
            self._passes += 1

    def end_without_step(self) -> None:
        """End a pass outside autograd, as under Join: do not wait for a step of this rank."""
        self._stepped = True

    def hand_over(self, optimiser: OptimiserView) -> list[str]:
        """Prepare an optimiser's step; return the tensors stepped already."""
        self._check_idle(optimiser)
        self._stepped = True
        if not self._in_gradients or self._handed.get(id(optimiser), 0) == self._passes:
            return []
        self._handed[id(optimiser)] = self._passes
        names = [name for name in self._in_gradients if optimiser.holds(name)]
        keep = self._fresh and self._passes == 1 and self._releasing is not None
        return [*optimiser.hand_over(names, self._decay, keep=keep)]

    def _check_idle(self, optimiser: OptimiserView) -> None:
        if self._idle and any(group.get("momentum") for group in optimiser.optimiser.param_groups):
            changed = [
                name
                for name in sorted(self._idle)
                if optimiser.holds(name) and optimiser.settings(name).get("momentum")
            ]
            self._idle -= set(changed)
            if changed:
                self._log(
                    f"momentum of {changed[0]}{_and_others(changed)} stays in the optimiser: it was 0 at"
                    " attachment"
                )

    def remask(self, masks: Mapping[str, Mask]) -> None:
        state = cleared({f"decay/{name}": value for name, value in self._decay.items()}, masks)
        if state is not None:
            self._decay = under("decay/", state)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the momentum of the weight decay, and whether momentum is (about to be) released."""
        if self._released:
            return {f"{PREFIX}{RELEASED}": torch.tensor(1, dtype=torch.int64, device="cpu")}
        state = {f"{PREFIX}decay/{name}": value.detach().clone() for name, value in self._decay.items()}
        if self._releasing is not None:
            state[f"{PREFIX}{KEPT}"] = torch.tensor(self._kept, dtype=torch.float64, device="cpu")
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        for key, value in under(f"{PREFIX}decay/", state).items():
            if key not in self._layouts or value.numel() != self._layouts[key].numel:
                raise StateError(
                    f"the saved state has decay/{key} of shape {tuple(value.shape)}, but this model does not:"
                    " load the state of the same model"
                )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._decay = {name: value.clone() for name, value in under(f"{PREFIX}decay/", state).items()}
        self._fresh, self._stepped = False, True
        kept = state.get(f"{PREFIX}{KEPT}")
        self._releasing = None if kept is None else "as due in the saved training"
        self._kept = 1.0 if kept is None else float(kept)
        self._in_gradients = frozenset()

    def follow(self, state: Mapping[str, Tensor]) -> None:
        """Leave momentum to the optimiser if it was there when this state was saved."""
        if f"{PREFIX}{RELEASED}" in state and not self._released:
            self._release(None)

    def _log(self, text: str) -> None:
        if self._comm.rank == 0:
            log.info(text)


def adapted(
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    settings: Callable[[str], Mapping[str, Any]],
    *,
    rules: bool,
) -> dict[str, Tensor]:
    """Return a state as an exchange with `own` memory would have saved it.

    An older state has no velocity, and has the momentum of the weight decay in a rule. Unused velocities move
    to the residuals, as in a release. `rules`: whether there are rules now.
    """
    was = "rule0/decay/"
    made = {
        key if rules or not key.startswith(was) else PREFIX + key.removeprefix("rule0/"): value
        for key, value in state.items()
        if "/velocity/" not in key or key in own
    }
    for key in state.keys() - own.keys():
        route, _, name = key.partition("/velocity/")
        residual = made.get(f"{route}/residual/{name}")
        if name and residual is not None and residual.shape == state[key].shape and bool(state[key].any()):
            m = float(settings(name).get("momentum", 0.0))
            made[f"{route}/residual/{name}"] = torch.add(m * state[key], residual, alpha=1 - m)
    new = {key for key in own if "/velocity/" in key} - made.keys()
    return made | {key: torch.zeros_like(own[key]) for key in new}


def _and_others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} other tensors" if len(names) > 1 else ""
