"""The net of LGC against torch.nn, and its training against torch.optim."""

from __future__ import annotations

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import nn

from laconic.comm.loopback import Loopback
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.reducers.learned_code.autoencoder import LAYOUT, Autoencoder, code_length, first_weights
from laconic.reducers.learned_code.trained import LR, Trained

BUCKETS = [Layout.of([(name, (3,))]) for name in "ab"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Ranks are threads here: more of them for each small convolution only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_net() -> tuple[nn.Sequential, nn.Sequential]:
    """Encoder and decoder as modules, with the same first weights."""
    down = [nn.Conv1d(a, b, 3, 2, padding=1) for a, b in ((1, 64), (64, 128), (128, 256), (256, 64))]
    up = [
        nn.ConvTranspose1d(a, b, 3, 2, padding=1, output_padding=1)
        for a, b in ((4, 32), (32, 64), (64, 128), (128, 32))
    ]
    encoder = nn.Sequential(*(m for each in down for m in (each, nn.LeakyReLU())), nn.Conv1d(64, 4, 1))
    decoder = nn.Sequential(*(m for each in up for m in (each, nn.LeakyReLU())), nn.Conv1d(32, 1, 1))
    parameters = [*encoder.parameters(), *decoder.parameters()]
    with torch.no_grad():
        for parameter, entry, view in zip(
            parameters, LAYOUT, LAYOUT.segments.views(first_weights()), strict=True
        ):
            parameter.copy_(view.view(entry.shape))
    return encoder, decoder


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@for_each("k", [1, 5, 16, 31, 100])
def test_the_net_is_what_the_modules_compute(k: int) -> None:
    encoder, decoder = plain_net()
    net, x = Autoencoder(first_weights()), noise(3, k)
    padded = torch.cat([x, torch.zeros(3, -k % 16)], dim=1).unsqueeze(1)
    code = net.encode(x)
    torch.testing.assert_close(code, encoder(padded), rtol=1e-5, atol=1e-6)
    assert code[0].numel() == code_length(k)
    torch.testing.assert_close(net.decode(code, k), decoder(code)[:, 0, :k], rtol=1e-5, atol=1e-6)


def test_the_change_is_the_derivative_and_linear() -> None:
    net, code, change = Autoencoder(first_weights().double()), noise(1, 4, 3).double(), noise(1, 4, 3, seed=1)
    change = change.double()
    value, slope = net.decode_along(code, change, 40)
    twin, forward = torch.autograd.functional.jvp(lambda c: net.decode(c, 40), code, change)
    torch.testing.assert_close(value, twin)
    torch.testing.assert_close(slope, forward)
    torch.testing.assert_close(net.decode_along(code, -2.5 * change, 40)[1], -2.5 * slope)
    assert not net.decode_along(code, torch.zeros_like(code), 40)[1].any()


def lessons(step: int) -> list[tuple[torch.Tensor, int]]:
    """Two buckets' gradients of sums over 3 and 5 examples."""
    return [(noise(LAYOUT.numel, seed=2 * step + i), count) for i, count in enumerate((3, 5))]


def taught(net: Trained, steps: range) -> Trained:
    for step in steps:
        net.begin(step)
        for lesson, bucket in zip(lessons(step), BUCKETS, strict=True):
            net.teach(lesson, bucket, step)
    return net


def test_one_step_of_adam_a_step_on_what_all_buckets_teach() -> None:
    net = taught(Trained("once/net", first_weights()), range(5))
    weights = nn.Parameter(first_weights().clone())
    adam = torch.optim.Adam([weights], lr=LR)
    for step in range(5):
        weights.grad = sum(gradient for gradient, _ in lessons(step)) / 8
        adam.step()
    state = net.state_dict()
    torch.testing.assert_close(state["once/net/weights"], weights.detach(), rtol=1e-5, atol=1e-7)
    assert int(state["once/net/steps"]) == 5
    assert not torch.equal(weights.detach(), first_weights())


def test_a_void_step_teaches_nothing() -> None:
    one, other = (taught(Trained("once/net", first_weights()), range(3)) for _ in range(2))
    other.begin(3)
    for lesson, bucket in zip(lessons(3), BUCKETS, strict=True):
        other.teach(lesson, bucket, 3)
        other.forget(bucket)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_saved_and_loaded_it_goes_on_with_the_same_bits() -> None:
    half = taught(Trained("once/net", first_weights()), range(3))
    again = Trained("once/net", first_weights())
    again.load_state_dict(half.state_dict())
    whole = taught(Trained("once/net", first_weights()), range(6)).state_dict()
    resumed = taught(again, range(3, 6)).state_dict()
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    state = half.state_dict()
    del state["once/net/steps"]
    refuses(StateError, "steps", again.load_state_dict, state)
    with pytest.raises(StateError, match=r"weights has shape \(3,\)"):
        again.load_state_dict({**state, "once/net/weights": torch.zeros(3)})


def test_ranks_that_learned_unlike_things_agree_on_rank_0() -> None:
    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        net = taught(Trained("once/net", first_weights()), range(comm.rank, comm.rank + 2))
        net.begin(9)
        net.may_differ()
        own = net.weights.clone()
        net.agree(comm, torch.device("cpu"))
        return own, net.weights

    results = Loopback.run(3, play)
    assert not torch.equal(results[1][0], results[0][0])
    assert all(torch.equal(agreed, results[0][0]) for _, agreed in results)
