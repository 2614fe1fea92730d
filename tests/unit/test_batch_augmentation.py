"""Batch augmentation: same examples, other augmentations, in an order that nothing but numbers decides."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.shared import for_each, refuses, same
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from laconic.core.errors import AttachError, SpecError, StateError
from laconic.data import CopiedDataset, CopiesSampler, batch_augmentation
from laconic.recipes import Copies

N = 24


class Numbers(Dataset[Any]):
    """Example i is (i, i + noise of its own transform); it notes what was read."""

    def __init__(self, n: int = N) -> None:
        self.n = n
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, number: int) -> Tensor:
        self.read.append(number)
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        return torch.tensor([number, number + noise], dtype=torch.float64)


def plain(number: Tensor, rng: torch.Generator) -> Tensor:
    return torch.cat([number[:1], number[:1] + torch.rand(1, generator=rng, dtype=torch.float64)])


def batches(copies: int, across: Any, rank: int = 0, size: int = 1, workers: int = 0, **more: Any) -> Any:
    loader = DataLoader(
        more.pop("data", Numbers()), batch_size=more.pop("batch", 3), shuffle=True, num_workers=workers
    )
    return batch_augmentation(loader, copies, across, rank=rank, size=size, **more)


def test_a_group_of_ranks_has_the_same_examples_with_other_augmentations() -> None:
    found = [list(batches(2, "ranks", rank, 4)) for rank in range(4)]
    assert len(found[0]) == N // (3 * 2)
    for first, second in ((0, 1), (2, 3)):
        for a, b in zip(found[first], found[second], strict=True):
            assert torch.equal(a[:, 0], b[:, 0])
            assert not (a[:, 1] == b[:, 1]).any()
    seen = [number for rank in (0, 2) for batch in found[rank] for number in batch[:, 0].tolist()]
    assert sorted(seen) == list(range(N))  # groups never overlap, and an epoch is everything once


def test_reading_across_ranks_is_down_by_the_copies() -> None:
    read = {}
    for copies in (1, 4):
        data = [Numbers() for _ in range(4)]
        loaders = [batches(copies, "ranks", rank, 4, data=data[rank], batch=2) for rank in range(4)]
        distinct = inputs = 0
        iterators = [iter(loader) for loader in loaders]
        for _ in range(3):  # steps
            for each in data:
                each.read.clear()
            inputs += sum(len(next(iterator)) for iterator in iterators)
            distinct += len({number for each in data for number in each.read})
        told = loaders[0].batch_sampler.reading
        assert (3 * told.inputs, 3 * told.distinct) == (inputs, distinct)
        read[copies] = distinct
        assert inputs == 24
    assert read[1] == 4 * read[4]


def test_with_augment_an_example_is_read_once_for_all_its_copies() -> None:
    data = Numbers()
    batch = next(iter(batches(4, "batch", data=data, augment=plain)))
    assert len(batch) == 12
    assert len(data.read) == 3
    assert len(set(batch[:, 1].tolist())) == 12


def test_a_batch_is_duplicate_major() -> None:
    for batch in batches(4, "batch"):
        rows = batch[:, 0].view(4, 3)
        assert (rows == rows[0]).all()
        assert len(set(rows[0].tolist())) == 3  # a chunk has distinct examples
        assert len(set(batch[:, 1].tolist())) == 12


@for_each("across", ["ranks", "batch"])
@for_each("augment", [None, plain])
def test_workers_and_a_resume_change_nothing(across: Any, augment: Any) -> None:
    """Two epochs in this process, against a start in the middle of the second with two worker processes."""
    settings: dict[str, Any] = {"rank": 1, "size": 2, "augment": augment, "seed": 5}
    whole = batches(2, across, **settings)
    first, second = list(whole), list(whole)
    assert not torch.equal(torch.cat(first)[:, 0], torch.cat(second)[:, 0])
    resumed = batches(2, across, workers=2, **settings)
    resumed.batch_sampler.set_epoch(1, start=2)
    assert len(resumed) == len(second) - 2
    assert same(second[2:], resumed)


def test_persistent_workers_count_epochs_once() -> None:
    loader = DataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)
    persistent, plainly = batch_augmentation(loader, 2, "batch"), batches(2, "batch")
    for _ in range(3):
        assert same(persistent, plainly)


def test_an_example_meets_other_augmentations_in_each_epoch() -> None:
    loader = batches(2, "batch")
    noise = [{(int(n), round(v - n, 12)) for batch in loader for n, v in batch.tolist()} for _ in range(3)]
    assert len(set.union(*noise)) == 3 * 2 * N


def test_the_callers_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    next(iter(CopiedDataset(Numbers()).__getitems__([next(iter(CopiesSampler(N, 1, 1)))[0]])))
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    seed()
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())


def test_a_sampler_of_some_examples_is_dealt_alike_on_all_ranks() -> None:
    samplers = [
        batch_augmentation(SubsetRandomSampler(range(0, N, 2)), 2, batch=2, rank=rank, size=2, seed=3)
        for rank in range(2)
    ]
    for first, second in zip(*samplers, strict=True):
        assert [draw.example for draw in first] == [draw.example for draw in second]
        assert all(draw.example % 2 == 0 for draw in first)
    one, two = ([[draw.example for draw in batch] for batch in samplers[0]] for _ in range(2))
    assert one != two


def test_a_loader_in_order_stays_in_order() -> None:
    loader = batch_augmentation(DataLoader(Numbers(), batch_size=4), 2, "batch")
    assert [batch[0, 0].item() for batch in loader] == list(range(0, N, 4))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


SHARD = DistributedSampler(Numbers(), 2, 0)
OWN = RandomSampler(Numbers(), generator=torch.Generator())


@for_each(
    "make, says",
    [
        (lambda: batches(4, "ranks", size=6), r"divide their number, 6, got 4: use 3 copies, 8 ranks"),
        (lambda: batches(2, "ranks", size=2, batch=25), r"1\.\.24 for 24 examples among 1 groups.*got 25"),
        (lambda: batches(0, "batch"), "copies must be"),
        (lambda: batches(2, "epochs"), "'ranks' or 'batch'"),
        (lambda: batch_augmentation(DataLoader(Stream(), batch_size=2)), "Stream is an IterableDataset"),
        (lambda: batch_augmentation(DataLoader(Numbers(), batch_size=None)), "batch_size="),
        (lambda: batch_augmentation(DataLoader(Numbers(), sampler=SHARD)), "DistributedSampler"),
        (lambda: batch_augmentation(SHARD, batch=2), "DistributedSampler"),
        (lambda: batch_augmentation(OWN, batch=2, copies=1), "its own generator"),
        (lambda: batch_augmentation(Numbers()), "takes a DataLoader or a sampler, got Numbers"),
        (lambda: batch_augmentation(DataLoader(Numbers(), 2), 1, batch=3), "batch=3 is only for a sampler"),
        (lambda: batch_augmentation(RandomSampler(Numbers()), 1), "batch must be"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(make: Any, says: str) -> None:
    refuses(SpecError, says, make)


def norm_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def data(copies: int, b: int = 4) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(9)
    labels = torch.randint(3, (b,), generator=rng).repeat(copies)
    return torch.randn(copies * b, 5, generator=rng, dtype=torch.float64), labels


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def test_chunks_are_the_mean_over_all_inputs() -> None:
    x, y = data(3)
    chunked, whole = norm_net(), norm_net()
    told = Copies(3).backward(chunked, F.cross_entropy, x, y)
    loss = F.cross_entropy(whole(x), y)
    loss.backward()
    torch.testing.assert_close(gradients(chunked), gradients(whole))
    torch.testing.assert_close(told, loss.detach())


def test_averaged_outputs_are_averaged_before_the_loss() -> None:
    x, y = data(3)
    ours, plainly = norm_net(), norm_net()
    Copies(3, outputs="averaged").backward(ours, F.cross_entropy, x, y)
    F.cross_entropy(sum(plainly(part) for part in x.chunk(3)) / 3, y[:4]).backward()
    torch.testing.assert_close(gradients(ours), gradients(plainly))


def test_the_correction_gives_the_gradient_the_copies_own_length() -> None:
    x, y = data(4)
    lengths = []
    for rows, labels in zip(x.chunk(4), y.chunk(4), strict=True):
        model = norm_net()
        F.cross_entropy(model(rows), labels).backward()
        lengths.append(float(gradients(model).norm()))
    model, copies = norm_net(), Copies(4, correct_every=2)
    copies.backward(model, F.cross_entropy, x, y)
    assert copies.factor > 1
    assert float(gradients(model).norm()) == pytest.approx(sum(lengths) / 4, rel=1e-5)
    before = copies.factor
    model.zero_grad()
    copies.backward(model, F.cross_entropy, 3 * x, y)  # not measured: the second step
    assert copies.factor == before
    again = Copies(4, correct_every=2)
    again.load_state_dict(copies.state_dict())
    again.backward(model, F.cross_entropy, 3 * x, y)  # the third
    assert again.factor != before


def test_ghost_batch_norm_sees_one_copy_at_a_time_and_a_measurement_leaves_it_alone() -> None:
    x, y = data(2)
    model, by_hand = (nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double() for _ in range(2))
    Copies(2, correct_every=1).backward(model, F.cross_entropy, x, y)
    for rows in x.chunk(2):
        by_hand(rows)
    torch.testing.assert_close([*model.buffers()], [*by_hand.buffers()])


def test_copies_refuse_what_cannot_be() -> None:
    with pytest.raises(SpecError, match="multiple of copies=3, got 8"):
        Copies(3).backward(norm_net(), F.cross_entropy, *data(2))
    refuses(SpecError, "correct_every must be 0 with", Copies, 2, outputs="averaged", correct_every=5)
    x, y = data(2)
    with pytest.raises(SpecError, match="8 rows of inputs, 4 of labels"):
        Copies(2).backward(norm_net(), F.cross_entropy, x, y[:4])
    with pytest.raises(AttachError, match="nothing to train"):
        Copies(2, correct_every=1).backward(norm_net().requires_grad_(False), F.cross_entropy, x, y)
    for wrong in ({"lr": 1.0}, {"step": "a", "factor": None}):
        with pytest.raises(StateError, match="step and factor"):
            Copies(2).load_state_dict(wrong)


def test_a_correction_counts_sparse_gradients() -> None:
    x = torch.tensor([[0], [1], [2], [0]])
    factors = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(3, 4, sparse=sparse), nn.Flatten(), nn.Linear(4, 3))
        copies = Copies(2, correct_every=1)
        copies.backward(model, F.cross_entropy, x, torch.tensor([0, 1, 0, 1]))
        factors.append(copies.factor)
    assert factors[0] == factors[1] > 1


def test_an_example_that_is_drawn_again_is_augmented_anew() -> None:
    sampler = WeightedRandomSampler([1.0, 0.0, 0.0], 12, replacement=True)
    first, second = (
        [d for batch in CopiesSampler(sampler, 3, 2, "ranks", rank=r, size=2) for d in batch]
        for r in range(2)
    )
    assert [d.example for d in first] == [d.example for d in second] == [0] * 12
    assert len({d.key for d in first + second}) == 24


def test_copies_take_token_ids() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.randint(10, (4, 3)), torch.randint(3, (4,))
    told = Copies(2).backward(model, F.cross_entropy, x, y)
    assert torch.allclose(told, F.cross_entropy(model(x), y))
