"""Checks of `laconic train` for methods that train blocks in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from laconic.admm import BlockAdmm, cut_into
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.tools.cli.pipelining import check_alone
from laconic.tools.tasks.blockwise import is_blockwise
from laconic.tools.tasks.task import Recipe

if TYPE_CHECKING:
    from laconic.tools.cli.settings import Settings


def check_blocks(settings: Settings, recipe: Recipe) -> None:
    for spec in filter(is_blockwise, settings.specs):
        made = parse(spec)
        assert isinstance(made, BlockAdmm)
        check_alone(settings, f"--with {made.name}(...)")
        if settings.workers != made.blocks:
            raise SpecError(
                f"{spec} trains one block on each worker and needs --workers {made.blocks}, got"
                f" {settings.workers}"
            )
        with torch.device("meta"):
            model = recipe.build()
        try:
            cut_into(model, made.blocks, made.cut)
        except AttachError as error:
            raise SpecError(
                f"{settings.task}'s model {settings.model} does not fit {spec}: {error}"
            ) from error
