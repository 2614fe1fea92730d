"""Packed models: the outputs of G in float32 bit for bit, every byte counted, and files that load."""

from __future__ import annotations

import io

import torch
from tests.unit.shared import for_each, refuses, same
from tests.unit.test_admm import LETTERS, Net, batch, net, sgd, train
from torch import Tensor, nn
from torch.nn.utils import prune

from laconic.core.errors import AttachError, StateError
from laconic.lowbit import admm, load_tables
from laconic.lowbit.tables.tables import TABLES

SHAPES = [
    {},
    {"cell": nn.GRU},
    {"num_layers": 2, "dropout": 0.5},
    {"bidirectional": True, "bias": False},
    {"cell": nn.GRU, "bidirectional": True, "num_layers": 2},
]


def packed(table: str = "ternary", tie: str = "row", seed: int = 0, **shape) -> tuple[nn.Module, nn.Module]:
    """A model that has ended at G, and its packed form."""
    model = net(seed, **shape)
    handle = admm(model, sgd(model), table, tie)
    handle.finish()
    return model.eval(), handle.pack().eval()


def saved(model: nn.Module) -> dict[str, Tensor]:
    """Its state, through a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@for_each("shape", SHAPES)
def test_outputs_are_those_of_float_bit_for_bit(shape) -> None:
    model, small = packed(**shape)
    assert torch.equal(small(batch(0)[0]), model(batch(0)[0]))
    again = load_tables(Net(**shape), saved(small)).eval()
    assert torch.equal(again(batch(1)[0]), model(batch(1)[0]))


@for_each("tie", ["row", "layer", "model"])
@for_each("table", TABLES)
def test_every_table_and_tie_packs_exactly(table, tie) -> None:
    model, small = packed(table, tie)
    x = batch(0)[0]
    assert torch.equal(small(x), model(x))
    assert torch.equal(load_tables(net(5), saved(small))(x), model(x))


def test_a_packed_cell_takes_states_and_packed_sequences() -> None:
    model, small = packed()
    x, state = torch.randn(3, 5, 6), (torch.randn(1, 3, 9), torch.randn(1, 3, 9))
    assert same(small.cell(x, state)[1], model.cell(x, state)[1])
    rows = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
    assert torch.equal(small.cell(rows)[0].data, model.cell(rows)[0].data)
    assert torch.equal(small.cell(x[0])[0], model.cell(x[0])[0])


def test_dropout_between_layers_works_in_training_alone() -> None:
    _, small = packed(num_layers=2, dropout=0.5)
    x = batch(0)[0]
    assert torch.equal(small(x), small(x))
    small.train()
    assert not torch.equal(small(x), small(x))


def test_a_model_that_goes_on_is_not_changed_by_packing() -> None:
    model = net()
    optimizer = sgd(model)
    handle = admm(model, optimizer, every=2)
    train(model, optimizer, range(5))
    before = [each.detach().clone() for each in model.parameters()]
    small = handle.pack()
    with handle.quantised():
        expected = model(batch(0)[0])
    assert torch.equal(small(batch(0)[0]), expected)
    assert same(before, model.parameters())
    assert not [*small.parameters()]


def test_the_size_counts_everything() -> None:
    """By hand for ternary rows: 5 entries a byte, a scale a row, the table, and biases."""
    model = net()
    size = admm(model, sgd(model)).size()
    rows = {"embed": (LETTERS, 6), "ih": (36, 6), "hh": (36, 9), "head": (LETTERS, 9)}
    assert size.codes == sum(r * -(-c // 5) for r, c in rows.values())
    assert size.scales == sum(4 * r + 3 for r, _ in rows.values())
    assert size.rest == 4 * (36 + 36 + LETTERS)
    assert size.dense == sum(4 * each.numel() for each in model.parameters())
    assert size.weights == sum(r * c for r, c in rows.values())
    small = packed()[1]
    assert size.packed == sum(each.numel() * each.element_size() for each in small.state_dict().values())
    assert size.smaller == size.dense / size.packed


def test_large_layers_are_15_and_30_times_smaller() -> None:
    model = nn.Sequential(nn.Embedding(128, 64), nn.LSTM(64, 200), nn.Linear(200, 128))
    assert admm(model, sgd(model), start=1).size().smaller > 15
    other = nn.Sequential(nn.LSTM(512, 1024))
    assert admm(other, sgd(other), "binary", "layer", start=1).size().smaller > 30


def test_a_single_layer_packs_to_itself() -> None:
    layer = nn.Linear(6, 4)
    handle = admm(layer, sgd(layer))
    small, x = handle.pack(), torch.randn(2, 6)
    assert torch.equal(small(x), handle.finish()(x))
    assert torch.equal(load_tables(nn.Linear(6, 4), saved(small))(x), layer(x))


def test_a_packed_model_is_not_quantised_again() -> None:
    small = packed()[1]
    refuses(AttachError, "no layer to quantise", lambda: admm(small, sgd(nn.Linear(1, 1))))


def changed(**parts: Tensor | None) -> dict[str, Tensor]:
    """A packed state in which these parts of the head differ; None is left out."""
    state = packed()[1].state_dict()
    state |= {f"head.weight.{key}": value for key, value in parts.items() if value is not None}
    for key, value in parts.items():
        if value is None:
            del state[f"head.weight.{key}"]
    return state


@for_each(
    "state, words",
    [
        (lambda: net().state_dict(), "has no packed layer"),
        (lambda: changed(alpha=None), "head.weight.alpha' is missing"),
        (lambda: changed(values=torch.tensor([-1, 2], dtype=torch.int8)), "no table has the values"),
        (lambda: changed(codes=torch.zeros(3, 2, dtype=torch.uint8)), "of another model"),
        (lambda: changed(codes=torch.full((LETTERS, 2), 255, dtype=torch.uint8)), "damaged"),
        (
            lambda: changed(alpha=torch.zeros(LETTERS, 1, dtype=torch.float64)),
            "must be uint8, float32 and int8",
        ),
        (lambda: changed(extra=torch.zeros(1)), "of another model"),
        (lambda: packed(bidirectional=True)[1].state_dict(), "has no matrix 'weight_ih_l0_reverse'"),
        (lambda: packed(num_layers=2)[1].state_dict(), "has no matrix 'weight_ih_l1'"),
    ],
)
def test_other_and_damaged_files_are_refused(state, words) -> None:
    refuses(StateError, words, lambda: load_tables(net(), state()))


def test_a_kept_layer_that_cannot_be_copied_is_named() -> None:
    model = net()
    prune.l1_unstructured(model.head, "weight", 0.5)
    handle = admm(model, sgd(model), keep=("head",))
    refuses(AttachError, r"'head\.weight' is computed from parameters.*remove .*pruning", handle.pack)
    prune.remove(model.head, "weight")
    assert torch.equal(handle.pack().head.weight, model.head.weight)
