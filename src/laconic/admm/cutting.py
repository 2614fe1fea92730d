"""Split of a Sequential into blocks that share no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from laconic.admm.proximal import Proximal
from laconic.core.errors import AttachError


@dataclass(frozen=True)
class Block:
    """One block of a model, with the model's own modules. `names` includes the proximal operator."""

    names: tuple[str, ...]
    layers: nn.Sequential
    proximal: Proximal | None

    @property
    def tensors(self) -> list[Tensor]:
        homes = [self.layers] if self.proximal is None else [self.proximal, self.layers]
        return [each for home in homes for each in (*home.parameters(), *home.buffers())]


def cut_into(model: nn.Module, blocks: int, at: Sequence[str] = ()) -> list[Block]:
    """Return the blocks of a Sequential. Every `Proximal` begins a block.

    Args:
        model: An `nn.Sequential`.
        blocks: Number of blocks.
        at: Names of the children that begin later blocks; default: about equal numbers of layers with
            parameters.

    Raises:
        AttachError: The model is not a Sequential or has too few children or none of these names, a block has
            no parameters, the first has only frozen ones, or two blocks share a tensor.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> [block.names for block in cut_into(net, 2)]
    [('0', '1'), ('2',)]
    """
    if not isinstance(model, nn.Sequential):
        raise AttachError(
            f"the model must be an nn.Sequential, got {type(model).__name__}: write it as"
            " nn.Sequential(first, second, ...), whose children may be modules of any kind"
        )
    names = [*model._modules]  # named_children() omits repeated modules
    starts = _cut_at_names(names, blocks, at) if at else _cut_evenly(model, blocks)
    edges = [0, *starts, len(names)]
    made = [_block(model, names[start:end]) for start, end in pairwise(edges)]
    for number, block in enumerate(made):
        if not [*block.layers.parameters()]:
            raise AttachError(
                f"block {number + 1} of {blocks}, children {', '.join(block.names)}, has no parameters to"
                " train: cut elsewhere, or into fewer blocks"
            )
    if not any(each.requires_grad for each in made[0].layers.parameters()):
        raise AttachError(
            f"block 1 of {blocks}, children {', '.join(made[0].names)}, has only frozen parameters: cut"
            " later, or apply these layers to the data and remove them from the model"
        )
    _check_not_shared(model, made)
    return made


def shapes(blocks: Sequence[Block], example: Tensor) -> list[torch.Size]:
    """Return the shape of a sample after each block except the last.

    Raises `AttachError` unless each block returns one float32 tensor with a row per sample.
    """
    found, x = [], example
    modes = {module: module.training for block in blocks for module in block.layers.modules()}
    try:
        with torch.no_grad():
            for number, block in enumerate(blocks):
                block.layers.eval()
                x = block.layers(x if block.proximal is None else block.proximal(x))
                if not isinstance(x, Tensor) or x.dtype != torch.float32 or len(x) != len(example):
                    raise AttachError(
                        f"block {number + 1} must return one float32 tensor with a row per sample, got"
                        f" {_describe(x)}: cut elsewhere"
                    )
                found.append(x.shape[1:])
    finally:
        for module, mode in modes.items():
            module.training = mode
    return found[:-1]


def _check_not_shared(model: nn.Module, blocks: Sequence[Block]) -> None:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    home: dict[Tensor, int] = {}
    for number, block in enumerate(blocks, 1):
        for each in block.tensors:
            if home.setdefault(each, number) != number:
                names = " and ".join(name for name, tensor in named if tensor is each)
                raise AttachError(
                    f"{names} are one tensor, in blocks {home[each]} and {number}: use separate tensors, or"
                    " cut so that one block has both"
                )


def _cut_at_names(names: Sequence[str], blocks: int, at: Sequence[str]) -> list[int]:
    unknown = [name for name in at if name not in names]
    if unknown:
        raise AttachError(
            f"the model cannot be cut at {unknown[0]!r}: its children are {', '.join(names)}; name"
            f" {blocks - 1} of them in order, without the first"
        )
    found = [names.index(name) for name in at]
    if len(found) != blocks - 1 or found != sorted(set(found)) or found[0] == 0:
        raise AttachError(
            f"{blocks} blocks need {blocks - 1} names of children in the model's order, without the first,"
            f" got {', '.join(at)} of {', '.join(names)}"
        )
    return found


def _cut_evenly(model: nn.Sequential, blocks: int) -> list[int]:
    """Cut before each Proximal, then repeatedly in the middle of the longest block."""
    children = [*model]
    trained = [i for i, child in enumerate(children) if [*child.parameters()]]
    if blocks > len(trained):
        raise AttachError(
            f"blocks must be at most {len(trained)}, the number of children with parameters, got {blocks}:"
            " use fewer blocks or a deeper model"
        )
    forced = [i for i, child in enumerate(children) if isinstance(child, Proximal)]
    if len(forced) > blocks - 1:
        raise AttachError(
            f"each Proximal begins a block: {len(forced)} of them need {len(forced) + 1} blocks, got {blocks}"
        )
    if not forced:
        return [trained[i * len(trained) // blocks] for i in range(1, blocks)]
    starts = sorted(forced)
    while len(starts) < blocks - 1:
        spans = [
            [i for i in trained if start <= i < end] for start, end in pairwise([0, *starts, len(children)])
        ]
        longest = max(spans, key=len)
        starts = sorted([*starts, longest[len(longest) // 2]])
    return starts


def _block(model: nn.Sequential, names: Sequence[str]) -> Block:
    children = [model.get_submodule(name) for name in names]
    first = children[0] if isinstance(children[0], Proximal) else None
    layers = children if first is None else children[1:]
    misplaced = [name for name, child in zip(names, children, strict=True) if isinstance(child, Proximal)][
        first is not None :
    ]
    if misplaced:
        raise AttachError(f"child {misplaced[0]} is a Proximal, so it must begin a block: cut there")
    return Block(tuple(names), nn.Sequential(*layers), first)


def _describe(x: object) -> str:
    return f"{x.dtype} of {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
