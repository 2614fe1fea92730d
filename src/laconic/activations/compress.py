"""`compress`: train with less memory for saved activations."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from laconic.activations import compiled
from laconic.activations.coding import CodingRule
from laconic.activations.session import Session
from laconic.activations.torch_call import FLOATS
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.transforms.transform import DEFAULT_RUN, Option, Run, Transform


class Coding(CodingRule, Transform):
    """Configuration of coded activations."""

    option: ClassVar[Option] = "activations"

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN) -> Session:
        return compress(model, self, None if run.scaled else optimizer)  # momentum is not scaled


def compress(model: nn.Module, spec: str | Coding = "comet()", optimizer: Optimizer | None = None) -> Session:
    """Save layer inputs as encoded bytes from forward to backward, within a `with` block.

        with laconic.activations.compress(model, "comet(share=0.01)", optimizer):
            for x, y in loader:
                ...  # forward, backward, step as usual

    | saved by | stored as |
    |---|---|
    | convolutions and linear layers | encoded input; only the weight's gradient sees the error |
    | batch norms in training | encoded input; exact with `norms="exact"` |
    | ReLU | nothing if a layer encodes its output, else a mask of one bit per element: exact |
    | max pooling in two dimensions | position in the window: exact |
    | dropout | mask of one bit per element: exact |
    | anything else | the tensor |

    A tensor saved by two layers is encoded once. Works under autocast and with `torch.utils.checkpoint`,
    whose regions save nothing to encode.

    Uncompressed: `nn.MultiheadAttention` (also in `nn.TransformerEncoderLayer`), float64 layers, layers with
    computed weights (parametrised, or gathered by FSDP2), and graphs of torch.jit or torch.export. A block
    that encodes no layer input warns.

    Args:
        model: Layers are recognised by their weights.
        spec: `comet(...)` or `blocks(...)`.
        optimizer: Its momentum sets the error bound; without it, the gradient does. Omit it with a
            GradScaler, which scales only gradients.

    Raises:
        SpecError: For another spec.
        AttachError: For a compiled model, or a model without a trainable convolution or linear layer in
            float32, bfloat16 or float16. In a forward pass: a layer runs in a compiled function. On entering
            the block: inside a compiled function or another block.
        NonFiniteError: In a forward pass, if a layer's input has NaN or Inf; names the layer.
    """
    coding = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(coding, Coding):
        raise SpecError(f"activations take comet(...) or blocks(...), got {coding!r}")
    compiled.check(model)
    weights = [weight for weight in model.parameters() if weight.dim() > 1 and weight.requires_grad]
    if not weights:
        raise AttachError("the model has no trainable weight of a convolution or linear layer")
    if not any(weight.dtype in FLOATS for weight in weights):
        raise AttachError(
            f"the model's weights are {weights[0].dtype}, but activations must be float32, bfloat16 or"
            " float16: convert the model, or train it without compressed activations"
        )
    return Session(model, coding, optimizer)
