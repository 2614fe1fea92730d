"""`compress`: train with less memory for what backward needs."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from laconic.activations import compiled
from laconic.activations.calls import FLOATS
from laconic.activations.coding import Coding
from laconic.activations.session import Session
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.transforms.transform import DEFAULT_RUN, Option, Run, Transform


class CodedActivations(Coding, Transform):
    """Configuration of coded activations: a frozen dataclass."""

    option: ClassVar[Option] = "activations"

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN) -> Session:
        return compress(model, self, None if run.scaled else optimizer)  # momentum is not scaled


def compress(model: nn.Module, spec: str | Coding = "comet()", optimizer: Optimizer | None = None) -> Session:
    """Keep inputs of layers as coded bytes from forward to backward, within a `with` block.

        with laconic.activations.compress(model, "comet(share=0.01)", optimizer):
            for x, y in loader:
                ...  # forward, backward, step: as ever

    | saved by | kept as |
    |---|---|
    | convolutions and linear layers | input coded: it reaches the weight's gradient alone |
    | batch norms in training | input coded; `norms="exact"` leaves it |
    | ReLU | nothing beside a coded output, else its mask as a bit an element: exact |
    | max pooling in two dimensions | place in the window: exact |
    | dropout | its mask as a bit an element: exact |
    | anything else | itself |

    A tensor that two layers keep is coded once. Works under autocast, and beside
    `torch.utils.checkpoint`, whose regions keep nothing to code.

    Not seen, and so kept as it is, is what these save: `nn.MultiheadAttention`, which calls its linear layers
    where no call is seen (of an `nn.TransformerEncoderLayer` the feed-forward part alone is coded); layers of
    float64; layers whose weights are computed (parametrised, or gathered by FSDP2); graphs that torch.jit or
    torch.export made. A block in which backward keeps something, and no layer's input is coded, warns.

    Args:
        model: its layers are known by their weights.
        spec: `comet(...)` or `blocks(...)`.
        optimizer: whose momentum says how much error the gradients bear; the gradient itself without one.
            With a GradScaler leave it out, as gradients are scaled there and momentum is not.

    Raises:
        SpecError: for another spec.
        AttachError: for a compiled model, or one that has no convolution or linear layer to train, in float32
            or 16 bits. In a forward pass: for a layer of the model that runs in a compiled function. As a
            block begins: in a compiled function, or in another block.
        NonFiniteError: in a forward pass in which a layer's input holds NaN or Inf; it names the layer.
    """
    coding = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(coding, Coding):
        raise SpecError(f"activations take comet(...) or blocks(...), got {coding!r}")
    compiled.check(model)
    weights = [weight for weight in model.parameters() if weight.dim() > 1 and weight.requires_grad]
    if not weights:
        raise AttachError("the model has no weight of a convolution or linear layer to train")
    if not any(weight.dtype in FLOATS for weight in weights):
        raise AttachError(
            f"the model's weights are {weights[0].dtype}, and activations are coded from float32, bfloat16"
            " and float16: convert the model, or train it without"
        )
    return Session(model, coding, optimizer)
