"""Options of a training, from which `laconic train` makes flags, checks, `config.json` and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING as MISSING
from dataclasses import Field, dataclass, field, fields
from inspect import get_annotations
from typing import Any

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.data.copies_sampler import Across
from laconic.recipes.large_batch import DEFAULTS, Kind
from laconic.tools.tasks.large_batch import LargeBatch
from laconic.tools.tasks.skew import check_skew

Check = Callable[[str, Any], None]  # (flag, value); raises `SpecError`

# headings of --help
SMALL = "Few bits, few weights, little memory"
LARGE = "Large batches"
LOST = "Lost workers"


@dataclass(frozen=True)
class OptionInfo:
    """Description of an option.

    `group`: heading of --help; `fixed`: equal in a resumed run; `recorded`: in `config.json`; `with_stages`:
    allowed with stages or blocks.
    """

    help: str
    group: str | None = None
    flag: str | None = None
    metavar: str | None = None
    check: Check | None = None
    fixed: bool = False
    recorded: bool = True
    with_stages: bool = True


def option(help: str, default: Any = None, **info: Any) -> Any:
    return field(default=default, metadata={"info": OptionInfo(help, **info)})


def info(each: Field[Any]) -> OptionInfo:
    found: OptionInfo = each.metadata["info"]
    return found


def flag(each: Field[Any]) -> str:
    return info(each).flag or f"--{each.name.replace('_', '-')}"


def options(of: type) -> list[Field[Any]]:
    own = get_annotations(of)
    found = [each for each in fields(of) if "info" in each.metadata]
    return sorted(found, key=lambda each: each.name not in own)


def at_least(least: int, word: str = "") -> Check:
    def check(name: str, value: Any) -> None:
        if value < least:
            raise SpecError(f"{name} must be {least}{word and f' ({word})'} or more, got {value}")

    return check


def whole(least: int, most: int = arguments.MOST) -> Check:
    return lambda name, value: arguments.whole(name, value, least, most)


def _rate(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise SpecError(f"{name} must be a number above 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    lr: float | None = option("peak learning rate [default: by optimiser]", check=_rate, fixed=True)
    skew: float | None = option(
        "each worker has its own examples, with shares of each label drawn from Dirichlet(ALPHA): 0.1 skews"
        " strongly, 100 hardly at all; for text, shares of each tenth of it [default: all workers draw from"
        " all examples]",
        metavar="ALPHA",
        check=lambda _, value: check_skew(value),
        fixed=True,
        with_stages=False,
    )
    checkpoint_every: int = option("steps between checkpoints; 0: none", 0, check=at_least(0, "none"))
    bits: int | None = option(
        "train the model with layers of 2 to 8 bits, simulated [default: float32]",
        group=SMALL,
        check=whole(2, 8),
        fixed=True,
        with_stages=False,
    )
    precision: str | None = option(
        "of forward and backward: fp32, bf16 or fp16, by autocast; fp16 with loss scaling [default: fp32]",
        group=SMALL,
        fixed=True,
        with_stages=False,
    )
    lowbit: str | None = option(
        "train towards weights of a few bits: \"admm(table='ternary')\", or with few bits in products:"
        ' "binarise()", for model bnn of mnist and cifar10; tests use the few-bit weights [default: float32]',
        group=SMALL,
        metavar="SPEC",
        fixed=True,
        with_stages=False,
    )
    sparsity: str | None = option(
        'train with few of the weights: "rigl(density=0.1)", "static_masks(density=0.1)"; methods only, which'
        ' then go inside "masked(...)"; or keep few of the inputs too: "swat(sparsity=0.9)" [default: all'
        " weights]",
        group=SMALL,
        metavar="SPARSIFIER",
        fixed=True,
        with_stages=False,
    )
    activations: str | None = option(
        'compress saved activations, such as "comet()" [default: uncompressed]',
        group=SMALL,
        metavar="SPEC",
        fixed=True,
        with_stages=False,
    )
    recipe: Kind | None = option(
        "settings for large batches: lamb, lars or sgd, with a rate scaled from the task's batch to --batch,"
        " gradual warm-up and polynomial decay [default: the task's own]",
        group=LARGE,
        check=lambda name, value: arguments.choice(name, value, tuple(DEFAULTS)),
        fixed=True,
        with_stages=False,
    )
    copies: int = option(
        "batch augmentation: independent augmentations of each example",
        1,
        group=LARGE,
        check=whole(1),
        fixed=True,
        with_stages=False,
    )
    across: Across = option(
        "where copies are: 'ranks', where groups of workers draw the same examples, or 'batch'",
        "ranks",
        group=LARGE,
        check=lambda name, value: arguments.choice(name, value, ("ranks", "batch")),
        fixed=True,
    )
    micro_batch_size: int | None = option(
        "most examples in a forward pass [default: all; with --recipe 256]",
        group=LARGE,
        check=whole(1),
        fixed=True,
        with_stages=False,
    )
    patience: float | None = option(
        "strategies continue if a worker is killed, or silent for this long; methods need all workers"
        " [default: a lost worker ends the run]",
        group=LOST,
        metavar="SECONDS",
        check=lambda name, value: arguments.number(name, value, above=0),
        with_stages=False,
    )
    quorum: int | None = option(
        "with --patience: the fewest workers for a strategy to continue; fewer end the run with an error"
        " [default: 1]",
        group=LOST,
        with_stages=False,
    )
    restarts: int = option(
        "with --patience: restart up to this many killed workers, from the others' model",
        0,
        group=LOST,
        check=at_least(0, "none"),
        with_stages=False,
    )

    @property
    def large_batch(self) -> LargeBatch:
        return LargeBatch(self.recipe, self.copies, self.across, self.micro_batch_size)


def check_each(of: type, given: object) -> None:
    for each in options(of):
        value, check = getattr(given, each.name), info(each).check
        if value is not None and check is not None:
            check(flag(each), value)


def fixed(of: type) -> list[str]:
    return [each.name for each in options(of) if info(each).fixed]
