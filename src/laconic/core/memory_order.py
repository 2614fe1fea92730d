"""The order of a tensor's entries in memory, which is how they lie in a bucket of gradients."""

from __future__ import annotations

from torch import Tensor


def by_stride(tensor: Tensor) -> list[int]:
    """Its dimensions, that with the largest stride first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def flat(tensor: Tensor) -> Tensor:
    """The entries of a tensor without gaps or overlaps, as they lie in memory: (n,).

    >>> import torch
    >>> flat(torch.tensor([[1, 2], [3, 4]]).T)
    tensor([1, 2, 3, 4])
    """
    return tensor.permute(by_stride(tensor)).flatten()


def shaped(entries: Tensor, like: Tensor) -> Tensor:
    """A view of entries (n,) that lie as those of `like` do, in its shape; in order where that has gaps.

    >>> import torch
    >>> shaped(torch.tensor([1, 2, 3, 4]), torch.zeros(2, 2).T)
    tensor([[1, 3],
            [2, 4]])
    """
    order, size = by_stride(like), 1
    for place in reversed(order):
        if like.shape[place] != 1 and like.stride(place) != size:
            return entries.view(like.shape)
        size *= like.shape[place]
    back = [order.index(place) for place in range(like.dim())]
    return entries.view([like.shape[place] for place in order]).permute(back)
