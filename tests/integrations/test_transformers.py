"""The Trainer of transformers with the callback, on two ranks."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.core.errors import AttachError, StateError
from tests.dist.pool import on_ranks
from tests.integrations.launched import heard, launched

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
SPEC = "topk(density=0.05)"
STEPS = 6


def trainer_of(folder: str, spec: Any = SPEC, **options: Any) -> Any:
    """A Trainer of a tiny model with the callback, and the callback."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from laconic.integrations import TrainerCompression

    counting = runpy.run_path(str(EXAMPLES / "transformers_trainer.py"))["Counting"]
    set_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    defaults = {
        "output_dir": folder,
        "use_cpu": True,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,  # and the last one
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=TrainingArguments(**defaults | options), train_dataset=counting()
    )
    callback = None if spec is None else TrainerCompression(trainer, spec)
    if callback is not None:
        trainer.add_callback(callback)
    return trainer, callback


def flat(trainer: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


def same_everywhere(end: torch.Tensor) -> bool:
    ends = [torch.empty_like(end) for _ in range(dist.get_world_size())]
    dist.all_gather(ends, end)
    return all(torch.equal(each, end) for each in ends)


@launched
def resumed(spec: str, options: dict[str, Any], folder: str) -> tuple[bool, bool, bool]:
    folder = f"{folder}/{spec}, {len(options)}"
    whole, callback = trainer_of(folder, spec, **options)
    whole.train()
    place = Path(folder) / f"checkpoint-{STEPS // 2}"
    rest, again = trainer_of(folder, spec, **options)
    rest.train(str(place))
    assert callback.handle.stats().steps == again.handle.stats().steps == STEPS
    dist.barrier()
    (place / "laconic.pt").unlink(missing_ok=True)
    dist.barrier()
    forgetful, _ = trainer_of(folder, spec, **options)
    with heard("starts with an empty memory"):
        forgetful.train(resume_from_checkpoint=place)
    end = flat(whole)
    return torch.equal(flat(rest), end), same_everywhere(flat(rest)), torch.equal(flat(forgetful), end)


def test_a_resumed_run_has_the_same_bits(pool, tmp_path):
    cases = [
        (SPEC, {}),
        (SPEC, {"gradient_accumulation_steps": 2, "bf16": True}),
        ("dgc(density=0.05)", {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.0}),
        ("onebit_adam(warmup_steps=2)", {"optim": "adamw_torch"}),
    ]
    for case, found in pool.each(2, resumed, cases, str(tmp_path), timeout_s=300):
        assert found == [(True, True, False)] * 2, case


@launched
def accumulated(folder: str, options: dict[str, Any]) -> tuple[int, bool, list[float]]:
    trainer, callback = trainer_of(folder, **options)
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return callback.handle.stats().steps, same_everywhere(flat(trainer)), norms


def test_accumulation_and_clipping_go_on_as_they_are(pool, tmp_path):
    """An exchange a step of four batches; the clipped norm is that of the mean, equal on both ranks."""
    options = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.1, "save_strategy": "no"}
    (steps, same, norms), (_, _, others) = pool.run(2, accumulated, str(tmp_path), options, timeout_s=300)
    assert steps == STEPS and same
    assert norms == others and len(norms) == STEPS and min(norms) > 0


@launched
def evaluated_first(folder: str) -> str:
    """The error of train() after evaluate(), which keeps the Trainer from wrapping the model."""
    trainer, _ = trainer_of(folder, save_strategy="no")
    trainer.evaluate(trainer.train_dataset)
    with pytest.raises(AttachError) as caught:
        trainer.train()
    return str(caught.value)


def test_training_after_an_evaluation_explains_why_ranks_would_differ(pool, tmp_path):
    for text in pool.run(2, evaluated_first, str(tmp_path), timeout_s=300):
        assert "GPT2LMHeadModel on 2 ranks without DistributedDataParallel" in text
        assert "evaluate() or predict() ran before train()" in text and "create a new Trainer" in text


@launched
def dense_and_plain(folder: str) -> tuple[bool, bool]:
    plain, _ = trainer_of(folder, None, save_strategy="no", optim="sgd")
    plain.train()
    ours, callback = trainer_of(folder, "dense()", save_only_model=True, optim="sgd")  # which seeds anew
    ours.train()
    left = not list(Path(folder).rglob("laconic.pt"))
    assert callback.handle.stats().steps == STEPS
    return torch.allclose(flat(plain), flat(ours), rtol=1e-5, atol=1e-6), left


def test_dense_trains_as_the_trainer_does_alone(pool, tmp_path):
    """Within what sums in another order differ by. A checkpoint of the model alone stays one."""
    assert pool.run(2, dense_and_plain, str(tmp_path), timeout_s=300) == [(True, True)] * 2


@launched
def of_fewer_ranks(folder: str) -> str:
    trainer, _ = trainer_of(folder)
    trainer.train()
    dist.barrier()
    path = Path(folder) / f"checkpoint-{STEPS // 2}" / "laconic.pt"
    if dist.get_rank() == 0:
        whole = torch.load(path, weights_only=True)
        torch.save({**whole, "ranks": whole["ranks"][:1]}, path)
    again, _ = trainer_of(folder)
    with pytest.raises(StateError) as caught:
        again.train(resume_from_checkpoint=str(path.parent))
    dist.barrier()
    return str(caught.value)


def test_a_checkpoint_of_another_number_of_ranks_is_told(pool, tmp_path):
    for rank, said in enumerate(pool.run(2, of_fewer_ranks, str(tmp_path), timeout_s=300)):
        assert said.startswith(f"rank {rank}: ")
        assert "of 1 ranks, this group has 2: convert them by laconic.resize" in said


@launched
def quick_start(folder: str) -> tuple[float, float, float]:
    trainer, compression = runpy.run_path(str(EXAMPLES / "transformers_trainer.py"))["main"](
        Path(folder), cpu=True
    )
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert Path(folder, "checkpoint-20", "laconic.pt").exists()
    return losses[0], losses[-1], compression.handle.stats().ratio


def test_the_quick_start(pool, tmp_path):
    for first, last, ratio in pool.run(2, quick_start, str(tmp_path), timeout_s=300):
        assert last < 0.7 * first and ratio > 12


@on_ranks(1)
@launched
def test_one_process_is_told_that_nothing_is_compressed():
    """As without torchrun: nothing wraps the model."""
    from laconic.integrations import TrainerCompression

    trainer = SimpleNamespace(train=None, model_wrapped=torch.nn.Linear(2, 2))
    callback = TrainerCompression(trainer, SPEC)
    with heard("torchrun --nproc-per-node 2 starts two"):
        callback.on_train_begin(SimpleNamespace(world_size=1), None, None)
    assert callback.handle is None
