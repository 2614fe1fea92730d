"""Zeroed watch: notices gradients that were exchanged, and then thrown away by zero_grad() without a step.

What a method has not sent of them is still in its memory and comes back with later gradients: a GAN's
discriminator would learn from its generator's loss. It looks as the next gradient is about to be added, which
is the one moment at which gradients that are gone differ from those of an accumulation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from laconic.core.warning import warn


class ZeroedWatch:
    """Warns once. `pending`: whether exchanged gradients wait for a step."""

    def __init__(self, parameters: Iterable[Tensor], method: str) -> None:
        self.pending = False
        self.warned = False
        self._method = method
        self._parameters = [*parameters]
        known = weakref.ref(self)  # a hook must not keep alive what the model holds

        def before_adding(grad: Tensor) -> None:
            watch = known()
            if watch is not None and watch.pending:
                watch._look()

        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(before_adding)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]

    def _look(self) -> None:
        self.pending = False
        gradients = (parameter.grad for parameter in self._parameters)
        if self.warned or any(grad is not None and bool(grad.any()) for grad in gradients):
            return
        self.warned = True
        warn(
            "gradients were exchanged and then thrown away by zero_grad(), without optimizer.step():"
            f" {self._method} holds back what it has not sent of them, and that comes back with later"
            " gradients. Run a backward pass whose gradients are not used under model.no_sync(), or call"
            " handle.discard() where a step is skipped",
        )

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
