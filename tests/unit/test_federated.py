"""Clients and a server: what they hold, what travels, and that nothing is lost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch._subclasses.fake_tensor import FakeTensorMode

from laconic.core.errors import NonFiniteError, SpecError, StateError, WireError
from laconic.federated.client import Client
from laconic.federated.form import Form
from laconic.federated.memory import InFile, InMemory
from laconic.federated.message import OVERHEAD, Kind, Message, NeedsWhole, Refused
from laconic.federated.rounds import deliver, mean, simulate, weighted_mean
from laconic.federated.samplings.constant import Constant
from laconic.federated.server import Server

from .federated_world import SHAPES, equal, model, train

WAYS = [
    ("dense()", None),
    ("stc(density=0.05)", None),
    ("stc(density=0.05)", "stc(density=0.05)"),
    ("stc(density=0.05, down=0.1)", None),
    ("dhqc(density=0.05)", "dhqc(density=0.05)"),
    ("dgc(density=0.05)", "topk(density=0.1)"),
    ("qsgd(levels=7)", "qsgd(levels=7)"),
    ("sign()", "bf16()"),
    ("fp16()", "natural()"),
]


@for_each("up, down", WAYS)
@for_each("away", [0, 1, 5, 50])
def test_who_returns_holds_the_servers_model_bit_for_bit(up: str, down: str | None, away: int) -> None:
    first = model()
    server, client = Server(first, up, down), Client(first)
    present = first
    for number in range(1, 4):
        proposed = server.receive("a", client.reply(train(0, deliver(server, client, "a"), number)[0]))
        present = mean(present, [(proposed, 1)])
        server.publish(present)
    for number in range(away):
        present = train(1, present, number)[0]
        server.publish(present)
    wire = server.message_for("a")
    assert equal(client.receive(wire), server.public)
    whole = sum(value.numel() * value.element_size() for value in first.values())
    assert wire.numel() <= whole + OVERHEAD + len(server.up.text) + (
        len(server.down.text) if server.down else 0
    )


@for_each("up, down", [ways for ways in WAYS if "tc" in ways[0] or "dgc" in ways[0]])
def test_what_was_learned_is_either_taken_or_remembered(up: str, down: str | None) -> None:
    """Though replies are lost on their way: what the server took + the residual = all that was learned."""
    first = model()
    server, memory = Server(first, up, down), InMemory()
    present, learned = first, torch.zeros(server.form.layout.numel)
    for number in range(1, 9):
        client = Client(first, memory)  # a process of its own
        held = deliver(server, client, "a")
        trained, _ = train(0, held, number)
        learned += server.form.flat(trained) - server.form.flat(held)
        wire = client.reply(trained)
        if number % 3:
            present = server.receive("a", wire)
            server.publish(present)
    taken = server.form.flat(present) - server.form.flat(first)
    assert torch.allclose(taken + memory.load()["residual"], learned, atol=1e-4)


def test_stc_both_ways_is_the_papers_algorithm() -> None:
    first, p = model(), 0.05
    server = Server(first, f"stc(density={p})", f"stc(density={p})")
    weights = [name for name in SHAPES if name.endswith("weight")]

    def ternary(x: torch.Tensor) -> torch.Tensor:
        kept = x.flatten().abs().topk(math.ceil(p * x.numel())).indices
        out = torch.zeros_like(x).flatten()
        out[kept] = x.flatten()[kept].abs().mean() * x.flatten()[kept].sign()
        return out.view_as(x)

    held = {name: first[name].clone() for name in weights}
    memories = [{name: torch.zeros(SHAPES[name]) for name in weights} for _ in range(4)]
    of_server = {name: torch.zeros(SHAPES[name]) for name in weights}
    rounds = simulate(first, train, server, clients=4, sampling=Constant(1.0), rounds=6, aggregate=mean)
    public = first
    for outcome in rounds:
        sent = []
        for client, memory in enumerate(memories):
            trained, _ = train(client, public, outcome.number)
            for name in weights:
                memory[name] += trained[name] - held[name]
            sent.append({name: ternary(memory[name]) for name in weights})
            for name in weights:
                memory[name] -= sent[-1][name]
        for name in weights:
            x = of_server[name] + sum(each[name] for each in sent) / len(sent)
            answer = server.public[name] - held[name]
            chosen = answer != 0
            largest = x.flatten().abs().topk(math.ceil(p * x.numel())).values
            # Entries of one client are equal, so there are ties: any of the largest will do.
            assert (
                int(chosen.sum()) == len(largest)
                and float(x[chosen].abs().min()) > float(largest.min()) - 1e-5
            )
            assert torch.allclose(answer[chosen], largest.mean() * x[chosen].sign(), atol=1e-5)
            of_server[name], held[name] = x - answer, server.public[name].clone()
        public = server.public


def test_lossless_both_ways_is_plain_averaging() -> None:
    first, present = model(), model()
    server = Server(first)
    for outcome in simulate(first, train, server, clients=5, sampling=Constant(0.6), rounds=4):
        proposals = [train(who, present, outcome.number) for who in outcome.chosen]
        present = weighted_mean(present, proposals)
        for name in SHAPES:
            assert torch.allclose(outcome.model[name], present[name], atol=1e-6)


@for_each("mode", ["send", "local"])
def test_buffers_travel_bit_for_bit_or_stay(mode: str) -> None:
    first = model()
    server, client = Server(first, "stc(density=0.05)", buffers=mode), Client(first, buffers=mode)
    trained, _ = train(0, deliver(server, client, "a"), 1)
    proposed = server.receive("a", client.reply(trained))
    whose = trained if mode == "send" else first
    for name in ("norm.running_mean", "norm.num_batches_tracked"):
        assert torch.equal(proposed[name], whose[name])
    server.publish({**proposed, "norm.running_mean": torch.zeros(5)})
    back = deliver(server, client, "a")
    expected = torch.zeros(5) if mode == "send" else trained["norm.running_mean"]
    assert torch.equal(back["norm.running_mean"], expected)


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes_keep_them(dtype: torch.dtype) -> None:
    first = {name: value.to(dtype) if value.dim() == 2 else value for name, value in model().items()}
    server, client = Server(first, "topk(density=0.2)", "topk(density=0.2)"), Client(first)
    held = deliver(server, client, "a")
    assert held["first.weight"].dtype == dtype and torch.equal(held["first.weight"], first["first.weight"])
    unchanged = server.receive("a", client.reply(held))
    assert unchanged["first.weight"].dtype == dtype
    assert torch.equal(unchanged["first.weight"], first["first.weight"]), "nothing was learned"


def test_a_client_without_its_memory_gets_the_whole_model() -> None:
    first = model()
    server, client = Server(first, "stc(density=0.05)", "stc(density=0.05)"), Client(first)
    server.receive("a", client.reply(train(0, deliver(server, client, "a"), 1)[0]))
    server.publish(train(1, first, 1)[0])
    afresh = Client(first)
    with pytest.raises(NeedsWhole, match="updates version 1, and this client holds 0"):
        afresh.receive(server.message_for("a"))
    assert equal(deliver(server, afresh, "a"), server.public)


def test_a_first_model_that_all_have_need_not_travel() -> None:
    first = model()
    server = Server(first, "stc(density=0.02)", "stc(density=0.02)", shared_start=True)
    present = first
    for number in range(3):
        present = train(1, present, number)[0]
        server.publish(present)
    client = Client(first, shared_start=True)
    wire = server.message_for("a")
    assert wire.numel() < 800 and equal(client.receive(wire), server.public)
    server.receive("a", client.reply(train(0, present, 3)[0]))
    with pytest.raises(
        Refused, match="other model: its names, shapes, dtypes, buffers= or first values differ"
    ):
        Client(model(seed=1), shared_start=True).receive(server.message_for("b"))


def test_a_server_that_goes_on_from_its_state_sends_the_same_bits() -> None:
    first, memory = model(), InMemory()
    ways = ("stc(density=0.05)", "stc(density=0.05)")
    one = Server(first, *ways)
    for number in range(3):
        client = Client(first, memory)
        proposed = one.receive("a", client.reply(train(0, deliver(one, client, "a"), number)[0]))
        one.publish(proposed)
    other = Server(first, *ways)
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        wires = [each.message_for("a") for each in (one, other)]
        assert torch.equal(*wires)
        reply = Client(first, memory)
        reply.receive(wires[0])
        answer = reply.reply(train(0, one.public, 9)[0])
        proposals = [each.receive("a", answer) for each in (one, other)]
        assert equal(*proposals)
        for each in (one, other):
            each.publish(proposals[0])
    with pytest.raises(StateError, match="of another model"):
        Server({"w": torch.zeros(3, 3)}).load_state_dict(one.state_dict())


def test_bytes_are_those_of_the_messages() -> None:
    first = model()
    server, client = Server(first, "stc(density=0.05)"), Client(first)
    down = server.message_for("a")
    client.receive(down)
    up = client.reply(train(0, first, 1)[0])
    server.receive("a", up)
    assert (server.traffic.down_nbytes, server.traffic.up_nbytes) == (down.numel(), up.numel())
    assert server.traffic.as_dict()["rounds"][0]["kinds"] == {"whole": 1}


def test_a_long_update_is_clipped() -> None:
    first = model()
    server, client = Server(first, max_norm=0.5), Client(first)
    proposed = server.receive("a", client.reply(train(0, deliver(server, client, "a"), 1)[0]))
    form = server.form
    assert float((form.flat(proposed) - form.flat(first)).norm()) == pytest.approx(0.5, rel=1e-4)


def test_dgcs_clip_limits_what_a_client_has_learned() -> None:
    first = model()
    server, memory = Server(first, "dgc(density=0.05, clip=0.5)"), InMemory()
    for number in range(1, 3):
        client = Client(first, memory)
        held = deliver(server, client, "a")
        before = memory.load().get("residual", torch.zeros(server.form.layout.numel))
        proposed = server.receive("a", client.reply(train(0, held, number)[0]))
        sent = server.form.flat(proposed) - server.form.flat(held)
        learned = sent + memory.load()["residual"] - before
        assert float(learned.norm()) == pytest.approx(0.5, rel=1e-4)


def test_a_refused_spec_says_why_and_what_to_take() -> None:
    first = model()
    with pytest.raises(SpecError, match=r"a client has no buckets.*omit grain"):
        Server(first, "gather(sign(), grain='bucket')")
    with pytest.raises(SpecError, match=r"starts with 2 dense steps.*start with a density below 1"):
        Server(first, "dgc(density=0.01, warmup_steps=4, warmup=(1.0, 0.1))")
    with pytest.raises(SpecError, match=r"a server cannot answer with ternary\(\).*use a spec such as stc"):
        Server(first, "stc()", "ternary()")
    with pytest.raises(SpecError, match="clip would limit the model update: omit clip"):
        Server(first, "stc()", "dgc(clip=1.0)")


def test_what_cannot_be_used_is_refused() -> None:
    first = model()
    refuses(SpecError, "needs all ranks at once", Server, first, "powersgd(rank=2)")
    refuses(SpecError, "changes the optimiser's update", Server, first, "qcmd_adagrad()")
    refuses(SpecError, "sets the direction down itself", Server, first, "stc(down=0.1)", "stc()")
    refuses(SpecError, "density must be a number", Server, first, "stc(density=0)")
    refuses(SpecError, "no floating-point parameter", lambda: Server({"steps": torch.tensor(1)}))
    refuses(SpecError, "buffers must be", Server, first, buffers="both")
    with pytest.raises(SpecError, match=r"cache_nbytes must be a whole number of 0 or more.*, got -1"):
        Server(first, cache_nbytes=-1)
    refuses(SpecError, "it had", lambda: Server(first).publish({**first, "first.bias": torch.zeros(3)}))
    with pytest.raises(WireError, match=r"NaN or Inf in 'first\.bias'"):
        Server(first).publish({**first, "first.bias": torch.full((40,), math.nan)})
    refuses(SpecError, "a round needs at least 1 client", lambda: Constant(0.1).chosen(1, 0, 0))
    client = Client(first)
    refuses(StateError, "received no model", client.reply, first)
    client.receive(Server(first).message_for("a"))
    with pytest.raises(NonFiniteError, match="diverged"):
        client.reply({**first, "first.weight": torch.full((40, 30), math.inf)})
    with pytest.raises(NonFiniteError, match=r"'first\.weight', or its update in float32"):
        client.reply({**first, "first.weight": torch.full((40, 30), 1e200, dtype=torch.float64)})


def test_what_is_published_is_held_in_the_first_models_dtypes() -> None:
    first = {"w": torch.zeros(4), "n": torch.tensor(0)}
    server = Server(first)
    server.publish({"w": torch.ones(4), "n": torch.tensor(3.7)})
    assert server.public["n"] == 3 and server.public["n"].dtype == torch.int64


def test_a_model_on_another_device_comes_to_the_host() -> None:
    form = Form.of({"w": torch.zeros(3), "norm.running_mean": torch.zeros(3), "n": torch.tensor(0)})
    with FakeTensorMode():
        there = {
            member.name: torch.empty(member.shape, dtype=member.dtype, device="cuda")
            for member in form.members
        }
        assert form.pack(there, "sent").device.type == "cpu"
        assert {each.device.type for each in form.pick(there, "sent").values()} == {"cpu"}


def test_kinds_of_messages_follow_the_length_of_an_absence() -> None:
    first, present = model(), model()
    server, client = Server(first, "stc(density=0.02)", "stc(density=0.02)", cache_nbytes=2000), Client(first)
    server.receive("a", client.reply(deliver(server, client, "a")))
    seen: dict[Kind, int] = {}
    for away in range(1, 200):
        present = train(1, present, away)[0]
        server.publish(present)
        kind = Message.unpack(server.message_for("a"), 1 << 20).kind
        seen.setdefault(kind, away)
    assert seen[Kind.UPDATES] == 1 < seen[Kind.ENTRIES] < seen[Kind.WHOLE]


@for_each("down", [None, "stc(density=0.05)"])
def test_who_only_looked_at_a_model_is_not_sent_it_again(down: str | None) -> None:
    first, memory = model(), InMemory()
    server = Server(first, "stc(density=0.05)", down)
    client = Client(first, memory)
    server.receive("a", client.reply(train(0, deliver(server, client, "a"), 1)[0]))
    residual = memory.load()["residual"].clone()
    server.publish(train(1, first, 1)[0])
    looked = Client(first, memory)
    looked.receive(server.message_for("a"))
    server.noted("a", looked.acknowledge())
    assert server.holds("a") == Client(first, memory).version == server.version
    assert torch.equal(memory.load()["residual"], residual), "what was learned is remembered"
    again = server.message_for("a")
    assert Message.unpack(again, 1 << 20).body.numel() < 60, "its buffers, and no update"
    afresh = Client(first, memory)
    assert equal(afresh.receive(again), server.public)
    with pytest.raises(Refused, match="a message answer is expected, got holds"):
        server.receive("a", afresh.acknowledge())
    refuses(StateError, "no model to keep", afresh.acknowledge)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, where a folder is needed")
    with pytest.raises(StateError, match=r"cannot save .*/run/a\.client"):
        InFile(tmp_path, "run", "a").save({"version": 1})


def test_a_form_is_what_its_text_says() -> None:
    form = Form.of({**model(), "half": torch.zeros(2, 3, dtype=torch.bfloat16)}, "local")
    assert Form.read(form.text) == form and Form.read(form.text).fingerprint == form.fingerprint
    for text in ("", "3", "[[1]]", '[["a",[1],"float32"]]', '[["a",[-1],"float32","coded"]]', "[" * 99999):
        refuses(WireError, "not the form of a model", Form.read, text)
    for text in (
        '[["a",[2],"complex64","coded"]]',
        '[["a",[2],"int8","coded"]]',
        '[["a",[0],"float32","coded"]]',
    ):
        refuses(WireError, "not the form of a model", Form.read, text)


def test_a_version_is_acknowledged_once() -> None:
    first = model()
    server, client = Server(first), Client(first, InMemory())
    client.receive(server.message_for("a"))
    wire = client.acknowledge()
    server.noted("a", wire)
    with pytest.raises(Refused, match="wrong round"):
        server.noted("a", wire)
