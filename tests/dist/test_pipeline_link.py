"""laconic.pipeline.link: a packed send and receive that gradients go back through."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import product

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import AttachError, LaconicError, NonFiniteError, PeerError, WireError
from tests.dist.pipelines import block, data, loss_fn
from tests.dist.pool import on_ranks
from tests.dist.runs import everywhere

EXACT = ("dense()", None)


@on_ranks(2, (EXACT, ("minmax(bits=8)", None), ("topk(density=0.9)", "cast('fp16')")))
def test_a_link_takes_any_codec_and_a_dense_one_is_exact(spec, backward):
    """The gradient of each half of a net, and that of the net without a link."""
    x, y = data()
    both = [block(0), block(1)]
    loss_fn(both[1](both[0](x)), y).backward()
    rank = dist.get_rank()
    link = laconic.pipeline.link(spec, backward=backward)
    mine = block(rank)
    for _ in range(3):
        mine.zero_grad()
        if rank == 0:
            link.send(mine(x), to=1).backward()
        else:
            loss_fn(mine(link.receive(x.shape, source=0)), y).backward()
    ours, plain = (
        torch.cat([each.grad.flatten() for each in part.parameters()]) for part in (mine, both[rank])
    )
    if spec == "dense()":
        assert torch.equal(ours, plain)
        return
    assert (ours - plain).norm() < 0.3 * plain.norm()
    zero, one = everywhere(link.stats())
    assert zero.forward_sent == one.forward_received > one.forward_sent == zero.forward_received == 3 * 24
    assert one.backward_sent == zero.backward_received > 0 == zero.backward_sent
    assert zero.steps == one.steps == 3


def still_meet():
    """Check that a new link between both ranks works."""
    link = laconic.pipeline.link("dense()")
    if dist.get_rank() == 0:
        link.send(torch.tensor([1.0, 2.0]), to=1)
    else:
        assert link.receive((2,), source=0).tolist() == [1.0, 2.0]


@on_ranks(2)
def test_nan_is_told_on_both_sides():
    link = laconic.pipeline.link("minmax(bits=4)")
    if dist.get_rank() == 0:
        with pytest.raises(NonFiniteError):
            link.send(torch.tensor([1.0, float("nan")]), to=1)
        link.send(torch.tensor([1.0, 2.0]), to=1)
    else:
        with pytest.raises(PeerError, match="rank 0"):
            link.receive((2,), source=0)
        assert link.receive((2,), source=0).tolist() == [1.0, 2.0]


UNLIKE = [  # of the sender, and of the receiver
    ({"shape": (1000,)}, {"shape": (10,)}),
    ({"shape": (10,)}, {"shape": (1000,)}),
    ({"dtype": torch.float16}, {}),
    ({"codec": "dense()"}, {}),
    ({"seed": 1}, {}),
]


def crossed(shape=(10,), dtype=torch.float32, codec="minmax(bits=8)", seed=0):
    link = laconic.pipeline.link(codec, seed=seed)
    if dist.get_rank() == 0:
        link.send(torch.ones(shape, dtype=dtype), to=1)
    else:
        link.receive(shape, source=0, dtype=dtype)


@on_ranks(2, UNLIKE)
def test_ends_that_disagree_are_told_on_both_sides(*sides):
    other = f"rank {1 - dist.get_rank()}"
    with pytest.raises(WireError, match=f"{other}.*equal|equal.*{other}"):
        crossed(**sides[dist.get_rank()])
    still_meet()


@on_ranks(2)
def test_integers_are_told_on_both_sides():
    kind, words = (PeerError, "rank 0") if dist.get_rank() else (AttachError, "int64")
    with pytest.raises(kind, match=words):
        crossed(dtype=torch.int64)
    still_meet()


@on_ranks(2, product((False, True), (False, True)))
def test_a_gradient_goes_back_only_where_both_ends_want_it(sender, receiver):
    link = laconic.pipeline.link("minmax(bits=8)")
    if dist.get_rank() == 0:
        token = link.send(torch.ones(4, 4, requires_grad=sender), to=1)
        assert token.requires_grad == sender
        kind = PeerError if sender else RuntimeError  # torch's own word of a scalar without gradient
        with nullcontext() if sender and receiver else pytest.raises(kind, match="grad"):
            token.backward()
        return
    with torch.set_grad_enabled(receiver):
        out = link.receive((4, 4), source=0)
    assert out.requires_grad == (sender and receiver)
    weight = torch.ones((), requires_grad=True)
    (out * weight).sum().backward()
    assert weight.grad is not None


@on_ranks(2)
def test_bytes_are_those_of_the_docstring():
    """A tensor of 100 elements in 8 bits and its gradient, and an empty one."""
    link = laconic.pipeline.link("minmax(bits=8, block=100)")
    if dist.get_rank() == 0:
        link.send(torch.ones(100, requires_grad=True), to=1).backward()
        link.send(torch.ones(0), to=1)
    else:
        link.receive((100,), source=0).sum().backward()
        assert link.receive((0,), source=0).shape == (0,)
    zero, one = everywhere(link.stats())
    body = 100 + 8
    assert zero.forward_sent == one.forward_received == 24 + body + 24
    assert one.forward_sent == zero.forward_received == 2 * 24  # answers
    assert one.backward_sent == zero.backward_received == 24 + body
    assert zero.ratio > 2 and one.ratio > 2


@on_ranks(2, ((0, 1, 2), (2, 1, 0), (1, 2, 0)))
def test_gradients_find_their_own_tensors(*order):
    """Three tensors of one shape, whose tokens go back in this order."""
    link = laconic.pipeline.link("dense()")
    if dist.get_rank() == 0:
        sent = [torch.ones(4, requires_grad=True) for _ in range(3)]
        tokens = [link.send(x, to=1) for x in sent]
        for place in order:
            tokens[place].backward()
        assert [x.grad.tolist() for x in sent] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    else:
        came = [link.receive((4,), source=0) for _ in range(3)]
        sum((place + 1) * x.sum() for place, x in enumerate(came)).backward()


@on_ranks(2)
def test_a_gradient_that_nobody_awaits_goes_to_nobody():
    """It comes of a tensor whose token is gone."""
    link = laconic.pipeline.link("dense()")
    if dist.get_rank() == 0:
        link.send(torch.ones(4, requires_grad=True), to=1)
        token = link.send(torch.ones(4, requires_grad=True), to=1)
        with pytest.raises(WireError):
            token.backward()
    else:
        first, second = (link.receive((4,), source=0) for _ in range(2))
        with suppress(LaconicError, RuntimeError):  # rank 0 is gone by then, or not yet
            first.sum().backward()
            second.sum().backward()


@on_ranks(2)
def test_an_empty_tensor_crosses_both_ways():
    link = laconic.pipeline.link("minmax(bits=8)")
    if dist.get_rank() == 0:
        x = torch.randn(0, 4, requires_grad=True)
        link.send(x, to=1).backward()
        assert x.grad.shape == (0, 4)
    else:
        weight = torch.ones(4, requires_grad=True)
        (link.receive((0, 4), source=0) * weight).sum().backward()
        assert weight.grad.tolist() == [0.0] * 4
