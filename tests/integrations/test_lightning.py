"""Lightning's own Trainer with the callback, on two ranks."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import laconic
from laconic.core.errors import AttachError, StateError
from tests.dist.nets import SGD, net
from tests.dist.pool import on_ranks
from tests.integrations.launched import heard, launched

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
STEPS = 8  # two epochs
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def module(build: Any = None) -> Any:
    """A LightningModule that notes the norm of each gradient that its optimiser gets."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.norms: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = build(self.parameters()) if build else torch.optim.SGD(self.parameters(), **SGD)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_before_zero_grad(self, optimizer: Any) -> None:
            held = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.cat([grad.flatten() for grad in held]).norm()) if held else 0.0)

    return Classifier()


def loader() -> Any:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(64, 20, generator=rng)
    return DataLoader(TensorDataset(x, x[:, :5].argmax(1)), batch_size=8)


def fit(
    spec: Any,
    steps: int = STEPS,
    *,
    build: Any = None,
    ckpt: Any = None,
    validate: bool = False,
    **options: Any,
) -> Any:
    """A trainer after training, its module and the callback."""
    import lightning

    from laconic.integrations import LightningCompression

    callback = None if spec is None else LightningCompression(spec)
    callbacks = [callback] if callback else []
    options = (
        QUIET | {"strategy": "ddp", "devices": dist.get_world_size(), "max_epochs": steps // 4} | options
    )
    options.setdefault("enable_checkpointing", False)
    trainer = lightning.Trainer(callbacks=[*callbacks, *options.pop("more", [])], **options)
    trained = module(build)
    trainer.fit(trained, loader(), loader() if validate else None, ckpt_path=ckpt)
    return trainer, trained, callback


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def same_everywhere(end: torch.Tensor) -> bool:
    ends = [torch.empty_like(end) for _ in range(dist.get_world_size())]
    dist.all_gather(ends, end)
    return all(torch.equal(each, end) for each in ends)


@on_ranks(2)
@launched
def test_dense_trains_as_lightning_does_alone():
    """Within what float32 sums in another order differ by."""
    (_, plain, _), (_, ours, callback) = fit(None), fit("dense()")
    assert torch.allclose(flat(plain), flat(ours), rtol=1e-5, atol=1e-7)
    assert same_everywhere(flat(ours)) and callback.handle.stats().steps == STEPS


OPTIONS = [
    {"accumulate_grad_batches": 2, "max_epochs": 4},
    {"precision": "bf16-mixed"},
    {"strategy": "ddp_find_unused_parameters_true"},
]


@on_ranks(2, OPTIONS)
@launched
def test_options_of_the_trainer_go_on_as_they_are(options: dict[str, Any]):
    """An optimiser's step is an exchange, however many batches or bits it is of."""
    _, trained, callback = fit("topk(density=0.01)", **options)
    stats = callback.handle.stats()
    assert same_everywhere(flat(trained)) and stats.steps == STEPS and stats.ratio > 5


@on_ranks(2)
@launched
def test_clipping_is_after_the_exchange():
    """What the optimiser gets is the mean, no longer than the limit: 1e-4 for the norm's rounding."""
    _, trained, _ = fit("topk(density=0.1)", gradient_clip_val=0.05)
    assert 0.0499 < max(trained.norms) <= 0.05 * (1 + 1e-4)


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def kept(folder: str, **options: Any) -> dict[str, Any]:
    """Options of a trainer that saves after each epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_epochs=1)
    return {"enable_checkpointing": True, "more": [saves], **options}


@on_ranks(2)
@launched
def test_the_scaler_of_the_precision_plugin_is_found():
    """Clipped after it is unscaled, so no gradient is longer than the limit: 1e-3 for float16.

    A GradScaler needs no GPU if it is given by hand.
    """
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    _, trained, callback = fit("topk(density=0.05)", plugins=plugins, gradient_clip_val=0.05)
    assert same_everywhere(flat(trained)) and callback.handle.fingerprint["the scaler"] == "given"
    assert 0.04 < max(trained.norms) <= 0.05 * (1 + 1e-3)


@launched
def resumed(spec: str, build: Any, folder: str) -> tuple[bool, bool, int, list[int]]:
    """Whether a resumed run ends as one that never stopped, and another without the memory does not."""
    _, whole, callback = fit(spec, build=build, **kept(f"{folder}/{spec}"))
    place = Path(folder) / spec / "step=4.ckpt"
    _, rest, again = fit(spec, build=build, ckpt=place)
    saved = torch.load(place, weights_only=True)
    states = saved["callbacks"]["LightningCompression"]["ranks"]
    for state in states:
        state["tensors"] = {key: torch.zeros_like(value) for key, value in state["tensors"].items()}
    empty = Path(folder) / f"empty{dist.get_rank()}.ckpt"
    torch.save(saved, empty)
    _, forgetful, _ = fit(spec, build=build, ckpt=empty)
    steps = again.handle.stats().steps
    assert steps == callback.handle.stats().steps
    return (
        torch.equal(flat(rest), flat(whole)),
        torch.equal(flat(forgetful), flat(whole)),
        steps,
        [len(state["tensors"]) for state in states],
    )


def test_a_resumed_run_has_the_same_bits(pool, tmp_path):
    cases = [("topk(density=0.02)", None), ("dgc(density=0.02)", None), ("onebit_adam(warmup_steps=2)", adam)]
    for case, found in pool.each(2, resumed, cases, str(tmp_path), timeout_s=300):
        for same, without_memory, steps, held in found:
            assert same and not without_memory, case
            assert steps == STEPS and len(held) == 2 and min(held) > 0, case


@launched
def saved_after_fit(folder: str) -> tuple[bool, bool]:
    """Whether a run goes on with the same bits from a file that is saved when `fit` has ended."""
    _, whole, _ = fit("topk(density=0.02)")
    trainer, _, _ = fit("topk(density=0.02)", 4)
    place = Path(folder) / "after.ckpt"
    trainer.save_checkpoint(place)
    _, rest, again = fit("topk(density=0.02)", ckpt=place)
    return torch.equal(flat(rest), flat(whole)), again.handle.stats().steps == STEPS


def test_what_is_saved_after_fit_holds_the_memory_too(pool, tmp_path):
    assert pool.run(2, saved_after_fit, str(tmp_path), timeout_s=300) == [(True, True)] * 2


@launched
def validated_then_trained(folder: str) -> tuple[bool, int]:
    """A checkpoint is tested, and then a new model trained with the same callback: as if it had not been."""
    import lightning

    from laconic.integrations import LightningCompression

    _, plain, _ = fit("topk(density=0.02)", 4)
    fit("topk(density=0.02)", **kept(folder))
    callback = LightningCompression("topk(density=0.02)")
    options = QUIET | {"strategy": "ddp", "devices": 2, "max_epochs": 1, "enable_checkpointing": False}
    lightning.Trainer(callbacks=[callback], **options).validate(
        module(), loader(), ckpt_path=Path(folder) / "step=4.ckpt", verbose=False
    )
    trained = module()
    lightning.Trainer(callbacks=[callback], **options).fit(trained, loader())
    return torch.equal(flat(trained), flat(plain)), callback.handle.stats().steps


def test_a_checkpoint_that_was_only_tested_leaves_no_memory(pool, tmp_path):
    assert pool.run(2, validated_then_trained, str(tmp_path), timeout_s=300) == [(True, 4)] * 2


@launched
def resumed_elsewhere(folder: str) -> str:
    fit(None, 4, **kept(folder))
    plain = Path(folder) / "step=4.ckpt"
    with heard("which starts with an empty"):
        fit("topk(density=0.1)", ckpt=plain)
    saved = torch.load(plain, weights_only=True)
    saved["callbacks"]["LightningCompression"] = {"format": 2, "ranks": [{}]}
    other = Path(folder) / f"other{dist.get_rank()}.ckpt"
    torch.save(saved, other)
    with pytest.raises(StateError) as caught:
        fit("topk(density=0.1)", ckpt=other)
    return str(caught.value)


def test_a_checkpoint_of_another_run_is_told(pool, tmp_path):
    for said in pool.run(2, resumed_elsewhere, str(tmp_path), timeout_s=300):
        assert "of 1 ranks, this group has 2" in said and "laconic.resize" in said


@on_ranks(2)
@launched
def test_manual_optimisation_with_two_optimisers():
    """Each optimiser has its own half of the parameters."""
    import lightning

    from laconic.integrations import LightningCompression

    class Manual(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))
            first.step()
            second.step()

        def configure_optimizers(self) -> Any:
            held = list(self.parameters())
            return [torch.optim.SGD(held[::2], **SGD), torch.optim.SGD(held[1::2], **SGD)]

    callback = LightningCompression("topk(density=0.05)")
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 2, "enable_checkpointing": False}
    trained = Manual()
    lightning.Trainer(callbacks=[callback], **QUIET, **options).fit(trained, loader())
    assert same_everywhere(flat(trained)) and callback.handle.stats().steps == STEPS


@on_ranks(2)
@launched
def test_what_cannot_go_together_is_refused_with_the_way_out():
    from lightning.pytorch.strategies import DDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    with pytest.raises(AttachError, match="omit ddp_comm_hook="):
        fit("topk(density=0.1)", strategy=DDPStrategy(ddp_comm_hook=allreduce_hook))
    with pytest.raises(AttachError, match=r"LBFGS(.|\n)*use SGD, Adam"):
        fit("topk(density=0.1)", build=torch.optim.LBFGS)


@on_ranks(1, ["ddp_spawn", "ddp_fork", "ddp_notebook"])
@launched
def test_ranks_that_are_no_scripts_are_refused(variant: str):
    """The handle and the memory would stay in processes that end with `fit`. The callback alone is asked."""
    import lightning

    from laconic.integrations import LightningCompression, LightningStrategy

    trainer = lightning.Trainer(strategy=variant, devices=2, enable_checkpointing=False, **QUIET)
    callback = LightningCompression("auto()")
    callback.setup(trainer, None, "validate")
    with pytest.raises(AttachError, match=r"starts ranks that end with fit.*strategy='ddp'"):
        callback.setup(trainer, None, "fit")
    with pytest.raises(AttachError, match=r"start ranks that end with fit.*omit start_method="):
        LightningStrategy("local_sgd()", start_method=trainer.strategy._start_method)


@on_ranks(1)
@launched
def test_fsdp1_is_refused():
    """A trainer of its own needs a GPU, so the callback alone is asked."""
    from lightning.pytorch.strategies import FSDPStrategy

    from laconic.integrations import LightningCompression

    with pytest.raises(
        AttachError, match=r"FSDPStrategy supports no method: .*fully_shard.*ModelParallelStrategy"
    ):
        LightningCompression("auto()").setup(SimpleNamespace(strategy=FSDPStrategy()), None, "fit")


MEMORYLESS, WITH_MEMORY = "cgx(bits=4)", "error_fed(scatter_reduce(minmax(bits=2, block=16)))"


@on_ranks(2, [(MEMORYLESS, True), (MEMORYLESS, False), (WITH_MEMORY, True), (WITH_MEMORY, False)])
@launched
def test_a_memory_beside_shards_is_refused_where_checkpoints_are_made(spec: str, makes: bool):
    """A trainer of its own needs a GPU, so the callback alone is asked."""
    from torch.distributed.fsdp import fully_shard

    from laconic.integrations import LightningCompression

    model = net()
    fully_shard(model)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(model=model),
        world_size=2,
        precision_plugin=None,
        optimizers=[torch.optim.SGD(model.parameters(), **SGD)],
        ckpt_path=None,
        checkpoint_callbacks=[object()] if makes else [],
    )
    callback = LightningCompression(spec)
    if spec == MEMORYLESS or not makes:
        callback.on_train_start(trainer, None)
        assert callback.handle is not None
        return
    with pytest.raises(AttachError, match=r"enable_checkpointing=False") as caught:
        callback.on_train_start(trainer, None)
    assert callback.handle is None and MEMORYLESS in str(caught.value)
    laconic.compress(model, trainer.optimizers, MEMORYLESS).remove()  # none is left


@on_ranks(2)
@launched
def test_wrapped_optimisers_are_taken():
    """`compress` called by hand with what a LightningModule has: optimisers that Lightning has wrapped."""
    import lightning

    class ByHand(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.handle = laconic.compress(trainer.model, pl_module.optimizers(), "topk(density=0.05)")

    compressed = ByHand()
    _, trained, _ = fit(None, more=[compressed])
    assert same_everywhere(flat(trained)) and compressed.handle.stats().steps == STEPS


@on_ranks(2)
@launched
def test_optimisers_of_fabric_are_taken():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    plain = net()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), **SGD))
    handle = laconic.compress(model, optimizer, "topk(density=0.05)")
    for x, y in fabric.setup_dataloaders(loader()):
        optimizer.zero_grad()
        fabric.backward(cross_entropy(model(x), y))
        optimizer.step()
    handle.remove()
    assert same_everywhere(flat(plain)) and handle.stats().steps == STEPS // 2


@on_ranks(2)
@launched
def test_the_quick_start():
    example = runpy.run_path(str(EXAMPLES / "lightning_autoencoder.py"))
    trained, compression = example["main"](epochs=3)
    assert trained.losses[-1] < 0.5 * trained.losses[0]
    assert compression.handle.stats().ratio > 40


@on_ranks(1)
@launched
def test_one_process_is_told_that_nothing_is_compressed():
    with heard("nothing is exchanged or compressed: Trainer(devices=2"):
        _, _, callback = fit("topk(density=0.1)", 4, strategy="auto", devices=1)
    assert callback.handle is None
