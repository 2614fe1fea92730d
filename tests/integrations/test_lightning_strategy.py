"""Strategies of `laconic.distribute` in Lightning's Trainer, on two ranks."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import laconic
from laconic.core.errors import AttachError
from tests.dist.pool import on_ranks
from tests.integrations.launched import launched
from tests.integrations.test_lightning import (
    QUIET,
    STEPS,
    adam,
    fit,
    flat,
    kept,
    loader,
    module,
    same_everywhere,
)

SPECS = [("local_sgd(every=3)", None), ("diloco(every=3)", adam), ("sgp(topology=exponential())", None)]


def fit_by(spec: str, **options: Any) -> Any:
    """The strategy after training, and the module."""
    from laconic.integrations import LightningStrategy

    strategy = LightningStrategy(spec)
    _, trained, _ = fit(None, strategy=strategy, **options)
    return strategy, trained


@on_ranks(2, SPECS)
@launched
def test_the_trainer_ends_as_a_plain_loop(spec: str, build: Any):
    """A loop over `laconic.distribute`."""
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
    assert torch.equal(flat(plain), flat(trained)) and same_everywhere(flat(trained))


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


@launched
def resumed(spec: str, build: Any, folder: str) -> tuple[bool, bool]:
    """Whether a resumed run has the same bits, and the checkpoint's model is the replicas' average."""
    _, whole = fit_by(spec, build=build, **kept(f"{folder}/{spec}"))
    place = Path(folder) / spec / "step=4.ckpt"
    _, rest = fit_by(spec, build=build, ckpt=place)
    saved = torch.load(place, weights_only=True)
    model = torch.cat([value.flatten() for value in saved["state_dict"].values()])
    _, half = fit_by(spec, build=build, steps=4)  # ends with the average
    return torch.equal(flat(rest), flat(whole)), torch.allclose(model, flat(half), rtol=1e-5, atol=1e-6)


def test_a_resumed_run_has_the_same_bits(pool, tmp_path):
    for case, found in pool.each(2, resumed, SPECS, str(tmp_path), timeout_s=300):
        assert found == [(True, True)] * 2, case


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


@on_ranks(2, [False, True])
@launched
def test_a_second_trainer_takes_the_same_module(fails: bool):
    """Also after an error in validation, which leaves each rank its replica, and not the average."""
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
    assert alike == (not fails) and torch.equal(flat(trained), flat(copied))
    assert [each.strategy.optimizer.stats().steps for each in (first, second)] == [4, 4]


@on_ranks(2)
@launched
def test_a_slow_rank_holds_up_no_other():
    """Rank 0 begins its first step when rank 1 has begun its last one."""
    import lightning

    store = dist.distributed_c10d._get_default_store()

    class Waits(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if dist.get_rank() == 0 and trainer.global_step == 0:
                store.wait(["rank 1 is ahead"], timedelta(seconds=120))
            elif dist.get_rank() == 1 and trainer.global_step == STEPS - 1:
                store.set("rank 1 is ahead", "")

    fit_by("local_sgd(every=1000)", more=[Waits()])


@on_ranks(2)
@launched
def test_what_cannot_go_together_is_refused():
    from laconic.integrations import LightningStrategy

    with pytest.raises(AttachError, match=re.escape("callbacks=[LightningCompression(...)]")):
        LightningStrategy("topk(density=0.1)")
    with pytest.raises(AttachError, match="omit find_unused_parameters="):
        LightningStrategy("local_sgd()", find_unused_parameters=True)
    with pytest.raises(AttachError, match="LBFGS"):
        fit_by("sgp()", build=torch.optim.LBFGS)
