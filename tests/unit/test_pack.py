"""Packed models: the same bits as the simulated ones, a bit a weight, and files that cannot do harm."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor, nn

from laconic import kernels
from laconic.core.errors import AttachError, StateError
from laconic.lowbit import (
    PackedConv2d,
    PackedGRUCell,
    PackedLinear,
    PackedLSTMCell,
    binarise,
    load_packed,
    pack,
    quantise,
    save_packed,
)
from laconic.lowbit.pack import FORMAT, PREVIOUS_FORMAT


def net() -> nn.Sequential:
    """Convolutions with strides, padding and groups, and dense layers of odd widths."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 20, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(20),
        nn.Conv2d(20, 33, (3, 2), padding=(2, 0), dilation=(2, 1), bias=False),
        nn.BatchNorm2d(33),
        nn.Flatten(),
        nn.Linear(33 * 4 * 3, 50),
        nn.BatchNorm1d(50),
        nn.Linear(50, 17, bias=False),
        nn.BatchNorm1d(17),
        nn.Linear(17, 5),
    )


def trained(how) -> tuple[nn.Module, Tensor]:
    """A model after two steps, so that its norms are of some use, in evaluation; and a batch."""
    model = net()
    how(model)
    x = torch.randn(8, 3, 8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.eval(), x


WAYS = {
    "binarise": binarise,
    "binary ends": lambda model: binarise(model, first="binary", last="binary"),
    "binary weights first": lambda model: binarise(model, first="weights", last="binary"),
    "shifts": lambda model: binarise(model, norm="shift", stochastic=True),
    "1 and 2 bits": quantise,
    "2 and 3 bits": lambda model: quantise(model, 2, 3, first="weights"),
    "8 and 1 bits": lambda model: quantise(model, 8, 1),
    "weights alone": lambda model: quantise(model, 2, None),
}
LEVELS = [*kernels.runnable(), "without popcount"]
TRIED = [(level, way) for i, way in enumerate(WAYS) for level in {LEVELS[i % len(LEVELS)], "reference"}]


@for_each("level, way", TRIED)
def test_a_packed_model_has_the_bits_of_the_simulated_one(way: str, level: str) -> None:
    model, x = trained(WAYS[way])
    with torch.no_grad():
        expected = model(x)
        if level == "without popcount":
            with kernels.without_popcount():
                found = pack(model)(x)
        else:
            with kernels.using(level):
                found = pack(model)(x)
    assert torch.equal(found, expected)


def test_each_layer_has_its_packed_form_and_the_model_stays() -> None:
    model, x = trained(binarise)
    before = copy.deepcopy(model.state_dict())
    packed = pack(model)
    assert [type(packed[i]) for i in (0, 2, 4, 7, 9, 11)] == [
        *(nn.Conv2d, PackedConv2d, PackedConv2d),
        *(PackedLinear, PackedLinear, nn.Linear),
    ]
    assert not packed.training and not any(part.requires_grad for part in packed.parameters())
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    assert torch.equal(packed[2](x[0].repeat(4, 1, 1)), packed[2](x[:1].repeat(1, 4, 1, 1))[0]), "one image"
    assert torch.equal(packed[9](torch.ones(2, 3, 50)), packed[9](torch.ones(6, 50)).view(2, 3, 17))


class Tagger(nn.Module):
    def __init__(self, cell: type) -> None:
        super().__init__()
        self.embedding, self.cell, self.out = nn.Embedding(9, 13), cell(13, 21), nn.Linear(21, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for token in self.embedding(x).unbind(1):
            state = self.cell(token, state)
            found.append(self.out(state[0] if isinstance(state, tuple) else state))
        return torch.stack(found, 1)


@for_each("cell, form", [(nn.LSTMCell, PackedLSTMCell), (nn.GRUCell, PackedGRUCell)])
@for_each("bits", [(1, 1), (2, 2)])
def test_packed_cells_have_the_bits_of_the_simulated_ones(cell, form, bits, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tagger(cell)
    quantise(model, *bits, first="binary")
    x = torch.randint(0, 9, (5, 7))
    packed = pack(model)
    save_packed(packed, tmp_path / "model")
    again = load_packed(tmp_path / "model", Tagger(cell))
    assert isinstance(again.cell, form)
    with torch.no_grad():
        assert torch.equal(packed(x), model.eval()(x)) and torch.equal(again(x), packed(x))


@for_each("way", ["binary ends", "binary weights first", "2 and 3 bits"])
def test_an_empty_batch_has_an_empty_result(way: str) -> None:
    model, x = trained(WAYS[way])
    packed = pack(model)
    with torch.no_grad():
        assert packed(x[:0]).shape == model(x[:0]).shape == (0, 5)
        assert packed[7](torch.zeros(2, 0, 396)).shape == (2, 0, 50)


@for_each("way", ["binarise", "binary weights first", "weights alone"])
def test_autocast_changes_packed_layers_as_little_as_simulated_ones(way: str) -> None:
    model, x = trained(WAYS[way])
    packed = pack(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for simulated, small in zip(model, packed, strict=True):
            expected = simulated(x)
            assert torch.equal(small(x), expected)
            x = expected


def test_weights_are_32_times_smaller_in_memory_and_on_disk(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8))
    conv = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 3, 3))
    binarise(model)
    binarise(conv)
    assert pack(model)[2].bits.nbytes * 32 == model[2].weight.nbytes
    assert pack(conv)[1].bits.nbytes * 32 == conv[1].weight.nbytes
    save_packed(pack(model), tmp_path / "model")
    weights = sum(layer.weight.nbytes for layer in model[1:3])
    others = sum(part.nbytes for part in model.parameters()) - weights
    assert (tmp_path / "model").stat().st_size < weights / 32 + others + 5000
    two = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8))
    quantise(two, 2)
    assert pack(two)[1].bits.nbytes * 16 == two[1].weight.nbytes


@for_each("way", WAYS)
def test_a_file_gives_the_same_model_again(way: str, tmp_path: Path) -> None:
    model, x = trained(WAYS[way])
    packed, path = pack(model), tmp_path / "model"
    save_packed(packed, path)
    built = net()
    before = copy.deepcopy(built.state_dict())
    again = load_packed(path, built)
    with torch.no_grad():
        assert torch.equal(again(x), packed(x))
    assert all(torch.equal(part, before[name]) for name, part in built.state_dict().items())
    torch.load(path, weights_only=True)


def test_a_file_says_which_norms_have_shifts(tmp_path: Path) -> None:
    """One of before does not: it is read too."""
    model, x = trained(WAYS["shifts"])
    path, built = tmp_path / "model", net()
    save_packed(pack(model), path)
    binarise(built, norm="shift")
    with torch.no_grad():
        for given in (net(), built):
            assert torch.equal(load_packed(path, given)(x), model(x))
    plain, x = trained(binarise)
    save_packed(pack(plain), path)
    refuses(StateError, "has a ShiftBatchNorm that the file lacks", load_packed, path, built)
    content = torch.load(path, weights_only=True)
    del content["norms"]
    torch.save(content | {"format": PREVIOUS_FORMAT}, path)
    with torch.no_grad():
        assert torch.equal(load_packed(path, net())(x), plain(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_packed_model_refuses_gradients_and_traces() -> None:
    model, x = trained(binarise)
    packed = pack(model.eval())
    uses = {
        "gradient": lambda: packed(x.clone().requires_grad_()),
        "torch.jit.trace": lambda: torch.jit.trace(packed, x),
        "torch.export": lambda: torch.export.export(packed, (x,)),
    }
    for word, use in uses.items():
        with pytest.raises(StateError, match=word):
            use()
    with torch.no_grad():
        assert torch.equal(packed(x.clone().requires_grad_()), packed(x))
    assert torch.equal(torch.compile(packed, backend="eager")(x), packed(x))


def test_what_cannot_be_packed_is_refused() -> None:
    logarithmic, half = net(), net()
    wide = nn.Sequential(nn.Linear(2, 2), nn.Linear(300, 2), nn.Linear(2, 2))
    quantise(logarithmic, 2, 2, scale="log")
    quantise(wide, 8, 8)
    binarise(half)
    for model, words in (
        (net(), "no layer to pack"),
        (logarithmic, "'2': logarithmic levels"),
        (wide, "'1': 300 products of 8 by 8 bits exceed 2\\^24"),
        (half.bfloat16(), r"'2' is torch\.bfloat16, but packed layers need float32"),
    ):
        refuses(AttachError, words, pack, model)
    refuses(AttachError, "not packed", save_packed, net(), "nowhere")


def saved(tmp_path: Path) -> tuple[Path, dict]:
    model, _ = trained(binarise)
    path = tmp_path / "model"
    save_packed(pack(model), path)
    return path, torch.load(path, weights_only=True)


def test_a_file_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    path, good = saved(tmp_path)
    bits = good["state"]["9.bits"]
    tail = bits.clone()
    tail[0, 3, -1] |= 128
    bad = [
        ({"format": FORMAT}, "not a packed model"),
        ([good], "not a packed model"),
        (good | {"format": "another"}, "not a packed model"),
        (good | {"layers": {}}, "lacks its layers"),
        (good | {"state": 3}, "lacks its layers"),
        (good | {"layers": good["layers"] | {"7": {"weights": 99}}}, "'7' has invalid bits"),
        (good | {"layers": good["layers"] | {"7": 5}}, "'7' has invalid bits"),
        (good | {"layers": good["layers"] | {"7": {"w": 1}}}, "'7' has invalid bits"),
        (good | {"layers": good["layers"] | {"7": {"weights": 2}}}, "7.bits must be"),
        (good | {"layers": good["layers"] | {"7": {"scale": "log"}}}, "'7': logarithmic"),
        (good | {"layers": good["layers"] | {"77": {}}}, "'77', which this model lacks"),
        (good | {"layers": good["layers"] | {"": {}}}, "'', which this model lacks"),
        (good | {"layers": good["layers"] | {"1": {}}}, "'1', which this model lacks"),
        (good | {"norms": 3}, "lacks the names of its norms"),
        (good | {"norms": ["2"]}, "ShiftBatchNorm '2', but this model has no BatchNorm there"),
        (good | {"norms": [""]}, "ShiftBatchNorm '', but this model has no BatchNorm there"),
        (good | {"norms": ["1", "1"]}, "has a ShiftBatchNorm that the file lacks"),
        (good | {"state": good["state"] | {"x": bits}}, "x differ"),
        (good | {"state": {n: t for n, t in good["state"].items() if n != "9.bits"}}, "9.bits differ"),
        (good | {"state": good["state"] | {"9.bits": bits[:, :1]}}, "9.bits must be"),
        (good | {"state": good["state"] | {"9.bits": bits.int()}}, "9.bits must be"),
        (good | {"state": good["state"] | {"9.bits": bits.to_sparse()}}, "9.bits must be a dense tensor"),
        (good | {"state": good["state"] | {"9.bits": 1.0}}, "9.bits must be"),
        (good | {"state": good["state"] | {"9.bits": tail}}, "9.bits has bits set after the 50 weights"),
    ]
    built = net()
    before = copy.deepcopy(built.state_dict())
    for content, says in bad:
        torch.save(content, path)
        refuses(StateError, says, load_packed, path, built)
    assert all(torch.equal(part, before[name]) for name, part in built.state_dict().items())
    assert not any(isinstance(module, PackedLinear) for module in built.modules())
    refuses(FileNotFoundError, ".", load_packed, tmp_path / "none", built)


def test_a_damaged_note_beside_the_tensors_does_no_harm(tmp_path: Path) -> None:
    path, content = saved(tmp_path)
    x = torch.randn(2, 3, 8, 8)
    before = load_packed(path, net())(x)
    content["state"]._metadata = {"7": 5, "": "x"}
    torch.save(content, path)
    assert torch.equal(load_packed(path, net())(x), before)


def fuzz(path: Path, good: bytes, count: int, seed: int) -> tuple[int, int]:
    """How many damaged files were refused, and accepted: any other outcome raises."""
    rng, built, x = random.Random(seed), net(), torch.randn(2, 3, 8, 8)
    refused = 0
    for _ in range(count):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            model = load_packed(path, built)
        except StateError:
            refused += 1
        else:
            with torch.no_grad():
                assert model(x).shape == (2, 5)
    return refused, count - refused


def test_damaged_files_are_refused_or_give_a_model(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    refused, accepted = fuzz(path, path.read_bytes(), 60, 0)
    assert refused > 10 and refused + accepted == 60


@pytest.mark.soak
def test_many_damaged_files_are_refused_or_give_a_model(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    refused, accepted = fuzz(path, path.read_bytes(), 20_000, 1)
    assert refused > 1000 and refused + accepted == 20_000
