"""Checks that methods fit the workers, the model and the optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import filterfalse

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import AttachError, LaconicError, SpecError
from laconic.core.spec import parse
from laconic.pipeline.crossing import for_stages
from laconic.sparsity import Sparsifier
from laconic.sparsity.swat import SwatTraining
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tools.tasks.blockwise import is_blockwise
from laconic.tools.tasks.group_model import built
from laconic.tools.tasks.large_batch import LargeBatch
from laconic.tools.tasks.task import Recipe
from laconic.tools.tasks.transforms import attached, transform_of
from laconic.transforms.transform import Option, Run, Transform


def normal(text: str) -> str:
    if for_stages(text):
        raise SpecError(
            f"{text} is for tensors sent between the stages of a pipeline, and here every worker has the"
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


def check_fit(spec: str, workers: int, recipe: Recipe, large_batch: LargeBatch) -> None:
    found = strategy_or_method(spec)
    optimizer = _optimizer(nn.Linear(1, 1, dtype=torch.float32, device="cpu"), spec, recipe, large_batch)
    if isinstance(found, Strategy):
        found.check(workers, optimizer)
    elif large_batch.recipe is not None:
        for rule in found.rules:
            try:
                rule.check(optimizer, ())
            except AttachError as error:
                raise SpecError(f"--recipe {large_batch.recipe} does not go with {spec}: {error}") from error


def check_patience(specs: Iterable[str]) -> None:
    if not any(isinstance(strategy_or_method(spec), Strategy) for spec in specs):
        raise SpecError(
            f"--patience is for strategies, and {', '.join(specs)} needs all workers: remove it, or take a"
            ' strategy, such as --with "local_sgd(every=8)"; for methods, use `laconic run --max-restarts`'
        )


def check_bits(bits: int, recipe: Recipe) -> None:
    arguments.whole("--bits", bits, 2, 8)
    try:
        built(recipe, bits)
    except AttachError as error:
        raise SpecError(f"{error}; use cifar10, mnist or digits, or convert the model in a script") from error


def normal_sparsity(text: str) -> str:
    return repr(transform_of("sparsity", text))


def check_transforms(
    given: Mapping[Option, str | None],
    specs: Sequence[str],
    bits: int | None,
    recipe: Recipe,
    large_batch: LargeBatch,
    steps: int,
) -> None:
    chosen = {option: transform_of(option, text) for option, text in given.items() if text is not None}
    _check_pairs(chosen, bits)
    for option, transform in chosen.items():
        for spec in specs if transform.replicas_equal else ():
            if isinstance(strategy_or_method(spec), Strategy):
                raise SpecError(
                    f"--{option} {transform} needs replicas that are equal after every step, and those of"
                    f" {spec} differ: take a method that exchanges gradients, such as --with"
                    ' "dgc(density=0.01)"'
                )
        masked = [spec for spec in specs if spec.startswith("masked(")]
        if masked and option == "sparsity" and not isinstance(transform, Sparsifier):
            raise SpecError(
                f"{masked[0]} sends what masks say is in use, and {transform} has none: take the method"
                " inside"
            )
        tried = set[type[Optimizer]]()
        for spec in filterfalse(is_blockwise, specs):
            model = built(recipe, bits)
            optimizer = _optimizer(model, spec, recipe, large_batch)
            if type(optimizer) not in tried:
                tried.add(type(optimizer))
                attached(option, str(given[option]), model, optimizer, Run(steps)).remove()


def _optimizer(model: nn.Module, spec: str, recipe: Recipe, large_batch: LargeBatch) -> Optimizer:
    by, sizes = strategy_or_method(spec), {"batch": 1, "base_batch": 1, "steps": 1}
    return large_batch.optimizer(model, recipe, by, lr=None, **sizes)[0]


def _check_pairs(chosen: Mapping[Option, Transform], bits: int | None) -> None:
    if "activations" in chosen and bits is not None:
        raise SpecError(
            "--activations and --bits cannot be combined: low-bit layers keep what they have rounded; give"
            " one of the two"
        )
    if "sparsity" in chosen and "lowbit" in chosen:
        raise SpecError(
            "--sparsity and --lowbit cannot be combined: each would undo what the other does to the weights;"
            " give one of the two"
        )
    if "activations" in chosen and isinstance(chosen.get("sparsity"), SwatTraining):
        raise SpecError(
            f"{chosen['sparsity']} and --activations cannot be combined: both say what the same layers keep"
            " for backward; give one of the two"
        )
