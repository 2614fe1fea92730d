"""`compress`: train with less memory for what backward needs."""

from __future__ import annotations

import torch
from torch import nn

from laconic.activations.coding import Coding
from laconic.activations.session import Session
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse


def compress(
    model: nn.Module, spec: str | Coding = "comet()", optimizer: torch.optim.Optimizer | None = None
) -> Session:
    """Keep inputs of layers as coded bytes from forward to backward, within a `with` block.

        with laconic.activations.compress(model, "comet(share=0.01)", optimizer):
            for x, y in loader:
                ...  # forward, backward, step: as ever

    | saved by | kept as |
    |---|---|
    | convolutions and linear layers | input coded: it reaches the weight's gradient alone |
    | batch norms in training | input coded; `norms="exact"` leaves it |
    | ReLU | nothing beside a coded output, else a bit an element: exact |
    | max pooling in two dimensions | place in the window: exact |
    | dropout | a bit an element: exact |
    | anything else | itself |

    A tensor that two layers keep is coded once. Works under autocast, and beside
    `torch.utils.checkpoint`, whose regions keep nothing to code.

    Args:
        model: its layers are known by their weights.
        spec: `comet(...)` or `blocks(...)`.
        optimizer: whose momentum says how much error the gradients bear; the gradient itself without one.
            With a GradScaler leave it away, as gradients are scaled there and momentum is not.

    Raises:
        SpecError: for another spec.
        AttachError: for a compiled model, or one that has no convolution or linear layer to train.
        NonFiniteError: in a forward pass in which a layer's input holds NaN or Inf; it names the layer.
    """
    coding = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(coding, Coding):
        raise SpecError(f"activations take comet(...) or blocks(...), got {coding!r}")
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, torch._dynamo.OptimizedModule):
            raise AttachError(
                f"{name or 'the model'} is compiled, and a compiled graph saves what it fuses: compress the"
                " activations of the model as it is, or train the compiled one without"
            )
    if not any(weight.dim() > 1 and weight.requires_grad for weight in model.parameters()):
        raise AttachError("the model has no weight of a convolution or linear layer to train")
    return Session(model, coding, optimizer)
