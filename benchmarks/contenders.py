"""The methods whose accuracy is measured at equal steps, each with the dense training it is held against.

A family shares an optimiser: methods for SGD are compared with dense SGD, methods for Adam with dense Adam.
`promised` marks what has no error feedback and should train as dense does: within POINTS of its accuracy.
Everything else is shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laconic.strategies.method import lift

POINTS = 1.0  # of accuracy, in percent; plus one standard error
STEPS, WORKERS, SEEDS = 1000, 4, 3
MODELS = {"cifar10": "cnn", "shakespeare": "lstm"}  # by task


@dataclass(frozen=True)
class Contender:
    """One method. `rates`: the highest learning rate by task; the task's own where there is none."""

    text: str
    family: str
    baseline: str
    promised: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        """The method as it prints itself."""
        return repr(lift(self.text))

    @property
    def against(self) -> str:
        """The dense training of its family."""
        return repr(lift(self.baseline))


def family(
    name: str, baseline: str, *others: str, rates: Mapping[str, float] | None = None
) -> tuple[Contender, ...]:
    """A baseline and its challengers; a spec that ends in '!' promises its accuracy."""
    texts = (baseline, *others)
    return tuple(
        Contender(text.rstrip("!"), name, baseline, text.endswith("!"), rates or {}) for text in texts
    )


CONTENDERS = (
    *family(
        "SGD with Nesterov momentum",
        "dense()",
        "terngrad()!",
        "terngrad(scale='own')!",
        "qsgd(levels=7)!",
        "qsgd(levels=1, bucket=128)!",
        "nuqsgd()!",
        "natural()!",
        "natural_dithering()!",
        "server(natural(), natural())!",
        "sign()",
        "majority_vote()",
        "stc(density=0.01)",
        "stc(density=0.0025)",
        "dhqc(density=0.01)",
        "fastsgd()",
        "sketchml()",
        "dgc(density=0.01, warmup_steps=100)",
        rates={"cifar10": 0.05},  # at 0.1 dense gains nothing, and the noise of any quantiser costs points
    ),
    *family(
        "Adam",
        "adam()",
        "onebit_adam(warmup_steps=200)",
        "zero_one_adam(freeze_steps=200, double_every=200)",
        rates={"cifar10": 1e-3, "shakespeare": 2e-3},
    ),
    *family(
        "AMSGrad",
        "comp_ams(dense())",
        "comp_ams(topk(density=0.01))",
        "comp_ams(sign())",
        rates={"cifar10": 1e-3, "shakespeare": 2e-3},
    ),
    *family(
        "QCMD AdaGrad",
        "qcmd_adagrad(dense())",
        "qcmd_adagrad()",
        rates={"cifar10": 0.01, "shakespeare": 0.02},
    ),
    *family(
        "QRDA AdaGrad",
        "qrda_adagrad(dense())",
        "qrda_adagrad()",
        rates={"cifar10": 0.01, "shakespeare": 0.02},
    ),
)
