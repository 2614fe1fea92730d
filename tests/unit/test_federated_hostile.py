"""Messages that no honest side has sent: refused with a reason, and nothing has changed."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
import torch
from tests.unit.shared import for_each, refuses

from laconic.core.errors import SpecError, WireError
from laconic.federated.client import Client
from laconic.federated.message import Kind, Message, Refused
from laconic.federated.rounds import deliver, mean, simulate
from laconic.federated.samplings.constant import Constant
from laconic.federated.server import Server

from .federated_world import SHAPES, equal, model, train

SPEC = "stc(density=0.05)"
FLIPS = 1000


def answered(spec: str = SPEC) -> tuple[Server, torch.Tensor]:
    """A server that waits for this answer of "a"."""
    first = model()
    server, client = Server(first, spec), Client(first)
    return server, client.reply(train(0, deliver(server, client, "a"), 1)[0])


def rewritten(wire: torch.Tensor, **changes: object) -> torch.Tensor:
    """The message with other fields, and a checksum that fits."""
    return replace(Message.unpack(wire, 1 << 24), **changes).pack()


@for_each(
    "reason, changes",
    [
        ("wrong round", {"token": 12345}),
        ("wrong round", {"base": 0}),
        ("other spec", {"up": "dense()"}),
        ("other model", {"fingerprint": b"\0" * 8}),
        ("malformed", {"kind": Kind.WHOLE}),
        ("malformed", {"body": torch.zeros(3, dtype=torch.uint8)}),
        ("malformed", {"body": torch.full((400,), 255, dtype=torch.uint8)}),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_by_name(reason: str, changes: dict[str, object]) -> None:
    server, wire = answered()
    with pytest.raises(Refused) as refused:
        server.receive("a", rewritten(wire, **changes))
    assert refused.value.reason == reason
    assert server.traffic.refusals == {("a", reason): 1}
    server.receive("a", wire)  # the honest answer is still welcome


def test_values_that_would_ruin_the_model_are_refused() -> None:
    server, wire = answered("dense()")
    body = Message.unpack(wire, 1 << 24).body
    carried, head = server.form.carried_nbytes, 4
    for value, reason in ((torch.nan, "malformed"), (torch.inf, "malformed"), (1e30, "too large")):
        values = torch.full((server.form.layout.numel,), value).view(torch.uint8)
        with pytest.raises(Refused) as refused:
            server.receive("a", rewritten(wire, body=torch.cat([body[: carried + head], values])))
        assert refused.value.reason == reason
    spoilt = torch.cat([torch.full((5,), torch.nan).view(torch.uint8), body[20:]])
    refuses(Refused, "a buffer holds NaN", lambda: server.receive("a", rewritten(wire, body=spoilt)))


def test_an_update_that_half_precision_cannot_hold_is_refused() -> None:
    """Its norm is no thousand times the model's, and yet the sum would be Inf and end the run."""
    first = {"w": torch.full((200, 200), 0.5, dtype=torch.float16)}
    server, client = Server(first), Client(first)
    wire = client.reply(client.receive(server.message_for("a")))
    values = torch.zeros(40_000)
    values[0] = 9e4
    body = torch.cat([Message.unpack(wire, 1 << 24).body[:4], values.view(torch.uint8)])
    with pytest.raises(Refused, match=r"too large: 'w' and its update do not fit in torch\.float16"):
        server.receive("a", rewritten(wire, body=body))
    assert equal(server.receive("a", wire), first), "the honest answer is still welcome"


def test_buffers_that_would_ruin_the_model_are_refused() -> None:
    """They are finite, and a mean with them is no statistic any more."""
    server, wire = answered()
    body = Message.unpack(wire, 1 << 24).body
    assert server.form.carried_nbytes == 20 + 8
    far = torch.full((5,), 1e30).view(torch.uint8)
    count = torch.tensor([1 << 62]).view(torch.uint8)
    for spoilt in (torch.cat([far, body[20:]]), torch.cat([body[:20], count, body[28:]])):
        with pytest.raises(Refused, match=r"too large: buffer 'norm\.\w+' changed by"):
            server.receive("a", rewritten(wire, body=spoilt))
    server.receive("a", wire)


def test_a_spec_too_long_for_a_message_is_refused_at_once() -> None:
    long = f"by_name({{'first{'*' * 2000}': dense()}}, rest=stc(density=0.05))"
    for ways in ((long, None), ("dense()", long)):
        with pytest.raises(SpecError, match="a spec in a message has at most 2000 bytes"):
            Server(model(), *ways)


def test_a_client_accepts_a_spec_however_it_is_written() -> None:
    first = model()
    wire = Server(first, "topk(0.05)", "stc(density=0.05)").message_for("a")
    Client(first, up="topk( density = 0.05 )", down="stc(0.05)").receive(wire)
    refuses(SpecError, "unknown name 'tpok'", Client, first, up="tpok(0.05)")


@for_each("buffers", ["send", "local"])
def test_a_first_model_that_is_not_finite_is_refused_by_its_name(buffers: str) -> None:
    """Else every honest client would be told that its training has diverged."""
    mask = torch.full((4, 4), -torch.inf).triu(1)
    with pytest.raises(SpecError, match=r"'mask' of the first model holds NaN.*buffers=\['mask'\]"):
        Server({**model(), "mask": mask}, buffers=buffers)
    first = {**model(), "mask": mask}
    server, client = Server(first, buffers=["mask"]), Client(first, buffers=["mask"])
    assert equal(server.receive("a", client.reply(deliver(server, client, "a"))), first)
    with pytest.raises(SpecError, match="'wide' of the first model"):
        Server({"w": torch.ones(3, 3), "wide": torch.full((2, 2), 1e300, dtype=torch.float64)})
    with pytest.raises(SpecError, match=r"'norm\.running_var' of the first model"):
        Server({**model(), "norm.running_var": torch.full((5,), torch.inf)})


def test_buffers_that_are_not_finite_are_not_published() -> None:
    first = model()
    server = Server(first)
    with pytest.raises(WireError, match=r"NaN or Inf in 'norm\.running_mean'"):
        server.publish({**first, "norm.running_mean": torch.full((5,), torch.nan)})
    assert equal(server.public, first)


def test_an_answer_counts_once() -> None:
    server, wire = answered()
    proposed = server.receive("a", wire)
    refuses(Refused, "replayed", server.receive, "a", wire)
    server.publish(proposed)
    refuses(Refused, "replayed", server.receive, "a", wire)
    refuses(Refused, "wrong round", server.receive, "b", wire)


def test_every_cut_and_many_flips_are_refused() -> None:
    server, wire = answered("topk(density=0.01)")
    before = server.state_dict()
    for length in range(wire.numel()):
        with pytest.raises(Refused, match=r"truncated|malformed|oversized"):
            server.receive("a", wire[:length])
    rng = random.Random(0)
    for _ in range(FLIPS):
        flipped = wire.clone()
        for _ in range(rng.randint(1, 4)):
            flipped[rng.randrange(wire.numel())] ^= rng.randint(1, 255)
        if not torch.equal(flipped, wire):
            with pytest.raises(Refused):
                server.receive("a", flipped)
    assert torch.equal(before["public"], server.state_dict()["public"])
    assert before["contacts"] == server.state_dict()["contacts"]


def test_flips_under_a_right_checksum_write_no_nonsense() -> None:
    """Whoever makes the message can make its checksum: codecs must refuse by themselves."""
    first, rng = model(), random.Random(1)
    server, wire = answered()
    for _ in range(300):
        body = Message.unpack(wire, 1 << 24).body.clone()
        body[rng.randrange(body.numel())] ^= rng.randint(1, 255)
        try:
            proposed = server.receive("a", rewritten(wire, body=body))
        except Refused:
            continue
        assert all(bool(proposed[name].isfinite().all()) for name in SHAPES)
        assert all(proposed[name].shape == first[name].shape for name in first)
        server, wire = answered()


@for_each("away", [1, 6])
@for_each("down", ["stc(density=0.05)", "dhqc(density=0.05)", "sign()", "qsgd(levels=7)", None])
def test_a_client_takes_no_nonsense_from_a_server(down: str | None, away: int) -> None:
    """Whatever it is sent, it holds the server's model or the one that it held."""
    first, rng = model(), random.Random(2)
    server, client, elsewhere = Server(first, SPEC, down), Client(first), model()
    server.receive("a", client.reply(train(0, deliver(server, client, "a"), 0)[0]))
    for number in range(away):
        elsewhere = train(1, elsewhere, number)[0]
        server.publish(elsewhere)
    wire, held = server.message_for("a"), client.version
    message = Message.unpack(wire, 1 << 24)
    coded = message.body.numel() - server.form.carried_nbytes
    for _ in range(40):
        body = message.body.clone()
        body[-rng.randint(1, coded)] ^= rng.randint(1, 255)
        body = body[: rng.choice([len(body), len(body), rng.randrange(len(body))])]
        if message.kind is Kind.WHOLE and len(body) == len(message.body):
            continue  # any numbers are a model
        try:
            taken = client.receive(replace(message, body=body).pack())
        except Refused:
            assert client.version == held
            continue
        assert equal(taken, server.public), "a bit without a meaning"
        held = client.version
    assert equal(client.receive(wire), server.public)


def test_a_message_that_announces_much_takes_no_memory() -> None:
    server, _ = answered()
    tracemalloc.start()
    refuses(Refused, "oversized", lambda: server.receive("a", torch.zeros(1 << 20, dtype=torch.uint8)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 18


def test_a_client_refuses_what_it_did_not_ask_for() -> None:
    first = model()
    wire = Server(first, SPEC).message_for("a")
    refuses(Refused, "other spec: the server has up=", lambda: Client(first, up="dense()").receive(wire))
    refuses(Refused, "other model", lambda: Client({"w": torch.zeros(99, 99)}).receive(wire))
    with pytest.raises(Refused, match="other protocol"):
        Client(first).receive(torch.cat([wire[:4], torch.tensor([9], dtype=torch.uint8), wire[5:]]))
    with pytest.raises(Refused, match="malformed: unknown name"):
        Client(first).receive(rewritten(wire, up="nonsense()"))


def test_a_round_goes_on_without_who_is_refused() -> None:
    first = model()
    server = Server(first, SPEC)

    def some_fail(client: int, tensors: dict[str, torch.Tensor], number: int):
        trained, examples = train(client, tensors, number)
        if client == 1:
            trained["first.weight"][0, 0] = torch.nan
        if client == 2:
            trained["first.weight"] = 1e20 * torch.ones(SHAPES["first.weight"])
        return trained, examples

    for outcome in simulate(
        first, some_fail, server, clients=5, sampling=Constant(1.0), rounds=3, aggregate=mean
    ):
        assert set(outcome.failed) == {1, 2} and "diverged" in outcome.failed[1]
    assert server.traffic.refusals == {("2", "too large"): 3}


def test_a_client_that_diverged_once_is_welcome_again() -> None:
    """What its residual owes of an update that was too large would make all later ones too large."""
    first = model()
    server, client = Server(first, "topk(density=0.1)"), Client(first)
    for size, refused in ((1.0, False), (1e6, True), (1e-2, False), (1e-2, False)):
        held = deliver(server, client, "a")
        wire = client.reply({**held, "first.weight": held["first.weight"] + size})
        if refused:
            refuses(Refused, "too large: the update's norm", server.receive, "a", wire)
        else:
            server.publish(server.receive("a", wire))
    assert server.traffic.refusals == {("a", "too large"): 1}
    owed = client._state["residual"]
    assert 0 < float(owed.norm()) < 10
