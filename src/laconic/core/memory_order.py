"""Order of a tensor's entries in memory, and so in a bucket of gradients."""

from __future__ import annotations

from torch import Tensor


def by_stride(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def flat(tensor: Tensor) -> Tensor:
    """Return the entries (n,) of a dense tensor in memory order.

    >>> import torch
    >>> flat(torch.tensor([[1, 2], [3, 4]]).T)
    tensor([1, 2, 3, 4])
    """
    return tensor.permute(by_stride(tensor)).flatten()


def shaped(entries: Tensor, like: Tensor) -> Tensor:
    """View entries (n,), in the memory order of `like`, in its shape; in plain order if it has gaps.

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
