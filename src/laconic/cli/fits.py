"""Whether the methods of `laconic train` fit the workers, the model and the optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from laconic import activations
from laconic.core import arguments
from laconic.core.errors import AttachError, LaconicError, SpecError
from laconic.core.spec import parse
from laconic.pipeline.crossing import for_stages
from laconic.sparsity import Sparsifier, sparsify
from laconic.sparsity.swat import SwatTraining
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tasks.blockwise import is_blockwise
from laconic.tasks.enlarged import Enlarged
from laconic.tasks.few_bits import lowbit_attached
from laconic.tasks.group_model import built
from laconic.tasks.sparse_layers import swat_attached
from laconic.tasks.task import Recipe


def normal(text: str) -> str:
    """A spec in the spelling of its `repr`. Raises `SpecError` if it is not a method or strategy."""
    if for_stages(text):
        raise SpecError(
            f"{text} is for what crosses between the stages of a pipeline, and here every worker has the"
            " whole model: give --stages too, such as --stages 2"
        )
    try:
        if is_blockwise(text):
            return repr(parse(text))
        return repr(strategy_or_method(text))
    except SpecError:
        raise
    except LaconicError as error:
        raise SpecError(f"{text}: {error}") from error


def check_fit(spec: str, workers: int, recipe: Recipe, enlarged: Enlarged) -> None:
    """Raise `SpecError` or `AttachError` if this number of workers or the optimiser is refused."""
    found = strategy_or_method(spec)
    sizes = {"batch": 1, "base_batch": 1, "steps": 1}
    model = nn.Linear(1, 1, dtype=torch.float32, device="cpu")
    optimizer, _, _ = enlarged.optimizer(model, recipe, found, lr=None, **sizes)
    if isinstance(found, Strategy):
        found.check(workers, optimizer)
    elif enlarged.recipe is not None:
        for rule in found.rules:
            try:
                rule.check(optimizer, ())
            except AttachError as error:
                raise SpecError(f"--recipe {enlarged.recipe} does not go with {spec}: {error}") from error


def check_patience(specs: Iterable[str]) -> None:
    """Raise `SpecError` if there is no strategy, which alone can go on without a lost worker."""
    if not any(isinstance(strategy_or_method(spec), Strategy) for spec in specs):
        raise SpecError(
            f"--patience is for strategies, and {', '.join(specs)} needs all workers: leave it out, or take a"
            ' strategy, such as --with "local_sgd(every=8)"; for methods, use `laconic run --max-restarts`'
        )


def check_bits(bits: int, recipe: Recipe) -> None:
    """Raise `SpecError` unless `bits` is in 2..8 and the model can be converted to low-bit layers."""
    arguments.whole("--bits", bits, 2, 8)
    try:
        built(recipe, bits)
    except AttachError as error:
        raise SpecError(f"{error}; use cifar10, mnist or digits, or convert the model in a script") from error


def check_lowbit(text: str, recipe: Recipe, bits: int | None, specs: Iterable[str]) -> None:
    """Raise `SpecError` unless this low-bit training takes the model, and its replicas stay equal."""
    for spec in specs:
        made = strategy_or_method(spec)
        if isinstance(made, Strategy):
            raise SpecError(
                f"--lowbit needs replicas that are equal after every step, and those of {spec} differ: take a"
                ' method that exchanges gradients, such as --with "dgc(density=0.01)"'
            )
        model = built(recipe, bits)
        lowbit_attached(text, model, recipe.optimizer(model, by=made))


def check_activations(spec: str, bits: int | None, recipe: Recipe) -> None:
    """Raise `SpecError` unless these activations can be kept as coded bytes for this model."""
    if bits is not None:
        raise SpecError(
            "--activations and --bits cannot be combined: low-bit layers keep what they have rounded; give"
            " one of the two"
        )
    try:
        activations.compress(recipe.build(), spec)
    except LaconicError as error:
        raise SpecError(f"--activations: {error}") from error


def normal_sparsity(text: str) -> str:
    """A sparsifier in the spelling of its `repr`. Raises `SpecError`, naming --sparsity, if it is none."""
    found = parse(text)
    if not isinstance(found, Sparsifier | SwatTraining):
        raise SpecError(f"--sparsity takes a sparsifier, such as rigl(density=0.1), or swat(), got {found!r}")
    return repr(found)


def check_sparsity(
    text: str,
    specs: Iterable[str],
    bits: int | None,
    beside: Mapping[str, str | None],
    steps: int,
    recipe: Recipe,
) -> None:
    """Raise `SpecError` unless all methods exchange gradients, and the model can be made sparse.

    SWAT has no masks: it goes with strategies too, and not with what sends by masks. `beside`: what --lowbit
    and --activations are given, if anything.
    """
    if beside["--lowbit"] is not None:
        raise SpecError(
            "--sparsity and --lowbit cannot be combined: each would undo what the other does to the weights;"
            " give one of the two"
        )
    made = parse(text)
    if isinstance(made, SwatTraining):
        if masked := [spec for spec in specs if spec.startswith("masked(")]:
            raise SpecError(
                f"{masked[0]} sends what masks say is in use, and {made} has none: take the method inside"
            )
        if beside["--activations"] is not None:
            raise SpecError(
                f"{made} and --activations cannot be combined: both say what the same layers keep for"
                " backward; give one of the two"
            )
        swat_attached(made, built(recipe, bits))
        return
    for spec in specs:
        if isinstance(strategy_or_method(spec), Strategy):
            raise SpecError(
                f"--sparsity needs replicas that are equal at every step, and with the strategy {spec} they"
                ' are not: take a method, such as "masked(dense())" or "cgx()"'
            )
    model = built(recipe, bits)
    try:
        sparsify(model, recipe.optimizer(model), text, steps=steps).remove()
    except AttachError as error:
        raise SpecError(f"--sparsity {text} does not work with this model: {error}") from error
