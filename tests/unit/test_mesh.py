"""Which ranks share a machine, as torchrun says or so many in a row; and machines of different sizes."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import MODEL, everywhere, gradient

from laconic.comm.loopback import Loopback
from laconic.comm.mesh import machines
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.two_level import TwoLevel

TOPK = "gather(sparse(topk(density=0.1)))"


def told(ranks):
    """The environments of these ranks, which are (machine's first rank, place there, how many there are)."""
    return [
        {"RANK": str(first + place), "LOCAL_RANK": str(place), "LOCAL_WORLD_SIZE": str(size)}
        for first, place, size in ranks
    ]


UNEVEN = told([(0, 0, 3), (0, 1, 3), (0, 2, 3), (3, 0, 1), (4, 0, 1)])


def test_machines_of_different_sizes_weigh_as_many_ranks_as_they_have(monkeypatch):
    plain = sum(gradient(rank, 0) for rank in range(5)) / 5
    monkeypatch.setattr(
        "laconic.reducers.two_level.machines", lambda comm, local: machines(comm, local, UNEVEN[comm.rank])
    )

    def play(comm):
        assert machines(comm, 0, UNEVEN[comm.rank]) == [0, 0, 0, 1, 2]
        out, x = torch.empty(MODEL.numel), gradient(comm.rank, 0)
        for outer in ("sum()", TOPK):
            bound = TwoLevel(parse("sum()"), parse(outer)).bind(MODEL, comm)
            sent = bound.reduce(x, MODEL, Turn(0, comm.rank), out)
            if outer == "sum()":
                torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
        return out, sent.add_to_(torch.zeros_like(x))

    results = everywhere(5, play)
    average = sum(share.double() for _, share in results) / 5
    for out, _ in results:
        torch.testing.assert_close(out.double(), average, rtol=1e-5, atol=1e-4)


def refused(environments):
    """What every rank says of these environments."""

    def play(comm):
        with pytest.raises(SpecError) as error:
            machines(comm, 0, environments[comm.rank])
        return str(error.value)

    said = everywhere(len(environments), play)
    assert len(set(said)) == 1, "all ranks say the same"
    return said[0]


def test_ranks_that_do_not_fit_together_are_refused_on_every_rank():
    good = told([(0, 0, 2), (0, 1, 2)])
    assert "rank 1 does not know its machine: RANK, LOCAL_RANK" in refused([good[0], {}])
    assert "rank 0 does not know" in refused([{**good[0], "LOCAL_RANK": "two"}, good[1]])
    assert "rank 1 does not know" in refused([good[0], {**good[1], "LOCAL_RANK": "2"}])
    assert "machines overlap: they start at ranks [0, 0]" in refused([good[0], good[0]])
    other = {**good[1], "LOCAL_WORLD_SIZE": "3"}
    assert "and have [2, 3] ranks (LOCAL_WORLD_SIZE); number ranks" in refused([good[0], other])
    in_turn = told([(0, 0, 2), (1, 0, 2), (1, 1, 2), (2, 1, 2)])  # rank r is on machine r mod 2
    assert "they start at ranks [0, 1, 1, 2]" in refused(in_turn)


@pytest.mark.parametrize("size, local", [(5, 2), (4, 3), (2, 4)])
def test_a_mesh_that_does_not_divide_is_refused_on_every_rank(size, local):
    def play(comm):
        with pytest.raises(SpecError, match=f"ranks_per_node={local} does not divide the {size} ranks"):
            parse(f"two_level(sum(), sum(), ranks_per_node={local})").bind(MODEL, comm)
        return True

    assert all(everywhere(size, play))


def test_a_part_of_the_world_keeps_its_machines():
    """A group of every other rank of 2 machines of 4, as torchrun numbers them."""
    some = told([(0, 0, 4), (0, 2, 4), (4, 0, 4), (4, 2, 4)])
    assert everywhere(4, lambda comm: machines(comm, 0, some[comm.rank])) == [[0, 0, 1, 1]] * 4


class Left(Loopback):
    """Of eight ranks these are left."""

    original_ranks, original_size = (1, 2, 3, 6), 8


def test_machines_that_have_lost_ranks_are_still_the_same_machines():
    left = Left(Loopback.world(4)[0].room, 0)
    assert machines(left, ranks_per_node=2) == [0, 1, 1, 2]
    assert machines(left, ranks_per_node=4) == [0, 0, 0, 1]
    with pytest.raises(SpecError, match="ranks_per_node=3 does not divide the 8 ranks"):
        machines(left, ranks_per_node=3)
