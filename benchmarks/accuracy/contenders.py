"""The methods whose accuracy is measured at equal steps, each with the dense training to compare it with.

A family shares an optimiser: methods for SGD are compared with dense SGD, methods for Adam with dense Adam.
`points` marks methods that should train as well as dense: they may lose this many points of accuracy, plus
one standard error. The others have no bound. Three sets: every method on 4 workers; on 8 workers, the
reductions whose traffic does not grow with their number, and the strategies, on equal and on skewed shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laconic.strategies.distribute import strategy_or_method

POINTS = 1.0  # of accuracy, in percent: what methods without error feedback may lose
STEPS, WORKERS, SEEDS = 1000, 4, 3
SKEW = 0.1  # alpha of the shards that are not alike
MODELS = {"cifar10": "cnn", "shakespeare": "lstm"}  # by task
BITS = {"lpdt()": {"cifar10": 8}}  # an LSTM has no low-bit form: there only its messages are in 8 bits


@dataclass(frozen=True)
class Contender:
    """One method or strategy. `rates`: the highest learning rate by task; the task's own where there is none.

    `skew`: alpha of the workers' shards, as `laconic train --skew` has it; None for shards that are alike.
    `bits`: of the model's layers by task, as --bits has it; float32 where there is none.
    """

    text: str
    family: str
    baseline: str
    points: float | None = None
    workers: int = WORKERS
    rates: Mapping[str, float] = field(default_factory=dict)
    skew: float | None = None
    bits: Mapping[str, int] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        """The method as it prints itself."""
        return repr(strategy_or_method(self.text))

    @property
    def against(self) -> str:
        """The dense training of its family."""
        return repr(strategy_or_method(self.baseline))


def family(
    name: str,
    baseline: str,
    *others: str,
    rates: Mapping[str, float] | None = None,
    points: float = POINTS,
    workers: int = WORKERS,
    skew: float | None = None,
) -> tuple[Contender, ...]:
    """A baseline and its challengers; a spec that ends in '!' may lose so many points and no more."""

    def contender(text: str) -> Contender:
        bound = points if text.endswith("!") else None
        bare = text.rstrip("!")
        return Contender(bare, name, baseline, bound, workers, rates or {}, skew, BITS.get(bare, {}))

    return tuple(map(contender, (baseline, *others)))


CONTENDERS = (
    *family(
        "SGD with Nesterov momentum",
        "dense()",
        "terngrad()!",
        "terngrad(scale='own')!",
        "qsgd(levels=7)!",
        "qsgd(levels=1, block=128)!",
        "nuqsgd()!",
        "natural()!",
        "natural_dithering()!",
        "server(natural(), natural())!",
        "sign()",
        "majority_vote()",
        "auto()",
        "stc(density=0.01)",
        "stc(density=0.0025)",
        "dhqc(density=0.01)",
        "fastsgd()",
        "sketchml()",
        "dgc(density=0.01, warmup_steps=100)",
        "ef21_sgdm()",
        "demo()",
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
        "qcmd_adagrad(cutoff())",
        rates={"cifar10": 0.01, "shakespeare": 0.02},
    ),
    *family(
        "QRDA AdaGrad",
        "qrda_adagrad(dense())",
        "qrda_adagrad()",
        "qrda_adagrad(cutoff())",
        rates={"cifar10": 0.01, "shakespeare": 0.02},
    ),
)

REDUCTIONS = family(
    "SGD with Nesterov momentum",
    "dense()",
    "cgx(bits=4)!",
    "cgx(bits=4, rounding='stochastic')!",
    "deft(density=0.01)",
    "oktopk(density=0.01)",
    "powersgd(rank=2)",
    "lgc()",
    rates={"cifar10": 0.05},
    points=0.0,
    workers=8,
)
ALIKE = (
    "slowmo()",
    "diloco(every=50)",
    "diloco(every=50, momentum=0.9)",
    "noloco(every=50)",
    "sparseloco(every=10, density=0.05)",
    "sgp()!",
    "slowmo(every=48, base=sgp())!",
    "osgp()",
    "dpsgd()",
    "adpsgd()",
    "choco()",
    "deepsqueeze()",
    "lpdt()",
    "lsgd()",
    "easgd()",
)
SKEWED = ("diloco(every=50)", "diloco(every=50, momentum=0.9)", "sgp()", "choco()", "lpdt()", "lsgd()")
STRATEGIES = tuple(
    contender
    for others, skew in ((ALIKE, None), (SKEWED, SKEW))
    for contender in family(
        "SGD with Nesterov momentum",
        "dense()",
        "local_sgd(every=8)",
        *others,
        rates={"cifar10": 0.05},
        workers=8,
        skew=skew,
    )
)
SETS = {"methods": CONTENDERS, "reductions": REDUCTIONS, "strategies": STRATEGIES}
