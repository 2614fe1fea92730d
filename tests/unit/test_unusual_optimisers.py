"""Sparse and few-bit training with unusual optimisers: new weights start as new, and no feature is idle."""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any

import pytest
import torch
from tests.unit.wrappers import SAM, Elsewhere, Lookahead, net, passed, sgd, train
from torch import nn
from torch.optim import Optimizer

import laconic
from laconic.core.errors import AttachError, StateError
from laconic.optim import LAMB, LARS
from laconic.optim.step_watch import PASSES
from laconic.sparsity import MaskedAverage, rigl
from laconic.sparsity.slots import clear_, slots


def test_new_weights_start_as_an_optimisers_own_new_ones() -> None:
    """Each slot of a new entry is as at the first step: Rprop's size is the rate, not 0."""
    kinds: list[tuple[type[Optimizer], dict[str, Any], dict[str, float]]] = [
        (torch.optim.Rprop, {"lr": 0.03}, {"step_size": 0.03, "prev": 0.0}),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.7}, {"sum": 0.7}),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "capturable": False}, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, {}),
        (torch.optim.NAdam, {"lr": 0.1}, {}),
        (LARS, {"lr": 0.1}, {}),
    ]
    for kind, options, first in kinds:
        for group_rate in (None, 0.005):
            model = net()
            groups = [
                {"params": [p], **({} if group_rate is None else {"lr": group_rate})}
                for p in model.parameters()
            ]
            optimizer: Any = kind(groups, **options)
            train(model, optimizer, range(3))
            weight = model[0].weight
            entries = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
            before = [slot.clone() for slot in slots(optimizer, weight)]
            assert before, kind
            clear_(optimizer, weight, entries)
            named = {
                name: slot for name, slot in optimizer.state[weight].items() if slot.shape == weight.shape
            }
            assert not weight[entries].any(), kind
            for (name, slot), old in zip(named.items(), before, strict=True):
                value = first.get(name, 0.0)
                value = group_rate if group_rate is not None and name == "step_size" else value
                expected = torch.full_like(slot[entries], value)
                assert torch.equal(slot[entries], expected), (kind, name, group_rate)
                assert torch.equal(slot[~entries], old[~entries]), (kind, name)


def test_rprop_moves_new_weights_at_once() -> None:
    model = net()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.02)
    sparse = rigl(model, optimizer, density=0.3, steps=100, every=4)
    train(model, optimizer, range(4))
    before = {name: mask.clone() for name, mask in sparse.masks.items()}
    train(model, optimizer, range(4, 5))  # the update
    new = {name: mask & ~before[name] for name, mask in sparse.masks.items()}
    train(model, optimizer, range(5, 6))
    for name, weight in sparse.weights.items():
        moved = weight.detach()[new[name]].abs()
        assert new[name].any() and moved[moved > 0].min() > 0.009, name  # half of the rate or more, not 1e-6


def test_nested_slots_are_cleared_and_quantised_ones_refused() -> None:
    model = net()
    optimizer = sgd(model)
    train(model, optimizer, range(2))
    weight = model[0].weight
    optimizer.state[weight]["history"] = [torch.ones_like(weight), {"deep": torch.ones_like(weight)}]
    clear_(optimizer, weight, torch.ones_like(weight, dtype=torch.bool))
    optimizer.state[weight]["own"] = types.SimpleNamespace(m=torch.ones_like(weight))
    clear_(optimizer, weight, torch.ones_like(weight, dtype=torch.bool))
    assert len(slots(optimizer, weight)) == 4 and not any(slot.any() for slot in slots(optimizer, weight))
    optimizer.state[weight]["exp_avg"] = torch.ones_like(weight, dtype=torch.uint8)
    weight.data.fill_(1.0)
    with pytest.raises(AttachError, match=r"exp_avg of a weight as torch\.uint8"):
        clear_(optimizer, weight, torch.ones_like(weight, dtype=torch.bool))
    assert weight.all()


def test_state_that_is_made_elsewhere_at_the_first_step_is_noticed() -> None:
    model = net()
    optimizer = Elsewhere(model.parameters(), early=False, lr=0.1)
    sparse = rigl(model, optimizer, density=0.3, steps=100, every=5)
    with pytest.raises(AttachError, match=r"keeps what belongs to single weights in Elsewhere\.kept"):
        train(model, optimizer, range(5))
    assert sparse.turn == 1


def test_a_state_of_any_moment_loads() -> None:
    """After the first step, at rate 0, and while a scaler skips, new entries are zero, as they were saved."""
    for steps, warm, every in ((0, 0, 100), (1, 0, 100), (2, 0, 100), (50, 60, 10), (50, 5, 10), (3, 9, 1)):
        for skips in (False, True):
            model, optimizer, sparse = built(0, every)
            run(model, optimizer, steps, warm, skips)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparse.state_dict()))
            other, second, again = built(0, every)
            for part, state in zip((other, second, again), saved, strict=True):
                part.load_state_dict(state)
            case = f"{steps} steps, rate 0 for {warm}, every={every}, skips={skips}"
            assert again.turn == sparse.turn, case
            assert all(torch.equal(mask, sparse.masks[name]) for name, mask in again.masks.items()), case
            assert all(map(torch.equal, model.parameters(), other.parameters())), case


def test_a_model_that_was_loaded_too_early_is_refused_still() -> None:
    model, optimizer, sparse = built(0, every=3)
    run(model, optimizer, 10, 0, False)
    state = sparse.state_dict()
    other = net(7)
    other.load_state_dict(model.state_dict())
    again = rigl(other, sgd(other), density=0.2, steps=1000, every=3)
    with pytest.raises(StateError, match="load the states of model"):
        again.load_state_dict(state)
    damaged: list[dict[str, Any]] = [{"nonzero": {}}, {"nonzero": dict.fromkeys(sparse.masks, "1")}]
    for damage in damaged:
        with pytest.raises(StateError, match=r"nonzero (has|must have)"):
            again.load_state_dict(state | damage)
    other.load_state_dict(model.state_dict())
    earlier = {key: value for key, value in state.items() if key != "nonzero"} | {"format": 1}
    again.load_state_dict(earlier)
    assert again.turn == sparse.turn


def built(seed: int, every: int) -> tuple[nn.Module, Optimizer, laconic.sparsity.SparseTraining]:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, rigl(model, optimizer, density=0.2, steps=1000, every=every)


def run(model: nn.Module, optimizer: Optimizer, steps: int, warm: int, skips: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=skips)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, max(0, step - warm) / 10) if warm else 1e-2
        optimizer.zero_grad()
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        factor = float("inf") if skips and step % 3 == 1 else 1.0
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def test_an_average_is_as_sparse_as_the_model() -> None:
    for decay in (0.9, None):
        model = net()
        optimizer = sgd(model)
        sparse = rigl(model, optimizer, density=0.1, steps=200, every=5)
        average = MaskedAverage(model, sparse, decay=decay)
        plain = torch.optim.swa_utils.AveragedModel(model)
        for step in range(60):
            train(model, optimizer, range(step, step + 1))
            average.update_parameters(model)
            plain.update_parameters(model)
        ones = torch.ones(3, 12)
        assert not torch.equal(average(ones), model(ones))
        for name, mask in sparse.masks.items():
            of_average = dict(average.module.named_parameters())[name]
            assert not of_average[~mask].any() and of_average[mask].count_nonzero() > 0.9 * mask.sum(), name
        leaks = dict(plain.module.named_parameters())["0.weight"]
        assert leaks.count_nonzero() > sparse.masks["0.weight"].sum()
        other = MaskedAverage(model, sparse, decay=decay)
        other.load_state_dict(average.state_dict())
        assert torch.equal(other(ones), average(ones))
        with pytest.raises(AttachError, match="of another model"):
            MaskedAverage(net(), sparse)


def test_a_feature_that_sees_no_step_warns_once_with_the_reason() -> None:
    features = {
        "rigl": lambda m, o: rigl(m, o, density=0.3, steps=100),
        "static_masks": lambda m, o: laconic.sparsity.sparsify(m, o, "static_masks(density=0.3)", steps=100),
        "towards few bits": lambda m, o: laconic.lowbit.admm(m, o),
        "few bits": lambda m, o: laconic.lowbit.straight_through(m, o),
    }
    for name, attach in features.items():
        for case, reason in (
            ("other", "something else steps"),
            ("none", "has not called"),
            ("inf", "skipped all"),
        ):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=case == "inf")
            handle = attach(model, optimizer)
            stepped: Any = {"other": sgd(model, lr=0.01), "none": None, "inf": optimizer}[case]
            scaler = torch.amp.GradScaler("cpu", enabled=case == "inf")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(2 * PASSES + 10):
                    model.zero_grad()
                    loss = model(torch.full((2, 12), float(step % 5))).square().mean()
                    scaler.scale(loss * (float("inf") if case == "inf" else 1.0)).backward()
                    if stepped is not None:
                        scaler.step(stepped)
                        scaler.update()
            warned = [str(each.message) for each in caught if "backward passes" in str(each.message)]
            assert len(warned) == 1 and name in warned[0] and reason in warned[0], (name, case, warned)
            handle.remove()


def test_binarised_weights_that_no_optimiser_of_torch_steps_are_warned_of() -> None:
    for by_hand in (True, False):
        model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        laconic.lowbit.binarise(model)
        optimizer = sgd(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(PASSES + 5):
                optimizer.zero_grad()
                model(torch.full((2, 12), float(step % 5))).square().mean().backward()
                with torch.no_grad():
                    if by_hand:
                        for each in model.parameters():
                            each.sub_(each.grad if each.grad is not None else 0.0, alpha=1e-3)
                    else:
                        optimizer.step()
        warned = [str(each.message) for each in caught if "backward passes" in str(each.message)]
        assert len(warned) == by_hand, warned
        assert not by_hand or "something else steps them" in warned[0]


def test_a_feature_that_sees_a_step_does_not_warn() -> None:
    for attach in (lambda m, o: rigl(m, o, density=0.3, steps=100), lambda m, o: laconic.lowbit.admm(m, o)):
        model = net()
        optimizer = sgd(model)
        attach(model, optimizer)
        train(model, optimizer, range(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(PASSES + 10):
                passed(model, step)
        assert not any(each._post_accumulate_grad_hooks and len(each._post_accumulate_grad_hooks) > 1
                       for each in model.parameters())  # fmt: skip


def test_an_update_without_dense_gradients_warns_once() -> None:
    model = net()
    optimizer = sgd(model)
    sparse = rigl(model, optimizer, density=0.3, steps=100, every=2)
    before = {name: mask.clone() for name, mask in sparse.masks.items()}
    with pytest.warns(UserWarning, match="are zero or were not seen") as caught:
        for _ in range(5):
            for each in model.parameters():
                each.grad = torch.ones_like(each)
            optimizer.step()
    assert len([each for each in caught if "were not seen" in str(each.message)]) == 1
    assert all(torch.equal(mask, before[name]) for name, mask in sparse.masks.items())


def test_a_due_update_whose_hook_is_gone_warns_once() -> None:
    model = net()
    optimizer = sgd(model)
    sparse = rigl(model, optimizer, density=0.3, steps=100, every=2)
    train(model, optimizer, range(1))
    optimizer._optimizer_step_pre_hooks.clear()
    with pytest.warns(UserWarning, match="the hook before the step is gone") as caught:
        train(model, optimizer, range(1, 8))
    assert len(caught) == 1 and sparse.updates == 1


def test_sam_through_the_optimiser_inside_counts_its_steps() -> None:
    """The error for the wrapper names it: masks hold, and dropped weights have no momentum."""
    model = net()
    sam = SAM(sgd(model))
    sparse = rigl(model, sam.base_optimizer, density=0.3, steps=100, every=4)
    for step in range(12):
        passed(model, step)
        sam.first_step()
        passed(model, step)
        sam.second_step()
    assert sparse.turn == 12 and sparse.updates == 3
    for name, weight in sparse.weights.items():
        assert not weight[~sparse.masks[name]].any(), name
        assert not sam.state[weight]["momentum_buffer"][~sparse.masks[name]].any(), name


def test_weights_that_a_wrapper_brings_back_are_warned_of_once() -> None:
    model = net()
    wrapper = Lookahead(sgd(model))
    sparse = rigl(model, wrapper.optimizer, density=0.3, steps=100, every=4)
    with pytest.warns(UserWarning, match="are nonzero between two steps") as caught:
        train(model, wrapper, range(20))
    assert len(caught) == 1 and sparse.turn == 20
    model = net()
    optimizer = sgd(model)
    rigl(model, optimizer, density=0.3, steps=100, every=4)
    model.load_state_dict(net(3).state_dict())  # dense weights, which the first step masks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(20))


def test_layerwise_norms_of_16_bits_do_not_overflow() -> None:
    for kind in (LARS, LAMB):
        for dtype in (torch.float16, torch.bfloat16):
            for size, value in ((512, 200.0), (512, 1e-4), (4, 3e4)):
                start = torch.full((size, size), value).to(dtype)
                half = nn.Parameter(start.clone())
                single = nn.Parameter(start.float())
                for weight in (half, single):
                    weight.grad = torch.full_like(weight, value if kind is LARS else 1e-2)
                    kind([weight], lr=0.5, weight_decay=1e-3).step()
                case = (kind.__name__, dtype, size, value)
                assert bool(half.isfinite().all()), case
                torch.testing.assert_close(half.float(), single.detach(), rtol=2e-2, atol=1e-5, msg=str(case))
