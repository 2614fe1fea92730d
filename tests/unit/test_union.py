"""What DEFT, MiCRO and ExDyna tell each other: damaged messages are refused, with the rank that sent them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.codecs.indices.delta import Delta
from laconic.codecs.indices.golomb import Golomb
from laconic.codecs.indices.raw32 import Raw32
from laconic.comm.loopback import Loopback
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.deft.union import message, read

from ..laws.worlds import MODEL, gradient


class Tampered(Loopback):
    """A rank that gets the messages of rank 1, in its n-th gathering, with a byte changed or cut off."""

    def __init__(self, comm: Loopback, nth: int, cut: bool) -> None:
        super().__init__(comm.room, comm.rank)
        self.left, self.cut = nth, cut

    def all_gather(self, x: Tensor) -> list[Tensor]:
        came = super().all_gather(x)
        self.left -= 1
        if self.left == 0:
            came[1] = came[1][:-1] if self.cut else came[1] ^ 255
        return came


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name, nth", [("deft", 2), ("micro", 1), ("exdyna", 1)])
def test_a_damaged_message_is_refused_with_the_rank_that_sent_it(name: str, nth: int, cut: bool) -> None:
    def play(comm):
        bound = parse(f"{name}(density=0.1)").bind(MODEL, Tampered(comm, nth, cut))
        with pytest.raises(WireError, match="the message that rank 1 sent is damaged"):
            bound.reduce(gradient(comm.rank, 0), MODEL, Turn(0, comm.rank), torch.zeros(MODEL.numel))
        return True

    assert Loopback.run(3, play) == [True] * 3


def test_damaged_norms_are_refused_with_the_rank_that_sent_them() -> None:
    def play(comm):
        bound = parse("deft(density=0.1)").bind(MODEL, Tampered(comm, 1, cut=True))
        with pytest.raises(WireError, match="the message that rank 1 sent is damaged: 2 norms are expected"):
            bound.reduce(gradient(comm.rank, 0), MODEL, Turn(0, comm.rank), torch.zeros(MODEL.numel))
        return True

    assert Loopback.run(3, play) == [True] * 3


@pytest.mark.parametrize("coding", [Golomb(), Raw32(), Delta()])
def test_any_bytes_are_positions_in_their_segments_or_refused(coding) -> None:
    segments = Segments((3, 50, 60), (40, 0, 300))
    rng = torch.Generator().manual_seed(0)
    indices = torch.tensor([0, 39, 7, 8, 299], dtype=torch.int32)
    counts = torch.tensor([2, 0, 3])
    wire = message((indices, counts), segments, coding, indices.device)
    back = read(wire, segments, coding)
    assert torch.equal(back[0], indices) and torch.equal(back[1], counts)
    refused = 0
    for _ in range(600):
        bad = wire.clone()
        at = torch.randint(bad.numel(), (2,), generator=rng)
        bad[at] = torch.randint(256, (2,), generator=rng, dtype=torch.uint8)
        bad = bad[: int(torch.randint(1, bad.numel() + 1, (1,), generator=rng))]
        try:
            found, of_each = read(bad, segments, coding)
        except WireError:
            refused += 1
            continue
        assert found.numel() == int(of_each.sum()) and int(of_each.min()) >= 0
        sizes = torch.repeat_interleave(segments.sizes_tensor, of_each)
        assert bool(((found >= 0) & (found < sizes)).all())
    assert refused > 300
