"""COMET: activations within an error bound derived from the momentum (Jin et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from laconic import kernels
from laconic.activations.coding import Norms
from laconic.activations.compress import Coding
from laconic.core import arguments
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class Comet(Coding):
    """Error-bounded layer inputs. Target: sigma of the weight gradient's error = share * mean |momentum|.

        law     sigma = rms(g) sqrt(n R) eb / sqrt(3)        ours, from independent errors uniform in +-eb
        paper   sigma = 0.32 mean|g| sqrt(N R) eb            the paper's, with N the batch size

    g: gradient of the layer's output; n: terms of a weight's gradient, N * height * width; R: fraction of
    nonzero inputs. Over several calls per step and micro-batches, sigma^2 is summed. Statistics are measured
    in steps 0, 3, 10 and 30, and every `every` steps.

    In between the bound stays: sigma may exceed the target, most with `mode="paper"` (docs/activations.md).

    Equal values have equal, not independent errors: if a feature has one value in many of the n terms, sigma
    exceeds the law by up to sqrt(3 n) times. Use a smaller share there. Zeros are exact.

    Reconstruction: the public code has a constant bound and saves no memory. Ours: the kernel, without
    prediction, and the encoding of batch norms' inputs (off with `norms="exact"`), with the same law for
    their scale's gradient. Their input's gradient has a relative error of about `share` on average over
    channels, more in a channel whose gradient correlates with its input.
    """

    paper: ClassVar[str] = "Jin et al. 2021, arXiv:2111.09562"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("comet(share=0.05)", "comet(mode='paper', norms='exact')")
    adaptive: ClassVar[bool] = True
    keeps_signs: ClassVar[bool] = True

    share: float = 0.01
    every: int = 100
    mode: Literal["law", "paper"] = "law"
    norms: Norms = "bounded"

    def __post_init__(self) -> None:
        arguments.number("share", self.share, above=0, most=1)
        arguments.whole("every", self.every, 1)
        arguments.choice("mode", self.mode, ("law", "paper"))
        arguments.choice("norms", self.norms, ("bounded", "exact"))

    def encode(self, x: Tensor, bound: float, signs: bool, key: int) -> Tensor:
        return kernels.error_bound_encode(x, bound, "zeros" if signs else "bins")

    def decode(self, wire: Tensor, n: int) -> Tensor:
        return kernels.error_bound_decode(wire, n)

    def nonzero(self, wire: Tensor, n: int) -> Tensor:
        return kernels.error_bound_support(wire, n)
