"""laconic.pipeline.link: a packed send and receive that gradients go back through."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import NonFiniteError, PeerError
from tests.dist.pipelines import block, data, loss_fn


def halves(spec, backward):
    """This rank's gradient with a link between two halves of a net, and without; figures."""
    x, y = data()
    both = [block(0), block(1)]
    loss = loss_fn(both[1](both[0](x)), y)
    loss.backward()
    rank = dist.get_rank()
    link = laconic.pipeline.link(spec, backward=backward)
    mine = block(rank)
    for _ in range(3):
        mine.zero_grad()
        if rank == 0:
            link.send(mine(x), to=1).backward()
        else:
            loss_fn(mine(link.receive(x.shape, source=0)), y).backward()
    flat = [torch.cat([each.grad.flatten() for each in part.parameters()]) for part in (mine, both[rank])]
    return *flat, link.stats()


def test_a_dense_link_is_exact(pool):
    for mine, plain, _ in pool.run(2, halves, "dense()", None):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("spec, backward", [("minmax(bits=8)", None), ("topk(density=0.9)", "cast('fp16')")])
def test_a_link_takes_any_codec(pool, spec, backward):
    found = pool.run(2, halves, spec, backward)
    for mine, plain, _ in found:
        assert (mine - plain).norm() < 0.3 * plain.norm()
    (_, _, zero), (_, _, one) = found
    assert zero.forward_sent == one.forward_received > 0 == one.forward_sent
    assert one.backward_sent == zero.backward_received > 0 == zero.backward_sent
    assert zero.steps == one.steps == 3


def spoiled():
    link = laconic.pipeline.link("minmax(bits=4)")
    try:
        if dist.get_rank() == 0:
            link.send(torch.tensor([1.0, float("nan")]), to=1)
        else:
            link.receive((2,), source=0)
    except (NonFiniteError, PeerError) as error:
        said = type(error).__name__, str(error)
    if dist.get_rank() == 0:
        link.send(torch.tensor([1.0, 2.0]), to=1)
        return said, None
    return said, link.receive((2,), source=0).tolist()


def test_nan_is_told_on_both_sides(pool):
    (zero, _), (one, after) = pool.run(2, spoiled)
    assert zero[0] == "NonFiniteError" and one[0] == "PeerError" and "rank 0" in one[1]
    assert after == [1.0, 2.0]
