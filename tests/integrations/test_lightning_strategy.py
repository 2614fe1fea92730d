"""Strategies of `laconic.distribute` in Lightning's Trainer, on two ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import laconic
from laconic.core.errors import AttachError
from tests.integrations.launched import launched
from tests.integrations.test_lightning import QUIET, adam, fit, flat, kept, loader, module, same_everywhere

SPECS = {
    "local_sgd(every=3)": None,
    "diloco(every=3)": adam,
    "sgp(topology=exponential())": None,
}


def fit_by(spec: str, **options: Any) -> Any:
    """The strategy after training, and the module."""
    from laconic.integrations import LightningStrategy

    strategy = LightningStrategy(spec)
    _, trained, _ = fit(None, strategy=strategy, **options)
    return strategy, trained


@launched
def as_by_hand(spec: str, build: Any) -> tuple[bool, bool]:
    """Whether the Trainer ends as a plain loop over `laconic.distribute` does."""
    _, trained = fit_by(spec, build=build)
    plain = module(build)
    configured = plain.configure_optimizers()
    schedule = configured["lr_scheduler"]["scheduler"]
    _, optimizer = laconic.distribute(plain, configured["optimizer"], spec)
    dataset = loader().dataset
    sampler = DistributedSampler(dataset)  # as the Trainer's own
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, 8, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(plain.net(x), y).backward()
            optimizer.step()
            schedule.step()
    optimizer.finish()
    return torch.equal(flat(plain), flat(trained)), same_everywhere(flat(trained))


@launched
def fit_of_a_finished_run(folder: str) -> tuple[bool, bool]:
    """Whether replicas are equal after a fit from a finished run's checkpoint, and are its model."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from laconic.integrations import LightningStrategy

    spec, saving = "local_sgd(every=3)", [ModelCheckpoint(dirpath=folder, save_last=True)]
    _, first, _ = fit(None, strategy=LightningStrategy(spec), enable_checkpointing=True, more=saving)
    _, again, _ = fit(None, strategy=LightningStrategy(spec), ckpt=f"{folder}/last.ckpt")
    return same_everywhere(flat(again)), torch.equal(flat(first), flat(again))


def test_a_fit_of_a_finished_run_leaves_equal_replicas(pool, tmp_path):
    assert pool.run(2, fit_of_a_finished_run, str(tmp_path), timeout_s=300) == [(True, True)] * 2


@pytest.mark.parametrize(("spec", "build"), SPECS.items())
def test_the_trainer_ends_as_a_plain_loop(pool, spec, build):
    assert pool.run(2, as_by_hand, spec, build, timeout_s=300) == [(True, True)] * 2


@launched
def resumed(spec: str, build: Any, folder: str) -> tuple[bool, bool]:
    """Whether a resumed run has the same bits, and the checkpoint's model is the replicas' average."""
    _, whole = fit_by(spec, build=build, **kept(folder))
    place = Path(folder) / "step=4.ckpt"
    _, rest = fit_by(spec, build=build, ckpt=place)
    saved = torch.load(place, weights_only=True)
    model = torch.cat([value.flatten() for value in saved["state_dict"].values()])
    _, half = fit_by(spec, build=build, steps=4)  # ends with the average
    return torch.equal(flat(rest), flat(whole)), torch.allclose(model, flat(half), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("spec", "build"), SPECS.items())
def test_a_resumed_run_has_the_same_bits(pool, tmp_path, spec, build):
    assert pool.run(2, resumed, spec, build, str(tmp_path), timeout_s=300) == [(True, True)] * 2


@launched
def validated(folder: str) -> tuple[bool, bool]:
    """Validation sees one model on all ranks, and training goes on from each rank's own."""
    import lightning

    seen: list[torch.Tensor] = []
    trained: list[torch.Tensor] = []

    class Look(lightning.Callback):
        def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(flat(pl_module))

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            trained.append(flat(pl_module))

    options = kept(folder)
    options["more"].append(Look())
    fit_by("local_sgd(every=100)", validate=True, **options)
    return all(map(same_everywhere, seen)) and bool(seen), same_everywhere(trained[-1])


def test_validation_is_of_the_average(pool, tmp_path):
    assert pool.run(2, validated, str(tmp_path), timeout_s=300) == [(True, False)] * 2


@launched
def trained_again(fails: bool) -> tuple[bool, bool, list[int]]:
    """Whether ranks end a first fit alike; a second Trainer trains the module as a copy; steps of both."""
    import lightning

    from laconic.integrations import LightningStrategy

    class Fails(lightning.Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            if fails and trainer.global_step:
                raise RuntimeError("of the user")

    def trainer(**options: Any) -> Any:
        strategy = LightningStrategy("local_sgd(every=3)")
        return lightning.Trainer(
            strategy=strategy, devices=2, max_epochs=1, enable_checkpointing=False, **QUIET, **options
        )

    trained, first, second = module(), trainer(callbacks=[Fails()]), trainer()
    try:
        first.fit(trained, loader(), loader())
    except RuntimeError as error:
        assert str(error) == "of the user"
    alike, copied = same_everywhere(flat(trained)), module()
    copied.load_state_dict(trained.state_dict())
    second.fit(trained, loader())
    trainer().fit(copied, loader())
    steps = [each.strategy.optimizer.stats().steps for each in (first, second)]
    return alike, torch.equal(flat(trained), flat(copied)), steps


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_trainer_takes_the_same_module(pool, fails):
    """Also after an error in validation, which leaves each rank its replica, and not the average."""
    assert pool.run(2, trained_again, fails, timeout_s=300) == [(not fails, True, [4, 4])] * 2


@launched
def with_a_slow_rank() -> float:
    """Seconds of this rank's steps, of which rank 0 sleeps through 0.1 s each."""
    import lightning

    times: list[float] = []

    class Slow(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if dist.get_rank() == 0:
                time.sleep(0.1)
            times.append(time.monotonic())

    fit_by("local_sgd(every=1000)", steps=24, more=[Slow()])
    return times[-1] - times[0]


def test_a_slow_rank_holds_up_no_other(pool):
    slow, other = pool.run(2, with_a_slow_rank, timeout_s=300)
    assert slow > 2.0 and other < slow / 2


@launched
def refused() -> list[str]:
    from laconic.integrations import LightningStrategy

    def two(parameters: Any) -> Any:
        first, *others = list(parameters)
        return torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)

    said = []
    for attempt in (
        lambda: LightningStrategy("topk(density=0.1)"),
        lambda: LightningStrategy("local_sgd()", find_unused_parameters=True),
        lambda: fit_by("sgp()", build=torch.optim.LBFGS),
    ):
        with pytest.raises(AttachError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def test_what_cannot_go_together_is_refused(pool):
    for method, option, many in pool.run(2, refused, timeout_s=300):
        assert "callbacks=[LightningCompression(...)]" in method
        assert "leave find_unused_parameters= out" in option
        assert "LBFGS" in many
