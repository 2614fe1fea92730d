"""Training step on a batch with several augmentations of each example.

Hoffer et al. 2020, arXiv:1901.09335, with its code's options: sequential chunks, averaged outputs, and a
correction of the gradient's norm, as gradients of copies partly cancel:

    factor = mean_j |g_j| / |mean_j g_j|        of copy j's gradient g_j, every `correct_every` steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.core import arguments
from laconic.core.errors import AttachError, SpecError, StateError
from laconic.ddp.compress import inside

Loss = Callable[[Any, Tensor], Tensor]


class Copies:
    """Backward passes for duplicate-major batches of `laconic.data.batch_augmentation(across="batch")`.

    Args:
        copies: Copies of each example in a batch.
        outputs: "each": the mean loss over all inputs, one copy after the other, with the memory of one copy
            and ghost BatchNorm. "averaged": the loss of an example's mean output, in one pass.
        correct_every: Steps between measurements of the norm's factor, each an extra forward and backward
            pass; 0: no correction. Only with "each".

    Raises:
        SpecError: An argument is out of range.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> x, y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.zeros(4, 1)
    >>> loss = Copies(2).backward(model, nn.functional.mse_loss, x, y)
    >>> torch.allclose(loss, nn.functional.mse_loss(model(x), y).detach())
    True
    """

    def __init__(
        self, copies: int, *, outputs: Literal["each", "averaged"] = "each", correct_every: int = 0
    ) -> None:
        arguments.whole("copies", copies, 1)
        arguments.choice("outputs", outputs, ("each", "averaged"))
        arguments.whole("correct_every", correct_every, hint="0 disables the correction")
        if outputs == "averaged" and correct_every:
            raise SpecError(
                f"correct_every must be 0 with outputs='averaged', which has one gradient for all copies, got"
                f" {correct_every}"
            )
        self.copies, self.outputs, self.correct_every = copies, outputs, correct_every
        self.factor = 1.0
        self._step = 0

    def backward(self, model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
        """Add this step's gradients to the model's parameters; DistributedDataParallel exchanges them once.

        Args:
            model: Under DistributedDataParallel or plain; compressed or not.
            loss: Mean loss of outputs and labels.
            x: Inputs, `copies` times B rows, all of copy 0 first.
            y: Labels, in the same order.

        Returns:
            The mean loss, detached, without the correction's factor.

        Raises:
            SpecError: `copies` does not divide the number of rows, or inputs and labels have unequal lengths.
            AttachError: With `correct_every`, the model has no trainable parameter.
        """
        if len(x) != len(y):
            raise SpecError(f"pass one label per input: {len(x)} rows of inputs, {len(y)} of labels")
        for each in (x, y):
            if len(each) % self.copies:
                raise SpecError(
                    f"the number of rows must be a multiple of copies={self.copies}, got {len(each)}: pass"
                    " unchanged batches of batch_augmentation(..., across='batch')"
                )
        xs, ys = x.chunk(self.copies), y.chunk(self.copies)
        if self.correct_every and self._step % self.correct_every == 0:
            self.factor = self._measure_factor(model, loss, xs, ys)
        self._step += 1
        if self.outputs == "averaged":
            found = model(x)
            result = loss(found.unflatten(0, (self.copies, -1)).mean(0), ys[0])
            torch.autograd.backward(result)
            return result.detach()
        replicated, parts = inside(model), []
        for number, (rows, labels) in enumerate(zip(xs, ys, strict=True)):
            last = number == self.copies - 1
            with nullcontext() if replicated is None or last else replicated.no_sync():
                part = loss(model(rows), labels) / self.copies
                torch.autograd.backward(part * self.factor)
            parts.append(part.detach())
        return torch.stack(parts).sum()

    def _measure_factor(
        self, model: nn.Module, loss: Loss, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...]
    ) -> float:
        replicated = inside(model)
        trained = [each for each in model.parameters() if each.requires_grad]
        if not trained:
            raise AttachError("no parameter of this model requires a gradient: nothing to train")
        buffers = [each.clone() for each in model.buffers()]
        total = [torch.zeros_like(each) for each in trained]
        lengths = []
        with nullcontext() if replicated is None else replicated.no_sync():
            for rows, labels in zip(xs, ys, strict=True):
                found = torch.autograd.grad(loss(model(rows), labels), trained, allow_unused=True)
                grads = [grad.to_dense() for grad in found if grad is not None]
                lengths.append(norm(grads))
                sums = [each for each, grad in zip(total, found, strict=True) if grad is not None]
                for sum_, grad in zip(sums, grads, strict=True):
                    sum_ += grad
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        together = norm(total)
        factor = (
            sum(lengths, together.new_zeros(())) / together if together > 0 else torch.ones_like(together)
        )
        if replicated is not None:
            dist.all_reduce(factor, group=replicated.process_group)
            factor /= dist.get_world_size(replicated.process_group)
        return float(factor)

    def state_dict(self) -> dict[str, float]:
        return {"step": self._step, "factor": self.factor}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state. Raise `StateError` for an invalid one."""
        numbers = all(isinstance(each, int | float) for each in state.values())
        if set(state) != {"step", "factor"} or not numbers:
            raise StateError(
                f"the state must have the numbers step and factor of Copies.state_dict(), got"
                f" {dict(state)!r:.80}"
            )
        self._step, self.factor = int(state["step"]), float(state["factor"])


def norm(grads: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(grads).detach().float().cpu()
