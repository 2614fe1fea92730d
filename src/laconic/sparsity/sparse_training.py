"""Sparse training: masks on a model's weights, applied by hooks.

backward      mask each weight's gradient; record the dense gradient if it counts
before step   choose new masks from the dense gradients summed over ranks, instead of the step, or
after step    choose new masks after the step; set masked entries to zero
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic import kernels
from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.mask import Mask, set_mask
from laconic.core.turn import Turn
from laconic.core.warning import warn
from laconic.optim.master_weights import masters_of
from laconic.optim.unwrapping import check_state
from laconic.sparsity.dense_gradients import DenseGradients
from laconic.sparsity.dropped_weights import DroppedWeightsCheck
from laconic.sparsity.flops import Flops, forward_flops
from laconic.sparsity.mask_agreement import check_equal_masks
from laconic.sparsity.mask_rule import MaskRule, Moment
from laconic.sparsity.slots import clear_
from laconic.sparsity.state import check_not_zeroed, limits, read_state
from laconic.sparsity.stats import SparsityStats
from laconic.transforms.step_callbacks import StepCallbacks
from laconic.transforms.transform import TransformHandle

START = -1  # turn of the first masks
FORMAT = 2  # 1 has no "nonzero"


@outside_inference_mode("stats", "remove", "state_dict", "load_state_dict")
class SparseTraining(TransformHandle):
    """Handle of `laconic.sparsity.sparsify`. `weights`, `masks` (bool): by parameter name."""

    def __init__(
        self,
        model: nn.Module,
        sparsifier: MaskRule,
        weights: Mapping[str, Tensor],
        shares: Mapping[str, float],
        optimizer: Optimizer,
        *,
        steps: int,
        seed: int,
        comm: Metered | None,
    ) -> None:
        self.model, self.sparsifier = model, sparsifier
        self.steps, self.seed = steps, seed
        self.turn = self.updates = 0
        self.masks: dict[str, Tensor] = {}
        self._dense = sum(weight.numel() for name, weight in weights.items() if shares[name] == 1)
        self._shares = {name: share for name, share in shares.items() if share < 1}
        self.weights = {name: weights[name] for name in self._shares}
        self._optimizer = optimizer
        self._comm = comm
        self._changed = 0.0
        self._warned = False
        self._logged = -1  # updates in the last event
        self._in_step = False
        self._dense_gradients = DenseGradients(self.weights)
        self._hidden_grads: list[tuple[Tensor, Tensor]] = []
        self._hooks: list[RemovableHandle | StepCallbacks] = []
        self._dropped_check = DroppedWeightsCheck()

    @property
    def fingerprint(self) -> dict[str, str]:
        return {
            "the sparsifier": repr(self.sparsifier),
            "steps=": str(self.steps),
            "the seed": str(self.seed),
            "the masked weights": str({name: tuple(each.shape) for name, each in self.weights.items()}),
        }

    @property
    def densities(self) -> dict[str, float]:
        """Fraction in use of each masked weight."""
        return {name: float(mask.sum()) / mask.numel() for name, mask in self.masks.items()}

    def stats(self) -> SparsityStats:
        whole = self._dense + sum(mask.numel() for mask in self.masks.values())
        used = self._dense + sum(int(mask.sum()) for mask in self.masks.values())
        sent = 0 if self._comm is None else self._comm.snapshot().payload_sent
        density = used / whole if whole else 1.0
        total = sum(each.numel() for each in self.model.parameters())
        in_model = 1 - (whole - used) / total
        return SparsityStats(self.turn, self.updates, density, in_model, self._changed, sent)

    def flops(self, *inputs: Any) -> Flops:
        """Return the operations for a batch; runs `model(*inputs)` once, in evaluation."""
        counted = sum(self.sparsifier.counts(turn, self.steps) for turn in range(self.steps))
        return Flops.of(*forward_flops(self.model, *inputs), counted / self.steps)

    def events(self) -> list[dict[str, Any]]:
        if self.updates == self._logged:
            return []
        self._logged, figures = self.updates, self.stats()
        densities = {"density": figures.density, "model_density": figures.model_density}
        return [{"kind": "masks", **densities, "changed": figures.changed}]

    def start(self) -> None:
        for name, weight in self.weights.items():
            used = self.sparsifier.first_mask(weight.numel(), self._shares[name], self._key(name, START))
            self._set_mask(name, used.view(weight.shape).to(weight.device))
            self._hooks.append(weight.register_hook(self._mask_hook(name)))  # type: ignore[no-untyped-call]
            added = self._dense_gradients.accumulate_hook(name)
            self._hooks.append(weight.register_post_accumulate_grad_hook(added))  # type: ignore[no-untyped-call]
        if self.weights:
            callbacks = self._before, self._after, self._dense_gradients.skip_step
            weights = self.weights.values()
            self._hooks.append(
                StepCallbacks(repr(self.sparsifier), self._optimizer, weights, *callbacks, first=True)
            )

    def remove(self) -> None:
        """Remove the masks, on every rank. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        for weight in self.weights.values() if self._hooks else ():
            set_mask(weight, None)
        self._hooks.clear()
        if self._comm is not None and isinstance(self._comm.comm, TorchComm):
            self._comm.comm.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit per entry, and the turn; equal on all ranks.

        Save it between steps. With `accumulate` above 1 it has float32 `scores` that differ between ranks.
        """
        bits = {name: kernels.pack_bits(mask.flatten().int().cpu(), 1) for name, mask in self.masks.items()}
        return {
            "format": FORMAT,
            "sparsifier": repr(self.sparsifier),
            "steps": self.steps,
            "seed": self.seed,
            "turn": self.turn,
            "updates": self.updates,
            "changed": self._changed,
            "masks": bits,
            "nonzero": {name: int(each.detach().count_nonzero()) for name, each in self.weights.items()},
            "scores": {name: score.clone() for name, score in self._dense_gradients.turns.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state bit for bit; load it after model and optimiser.

        Raises:
            StateError: Nothing is changed. The state is damaged or of another sparsifier, length, seed or
                model; `remove()` was called; or the model was loaded before `sparsify`.
        """
        if self.weights and not self._hooks:
            raise StateError("remove() was called: sparsify the model again, then load")
        most = {name: self.sparsifier.first_density(share) for name, share in self._shares.items()}
        counts = limits(self.weights, self._shares, most)
        masks, scores = read_state(state, self.state_dict(), self.weights, counts, self.sparsifier.layout)
        if self.turn == 0 and "nonzero" in state:
            check_not_zeroed(self.weights, self.masks, masks, state["nonzero"])
        self.masks.clear()  # saved entries keep their value
        for name, used in masks.items():
            self._set_mask(name, used)
        self.turn, self.updates, self._changed = state["turn"], state["updates"], state["changed"]
        self._logged = self.updates
        self._dense_gradients.clear()
        self._dense_gradients.turns.update(scores)
        self._dropped_check = DroppedWeightsCheck()

    def _key(self, name: str, turn: int) -> int:
        return Turn(turn, seed=self.seed).common(name)

    def _master(self, name: str) -> Tensor:
        weight, masters = self.weights[name], masters_of(self._optimizer)
        return weight if masters is None else masters.now(weight)

    def _set_mask(self, name: str, used: Tensor) -> None:
        weight, before = self.weights[name], self.masks.get(name, used)
        self.masks[name] = used
        set_mask(weight, Mask.of(weight, used))
        clear_(self._optimizer, self._master(name), ~(used & before))

    def _mask_hook(self, name: str) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            if self.sparsifier.counts(self.turn, self.steps):
                self._dense_gradients.record(name, grad)
            return grad.masked_fill(~self.masks[name], 0)

        return hook

    def _before(self) -> None:
        self._hidden_grads.clear()
        self._in_step = True
        self._dropped_check.check((name, self._master(name), mask) for name, mask in self.masks.items())
        if self.turn == 1 or self._due():  # state is created at the first step
            check_state(self._optimizer, "sparse training")
        if self.sparsifier.replaces_step and self._due() and self._update():
            groups = (group["params"] for group in self._optimizer.param_groups)
            present = [each for group in groups for each in group if each.grad is not None]
            self._hidden_grads = [(each, each.grad) for each in present]
            for each in present:
                each.grad = None  # optimisers skip it
        for name, mask in self.masks.items():
            if (grad := self._master(name).grad) is not None:
                grad.masked_fill_(~mask, 0)

    def _after(self) -> None:
        for parameter, grad in self._hidden_grads:
            parameter.grad = grad
        self._hidden_grads.clear()
        begun, self._in_step = self._in_step, False
        if self.sparsifier.replaces_step and self._due() and not begun:
            self._warn("were not used, as the hook before the step is gone")
        for name, mask in self.masks.items():
            self._master(name).masked_fill_(~mask, 0)
        if not self.sparsifier.replaces_step and self._due():
            self._update()
        self._dense_gradients.finish_step(self._counts_later(self.turn), self._comm)
        self.turn += 1

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"the dense gradients of turn {self.turn} {what}: masks do not change until the next update",
            )

    def _due(self) -> bool:
        return self.sparsifier.due(self.turn, self.steps)

    def _counts_later(self, turn: int) -> bool:
        return self.sparsifier.counts(turn, self.steps) and not self.sparsifier.due(turn, self.steps)

    def _update(self) -> bool:
        """Choose new masks. Return False, unchanged, if a score is not finite."""
        counts = self.sparsifier.counts(self.turn, self.steps)
        several = self._counts_later(self.turn - 1)
        scores = self._dense_gradients.total(self._comm, several) if counts else {}
        if not all(bool(score.isfinite().all()) for score in scores.values()):
            self._warn("are not finite")
            self._dense_gradients.clear()
            return False
        if (
            scores
            and not any(bool(score.any()) for score in scores.values())
            and any(weight.requires_grad for weight in self.weights.values())
        ):
            self._warn("are zero or were not seen (gradients assigned by a script do not pass hooks)")
        chosen = {}
        for name, weight in self.weights.items():
            at = Moment(self.turn, self.steps, self._key(name, self.turn))
            share, score = self._shares[name], scores.get(name)
            used = chosen[name] = self.masks[name].flatten()
            if weight.requires_grad and (score is None or bool(score.any())):  # else frozen
                chosen[name] = self.sparsifier.updated(self._master(name).flatten(), used, score, share, at)
        if self._comm is not None:
            check_equal_masks(chosen, self._comm, self.turn)
        new = sum(int((used & ~self.masks[name].flatten()).sum()) for name, used in chosen.items())
        self._changed = new / max(1, sum(int(used.sum()) for used in chosen.values()))
        for name, used in chosen.items():
            self._set_mask(name, used.view(self.masks[name].shape))
        self._dense_gradients.clear()
        self.updates += 1
        return True
