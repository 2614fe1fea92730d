"""laconic.pipeline.link: a packed send and receive that gradients go back through."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import LaconicError, NonFiniteError, PeerError
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
    assert zero.forward_sent == one.forward_received > one.forward_sent == zero.forward_received == 3 * 24
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


def told(call):
    """The error that a call raises, as its class and words."""
    try:
        call()
    except (LaconicError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


UNLIKE = {  # of the sender, and of the receiver
    "shorter": ({"shape": (1000,)}, {"shape": (10,)}),
    "longer": ({"shape": (10,)}, {"shape": (1000,)}),
    "another dtype": ({"dtype": torch.float16}, {}),
    "another codec": ({"codec": "dense()"}, {}),
    "another seed": ({"seed": 1}, {}),
    "integers": ({"dtype": torch.int64}, {"dtype": torch.int64}),
}


def crossed(link, shape, dtype):
    if dist.get_rank() == 0:
        link.send(torch.ones(shape, dtype=dtype), to=1)
    else:
        link.receive(shape, source=0, dtype=dtype)


def unlike(each):
    """What both ranks hear where they disagree, and what comes after."""
    found = []
    for sides in each:
        given = {"shape": (10,), "dtype": torch.float32, "codec": "minmax(bits=8)", "seed": 0}
        given |= sides[dist.get_rank()]
        link = laconic.pipeline.link(given["codec"], seed=given["seed"])
        said = told(functools.partial(crossed, link, given["shape"], given["dtype"]))
        after = laconic.pipeline.link("dense()")
        if dist.get_rank() == 0:
            after.send(torch.tensor([1.0, 2.0]), to=1)
        found.append((said, None if dist.get_rank() == 0 else after.receive((2,), source=0).tolist()))
    return found


def test_ends_that_disagree_are_told_on_both_sides(pool):
    zeros, ones = pool.run(2, unlike, list(UNLIKE.values()))
    for how, (zero, _), (one, after) in zip(UNLIKE, zeros, ones, strict=True):
        if how == "integers":
            assert zero[0] == "AttachError" and "int64" in zero[1]
            assert one[0] == "PeerError" and "rank 0" in one[1]
        else:
            assert zero[0] == one[0] == "WireError"
            assert "rank 1" in zero[1] and "rank 0" in one[1] and "equal" in one[1]
        assert after == [1.0, 2.0]


def without_gradients(sender, receiver):
    """Whether each end's tensor requires a gradient where a side has none of it; what `backward` says."""
    link = laconic.pipeline.link("minmax(bits=8)")
    if dist.get_rank() == 0:
        token = link.send(torch.ones(4, 4, requires_grad=sender), to=1)
        return token.requires_grad, told(token.backward)
    with torch.set_grad_enabled(receiver):
        out = link.receive((4, 4), source=0)
    weight = torch.ones((), requires_grad=True)
    return out.requires_grad, told((out * weight).sum().backward), weight.grad is not None


@pytest.mark.parametrize("sender, receiver", [(False, True), (True, False), (False, False), (True, True)])
def test_a_gradient_goes_back_only_where_both_ends_want_it(pool, sender, receiver):
    zero, one = pool.run(2, without_gradients, sender, receiver)
    assert one == (sender and receiver, None, True)
    assert zero[0] == sender
    if sender and receiver:
        assert zero[1] is None
    else:
        kind = "PeerError" if sender else "RuntimeError"  # torch's own word of a scalar without gradient
        assert zero[1][0] == kind and "grad" in zero[1][1]


def counted():
    """A tensor of 100 elements in 8 bits and its gradient: figures, and an empty one."""
    link = laconic.pipeline.link("minmax(bits=8, block=100)")
    if dist.get_rank() == 0:
        link.send(torch.ones(100, requires_grad=True), to=1).backward()
        link.send(torch.ones(0), to=1)
    else:
        link.receive((100,), source=0).sum().backward()
        assert link.receive((0,), source=0).shape == (0,)
    return link.stats()


def test_bytes_are_those_of_the_docstring(pool):
    zero, one = pool.run(2, counted)
    body = 100 + 8
    assert zero.forward_sent == one.forward_received == 24 + body + 24
    assert one.forward_sent == zero.forward_received == 2 * 24  # answers
    assert one.backward_sent == zero.backward_received == 24 + body
    assert zero.ratio > 2 and one.ratio > 2


def crossing(order, spec):
    """Gradients on rank 0 of three tensors of one shape, whose tokens go back in this order."""
    link = laconic.pipeline.link(spec)
    if dist.get_rank() == 0:
        sent = [torch.ones(4, requires_grad=True) for _ in range(3)]
        tokens = [link.send(x, to=1) for x in sent]
        for place in order:
            tokens[place].backward()
        return [x.grad.tolist() for x in sent]
    came = [link.receive((4,), source=0) for _ in range(3)]
    sum((place + 1) * x.sum() for place, x in enumerate(came)).backward()
    return None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_gradients_find_their_own_tensors(pool, order):
    assert pool.run(2, crossing, order, "dense()")[0] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def dropped_token():
    """What rank 0 hears where a gradient comes of a tensor whose token is gone."""
    link = laconic.pipeline.link("dense()")
    if dist.get_rank() == 0:
        link.send(torch.ones(4, requires_grad=True), to=1)
        token = link.send(torch.ones(4, requires_grad=True), to=1)
        return told(token.backward)
    first, second = (link.receive((4,), source=0) for _ in range(2))
    return told(first.sum().backward) or told(second.sum().backward)  # rank 0 is gone by then, or not yet


def test_a_gradient_that_nobody_awaits_goes_to_nobody(pool):
    assert pool.run(2, dropped_token)[0][0] == "WireError"


def empty():
    link = laconic.pipeline.link("minmax(bits=8)")
    if dist.get_rank() == 0:
        x = torch.randn(0, 4, requires_grad=True)
        link.send(x, to=1).backward()
        return tuple(x.grad.shape)
    weight = torch.ones(4, requires_grad=True)
    (link.receive((0, 4), source=0) * weight).sum().backward()
    return weight.grad.tolist()


def test_an_empty_tensor_crosses_both_ways(pool):
    assert pool.run(2, empty) == [(0, 4), [0.0] * 4]
