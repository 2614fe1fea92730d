"""ZeroFL as a scheme: one round equals the paper's masks and averages, and `laconic federate` runs it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import nn

from laconic.core.errors import AttachError, SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.federated.rounds import simulate
from laconic.federated.samplings.constant import Constant
from laconic.federated.schemes import scheme_of
from laconic.federated.schemes.zerofl import MASKS, ZeroFL
from laconic.federated.zerofl import Uplink
from laconic.sparsity import SwatLinear, swat
from laconic.tools.tasks import find
from laconic.tools.tasks.federation import Federation, federate, local_training
from laconic.tools.tasks.on_flower import LocalTraining, _read


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))


@for_each("mask", MASKS)
@for_each("ratio", [0.0, 0.2])
def test_rounds_are_those_of_the_uplink_masks(mask, ratio) -> None:
    net = mlp()
    start = copy.deepcopy(net.state_dict())
    scheme = ZeroFL(0.8, ratio, mask).attached(net)
    assert [type(each) for each in net][::2] == [nn.Linear, SwatLinear, SwatLinear]
    names = [name for name, _ in net.named_parameters()]
    layout = Layout.of((name, tuple(part.shape)) for name, part in net.named_parameters())
    uplink = Uplink(MASKS[mask](0.8, ratio), layout, swat(mlp(), 0.8).weights)

    def flat(model) -> torch.Tensor:
        return torch.cat([model[name].flatten() for name in names])

    def trained(client: int, model, number: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(100 * number + client)
        moved = {name: 0.05 * torch.randn(model[name].shape, generator=rng) for name in names}
        return {name: value + moved.get(name, 0) for name, value in model.items()}

    rounds = simulate(
        start,
        lambda client, model, number: (scheme.shared(model, trained(client, model, number)), 1 + client),
        scheme.server(start, shared_start=True),
        clients=3,
        sampling=Constant(1.0),
        rounds=3,
        aggregate=scheme.aggregate,
        shared_start=True,
    )
    weights, before = flat(start), start
    for outcome in rounds:
        ends = [flat(trained(client, before, outcome.number)) for client in outcome.chosen]
        wires = [uplink.encode(weights, end) for end in ends]
        weights = uplink.next_weights(weights, wires, [1 + client for client in outcome.chosen])
        assert torch.allclose(flat(outcome.model), weights, atol=1e-6)
        buffers = sum(part.nbytes for part in net.buffers())
        masked = sum(wire.numel() for wire in wires)
        assert masked < outcome.up < masked + 3 * (buffers + 600), "and headers"
        weights, before = flat(outcome.model), dict(outcome.model)


def test_each_client_starts_with_its_own_thresholds() -> None:
    net = mlp()
    scheme = ZeroFL(0.8).attached(net)
    for _ in range(3):
        net(torch.randn(5, 6))
    assert net[2].thresholds.batches == 3
    scheme.begin()
    assert net[2].thresholds.batches == 0 and net[2].thresholds.due


SETTINGS = Federation(
    task="digits",
    model=None,
    spec="zerofl(sparsity=0.6, mask_ratio=0.1)",
    by="iid()",
    clients=4,
    per_round=4,
    rounds=12,
    local_steps=10,
    batch=20,
    lr=0.1,
    momentum=0.0,
    seed=0,
    eval_every=12,
)


def test_a_client_in_a_process_of_flower_sends_the_same() -> None:
    tensors, net, shares, scheme = _read(SETTINGS, None)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    remote = LocalTraining(SETTINGS, None)
    for client in (0, 1):
        model = find("digits").recipe(None).build()
        own = scheme_of(SETTINGS.spec).attached(model)
        ours = local_training(SETTINGS, find("digits"), tensors, model, shares, own, client, start, 1)
        theirs = remote(client, start, 1)
        assert ours[1] == theirs[1] and all(torch.equal(ours[0][name], theirs[0][name]) for name in start)
    assert "by_name" in scheme.up


def test_a_task_learns_with_it() -> None:
    tensors = find("digits").load(None)
    ours, again = ([*federate(SETTINGS, tensors)] for _ in range(2))
    assert ours == again and ours[-1]["accuracy"] > 0.75 and not ours[-1]["failed"]
    model = sum(each.numel() for each in find("digits").recipe(None).build().parameters())
    assert ours[-1]["up"] < 0.8 * 4 * 4 * model


def test_what_it_cannot_do_is_refused() -> None:
    for text, words in (
        ("zerofl(sparsity=1.0)", "sparsity"),
        ("zerofl(mask_ratio=0.95)", "mask_ratio"),
        ("zerofl(mask='top_weights')", "mask"),
        ("zerofl(keep='head')", "keep"),
    ):
        refuses(SpecError, words, parse, text)
    with pytest.raises(SpecError, match="needs the model that clients train"):
        ZeroFL().server(mlp().state_dict())
    refuses(AttachError, "no layer to sparsify", ZeroFL().attached, nn.Sequential(nn.Linear(3, 3)))
