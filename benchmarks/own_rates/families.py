"""The methods of `benchmarks.own_rates`, by optimiser and net, with remarks."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.common.small_net import (
    BY_MUON,
    BY_SIGNS,
    CNN,
    DIGIT_NET,
    RNN,
    SMALL_GPT,
    SMALL_NET,
    WITHOUT_MOMENTUM,
)
from benchmarks.common.workers import Problem

SEEDS = (0, 1, 2)
FOUR_BITS = "scatter_reduce(logquant(levels=7))"
STREAMING = f"diloco(every=30, momentum=0.9, fragments=3, overlap=10, mix=0.5, compressor={FOUR_BITS})"
WITH_ONE_SEED = (
    "diloco(every=30, momentum=0.9)",
    "bf16()",
    "onebit_adam()",
    "sparse_adam()",
    "powersgd(rank=4)",
    STREAMING,
    "sparseloco(every=10, density=0.05)",
    "demo()",
)


@dataclass(frozen=True)
class Family:
    """Methods that share an optimiser. `usual`: the rate that each tries first. `folder`: of its results.

    `why`: a remark for the page. `search_steps`: of the runs that find the rate, if shorter.
    `one_seed`: methods that are trained with one seed.
    """

    name: str
    usual: float
    baseline: str
    others: tuple[str, ...]
    problem: Problem = SMALL_NET
    steps: int = 2000
    task: str = "cifar10"
    folder: str = "cifar10"
    why: str = ""
    search_steps: int | None = None
    one_seed: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[str, ...]:
        """The baseline, then the others."""
        return self.baseline, *self.others

    def seeds(self, spec: str) -> tuple[int, ...]:
        """Return the seeds of a method's trainings at its own rate."""
        return SEEDS[:1] if spec in self.one_seed else SEEDS


LOCAL_MOMENTUM = Family(
    "SGD with momentum before compression",
    0.025,
    "dense()",
    (
        "topk(density=0.01)",
        "error_fed(topk(density=0.01), ahead=0.0)",
        "error_fed(topk(density=0.01), momentum='optimizer')",
        "dgc(density=0.01, warmup_steps=400)",
        "stc(density=0.01)",
        "sketchml()",
        "deft(density=0.01)",
        "deft(density=0.05)",
        "deft(density=0.001)",
        "topk(density=0.001)",
        "dgc(density=0.001, warmup_steps=400)",
        "oktopk(density=0.01)",
        "micro(density=0.01)",
        "sign()",
    ),
    steps=4000,
    folder="cifar10-4000",
    why="Methods with error feedback apply momentum before compression; one row of `topk` leaves it to the"
    " optimiser.",
)
WITH_MOMENTUM = Family(
    "SGD with momentum",
    0.05,
    "dense()",
    (
        "cgx(bits=4)",
        "qsgd(levels=7)",
        "qsgd(levels=1, block=128)",
        "natural()",
        "terngrad()",
        "terngrad(scale='own')",
        "powersgd(rank=2)",
        "dense_first(powersgd(rank=2), steps=200)",
        "powersgd(rank=4)",
        "powersgd(rank=8)",
        "majority_vote()",
        "dgc(density=0.01, warmup_steps=200)",
        "ef21_sgdm()",
        "diloco(every=20)",
        "diloco(every=20, momentum=0.9)",
        "sparseloco(every=10, density=0.05)",
    ),
)
LONG_GPT = Family(
    "AdamW and bf16 autocast, the same transformer",
    4e-3,
    "dense()",
    (
        "cgx(bits=4)",
        "diloco(every=30)",
        *WITH_ONE_SEED,
    ),
    SMALL_GPT,
    5000,
    "shakespeare",
    "shakespeare-5000",
    "Rates were found by runs of 1,000 steps.",
    search_steps=1000,
    one_seed=WITH_ONE_SEED,
)
FAMILIES = (
    WITH_MOMENTUM,
    LOCAL_MOMENTUM,
    Family(
        "SGD with Nesterov momentum before compression, the CNN of `laconic train cifar10`",
        0.1,
        "dense()",
        ("topk(density=0.01)", "stc(density=0.01)", "deft(density=0.01)", "sign()"),
        CNN,
        1500,
        folder="cifar10-cnn",
        why="289,000 parameters, 32 images per worker and step, the recipe of the task.",
    ),
    Family(
        "SGD with Nesterov momentum before compression, the LSTM of `laconic train shakespeare`",
        3.0,
        "dense()",
        ("topk(density=0.01)", "stc(density=0.01)", "deft(density=0.01)", "sign()"),
        RNN,
        1500,
        "shakespeare",
        "shakespeare-lstm",
        "16 windows per worker and step, the recipe of the task.",
    ),
    Family(
        "SGD without momentum",
        0.25,
        "dense()",
        ("topk(density=0.01)", "stc(density=0.01)", "sign()", "ef21_sgdm()", "ef21_sgdm(topk(density=0.1))"),
        WITHOUT_MOMENTUM,
        folder="cifar10-without-momentum",
        why="Momentum in the optimiser repeats residuals, which are applied late. Without momentum `topk` and"
        " `stc` do better than dense training without momentum. EF21 follows the gradients slowly when one"
        " entry in a hundred changes per step; with one in ten it keeps up.",
    ),
    Family(
        "LGC, MNIST",
        0.05,
        "dense()",
        (
            "cltk(density=0.01)",
            "lgc(density=0.01, dense_steps=40, train_steps=120)",
            "lgc(density=0.01, dense_steps=40, train_steps=240)",
            "lgc(density=0.01, dense_steps=40, train_steps=120, instance='per_node')",
            "lgc(density=0.01, dense_steps=40, train_steps=120, last_layer='topk')",
        ),
        DIGIT_NET,
        400,
        "mnist",
        "mnist",
        "`cltk` sends the same positions with exact values, in the first and last layer too. With codes for"
        " fewer steps, LGC loses less. A decoder for each rank is not better than one for the average code."
        " With the last layer by top-k, a seed may learn nothing.",
    ),
    Family(
        "LGC, MNIST",
        0.05,
        "dense()",
        ("cltk(density=0.01)", "lgc(density=0.01, dense_steps=40, train_steps=240)"),
        DIGIT_NET,
        1600,
        "mnist",
        "mnist-1600",
    ),
    Family("Adam", 2e-3, "adam()", ("onebit_adam(warmup_steps=400)",)),
    Family(
        "AMSGrad",
        2e-3,
        "comp_ams(dense())",
        ("comp_ams(topk(density=0.01))", "comp_ams(sign())"),
    ),
    Family(
        "AdamW and bf16 autocast, a small transformer",
        2e-3,
        "dense()",
        (
            "bf16()",
            "cgx(bits=4)",
            "powersgd(rank=4)",
            "onebit_adam(warmup_steps=120)",
            "topk(density=0.01)",
            "demo()",
            "diloco(every=30)",
            "diloco(every=30, momentum=0.9)",
            STREAMING,
            "sparseloco(every=10, density=0.05)",
            "noloco(every=30)",
            "by_machine(diloco(every=30, momentum=0.9), ranks_per_node=2)",
        ),
        SMALL_GPT,
        600,
        "shakespeare",
        "shakespeare",
    ),
    Family(
        "AdamW and bf16 autocast, the same transformer",
        4e-3,
        "dense()",
        ("onebit_adam()", "sparse_adam()", "sparse_adam(warmup_steps=400)"),
        SMALL_GPT,
        2000,
        "shakespeare",
        "shakespeare-2000",
        "Bytes include the warm-up, in which gradients are not compressed. The automatic warm-up of"
        " `sparse_adam()` does not end in these steps: Adam's variance has not settled.",
    ),
    LONG_GPT,
    Family(
        "Muon with AdamW and bf16 autocast, the same transformer",
        4e-3,
        "dense()",
        ("diloco(every=30)",),
        BY_MUON,
        5000,
        "shakespeare",
        "shakespeare-5000-by-muon",
        "`diloco` with Muon inside is MuLoCo. Rates were found by runs of 1,000 steps.",
        search_steps=1000,
        one_seed=("dense()", "diloco(every=30)"),
    ),
    Family(
        "Muon with AdamW and bf16 autocast, the same transformer",
        4e-3,
        "dense()",
        ("cgx(bits=4)", "dion2()", "dion2(fraction=1.0)"),
        BY_MUON,
        600,
        "shakespeare",
        "shakespeare-by-muon",
        "Muon, without Nesterov's correction, trains the matrices inside layers, AdamW the rest, at the same"
        " rate. `dion2(fraction=1.0)` is Muon whose momentum, not the gradient, is exchanged.",
    ),
    Family(
        "Steps by sign and bf16 autocast, the same transformer",
        5e-4,
        "dense()",
        ("demo()",),
        BY_SIGNS,
        600,
        "shakespeare",
        "shakespeare-by-signs",
        "DeMo was published with sign steps of the decoded momentum, not with Adam's. It is not behind dense"
        " training by signs of gradients, which has no momentum; both are behind AdamW above.",
    ),
)
