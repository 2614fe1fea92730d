"""What Accelerate's `prepare` returned, compressed, on two ranks."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import laconic
from laconic.core.errors import AttachError, PeerError, SpecError, StateError
from tests.dist.nets import SGD, agree, flat, net
from tests.dist.pool import on_ranks
from tests.integrations.launched import heard, launched

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
SPEC = "topk(density=0.05)"
STEPS = 8


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


class Run:
    """A training under an Accelerator."""

    def __init__(self, spec: Any = SPEC, build: Any = None, scaler: Any = None, **options: Any) -> None:
        from accelerate import Accelerator

        from laconic.integrations import keep_with

        self.accelerator = Accelerator(cpu=True, **options)
        self.accelerator.scaler = scaler
        plain = net()
        optimizer = build(plain.parameters()) if build else torch.optim.SGD(plain.parameters(), **SGD)
        self.model, self.optimizer = self.accelerator.prepare(plain, optimizer)
        self.handle = laconic.compress(self.model, self.optimizer, spec)
        keep_with(self.accelerator, self.handle)

    def go(self, first: int, last: int) -> torch.Tensor:
        """The parameters after these steps."""
        for step in range(first, last):
            rng = torch.Generator().manual_seed(1000 * step + self.accelerator.process_index)
            x = torch.randn(8, 20, generator=rng)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(cross_entropy(self.model(x), x[:, :5].argmax(1)))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return flat(self.model)


@launched
def resumed(spec: str, build: Any, folder: str) -> tuple[bool, bool, bool]:
    whole, folder = Run(spec, build), f"{folder}/{spec}"
    whole.go(0, STEPS // 2)
    whole.accelerator.save_state(folder)
    end = whole.go(STEPS // 2, STEPS)
    rest = Run(spec, build)
    rest.accelerator.load_state(folder)
    same = torch.equal(rest.go(STEPS // 2, STEPS), end)
    forgetful = Run(spec, build)
    Path(folder, "laconic.pt").unlink(missing_ok=True)
    torch.distributed.barrier()
    with heard("starts with an empty memory"):
        forgetful.accelerator.load_state(folder)
    return same, agree(rest.model), torch.equal(forgetful.go(STEPS // 2, STEPS), end)


def test_save_state_and_load_state_carry_the_memory(pool, tmp_path):
    cases = [(SPEC, None), ("dgc(density=0.02)", None), ("onebit_adam(warmup_steps=2)", adam)]
    for case, found in pool.each(2, resumed, cases, str(tmp_path), timeout_s=300):
        assert found == [(True, True, False)] * 2, case


@launched
def prepared_copies() -> tuple[str, list[int]]:
    """The refusal of `prepare`, and the examples of this rank's first batch without it."""
    from accelerate import Accelerator

    loader = laconic.data.batch_augmentation(DataLoader(torch.arange(32.0), batch_size=4, shuffle=True), 2)
    with pytest.raises(SpecError) as caught:
        Accelerator(cpu=True).prepare(loader)
    return str(caught.value), next(iter(loader)).int().tolist()


def test_prepare_refuses_a_loader_whose_ranks_share_examples(pool):
    (text, first), (_, second) = pool.run(2, prepared_copies, timeout_s=300)
    assert "omit it from accelerator.prepare(...)" in text
    assert first == second


@launched
def registered(folder: str) -> list[int]:
    """Tensors in the states of all ranks, which Accelerate writes for a handle that it was given."""
    run = Run()
    run.accelerator.register_for_checkpointing(run.handle)
    run.go(0, 2)
    run.accelerator.save_state(folder)
    torch.distributed.barrier()
    run.accelerator.load_state(folder)
    saved = torch.load(Path(folder) / "custom_checkpoint_0.pkl", weights_only=True)
    return [len(state["tensors"]) for state in saved["ranks"]]


def test_a_registered_handle_is_saved_with_the_memory_of_all_ranks(pool, tmp_path):
    for counts in pool.run(2, registered, str(tmp_path / "state"), timeout_s=300):
        assert len(counts) == 2 and min(counts) > 0


@launched
def saved_by_the_main_process(folder: str) -> str:
    run = Run()
    run.go(0, 2)
    try:
        if run.accelerator.is_main_process:
            run.accelerator.save_state(folder)
        run.go(2, 4)
    except PeerError as error:
        return str(error)
    return ""


def test_save_state_on_the_main_process_alone_ends_every_rank_with_a_clear_error(pool, tmp_path):
    for text in pool.run(2, saved_by_the_main_process, str(tmp_path / "state"), timeout_s=300):
        assert "every rank has to make this call" in text and "state_dict(gather=True)" in text


@on_ranks(2)
@launched
def test_an_exchange_is_a_step_of_several_batches():
    run = Run(gradient_accumulation_steps=2)
    run.go(0, STEPS)
    assert run.handle.stats().steps == STEPS // 2
    assert agree(run.model) and run.handle.stats().ratio > 5


@on_ranks(2)
@launched
def test_the_scaler_of_the_optimiser_is_found():
    """A GradScaler of 2**16: its memory is that of a run without one, up to the rounding of float32."""
    plain, under = Run(), Run(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**16))
    ends = [run.go(0, 4) for run in (plain, under)]
    residuals = [
        torch.cat([value.flatten() for value in run.handle.state_dict()["tensors"].values()])
        for run in (plain, under)
    ]
    with pytest.raises(AttachError, match="leave it out"):
        laconic.compress(under.model, under.optimizer, SPEC, scaler=torch.amp.GradScaler("cpu"))
    assert torch.allclose(*ends, rtol=1e-5, atol=1e-7)
    assert torch.allclose(*residuals, rtol=1e-4, atol=1e-6)


@on_ranks(2)
@launched
def test_every_feature_takes_the_optimiser_that_prepare_returned():
    """Features other than `compress` end as with the plain optimiser."""
    from accelerate import Accelerator

    features: dict[str, Any] = {
        "rigl": lambda m, o: laconic.sparsity.rigl(m, o, density=0.1, steps=100, every=3),
        "gradual_pruning": lambda m, o: laconic.sparsity.sparsify(
            m, o, "gradual_pruning(density=0.1)", steps=9
        ),
        "admm": lambda m, o: laconic.lowbit.admm(m, o, every=2),
        "straight_through": lambda m, o: laconic.lowbit.straight_through(m, o),
        "distribute": lambda m, o: laconic.distribute(m, o, "local_sgd(every=2)"),
    }
    for name, attach in features.items():
        ends = []
        for wraps in (False, True):
            model = net()
            optimizer: Any = torch.optim.SGD(model.parameters(), **SGD)
            if wraps:
                optimizer = Accelerator(cpu=True).prepare(optimizer)
            made = attach(model, optimizer)
            optimizer = made[1] if isinstance(made, tuple) else optimizer
            for step in range(8):
                optimizer.zero_grad()
                x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
                cross_entropy(model(x), x[:, :5].argmax(1)).backward()
                optimizer.step()
            ends.append(flat(model).clone())
            if isinstance(made, tuple):
                optimizer.remove()
        assert torch.equal(*ends), name


@launched
def schedule_free() -> None:
    import schedulefree

    model = net()
    inner = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    inner.train()
    with pytest.raises(AttachError, match="second set of weights"):
        laconic.distribute(model, inner, "local_sgd(every=4)")
    model, optimizer = laconic.distribute(model, inner, "topk(density=0.1)")
    for step in range(STEPS):
        optimizer.zero_grad()
        rng = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
        x = torch.randn(8, 20, generator=rng)
        cross_entropy(model(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
    optimizer.finish()
    assert agree(model)
    optimizer.eval()
    assert agree(model)


def test_schedulefree_is_for_methods_and_refused_by_strategies(pool):
    pytest.importorskip("schedulefree")
    pool.run(2, schedule_free, timeout_s=300)


@launched
def of_another_run(folder: str) -> list[str]:
    run, said = Run(), []
    run.accelerator.save_state(folder)
    torch.distributed.barrier()
    path = Path(folder) / "laconic.pt"
    whole = torch.load(path, weights_only=True)
    torch.distributed.barrier()  # none writes while another reads
    for content in ({**whole, "ranks": whole["ranks"][:1]}, None):
        if run.accelerator.is_main_process:
            torch.save(content, path) if content else path.write_bytes(b"PK no")
        with pytest.raises(StateError) as caught:
            run.accelerator.load_state(folder)
        said.append(str(caught.value))
        torch.distributed.barrier()
    return said


def test_a_file_that_cannot_be_used_is_told_on_every_rank(pool, tmp_path):
    for rank, (fewer, damaged) in enumerate(
        pool.run(2, of_another_run, str(tmp_path / "state"), timeout_s=300)
    ):
        assert fewer.startswith(f"rank {rank}: ") and "laconic.resize" in fewer
        assert "laconic.pt cannot be used" in damaged


@launched
def compressed_again(folder: str) -> tuple[str, int]:
    """The saved spec and the steps of a second handle, where the first was removed."""
    from laconic.integrations import keep_with

    run = Run()
    run.go(0, 2)
    run.handle.remove()
    run.handle = laconic.compress(run.model, run.optimizer, "topk(density=0.1)")
    keep_with(run.accelerator, run.handle)
    run.go(2, 4)
    run.accelerator.save_state(folder)
    torch.distributed.barrier()
    run.accelerator.load_state(folder)
    kept = torch.load(Path(folder) / "laconic.pt", weights_only=True)
    return kept["ranks"][0]["spec"], run.handle.stats().steps


@on_ranks(2)
@launched
def test_two_handles_have_two_names():
    from laconic.integrations import keep_with

    run = Run()
    keep_with(run.accelerator, run.handle)  # again: nothing to do
    model = torch.nn.parallel.DistributedDataParallel(net())
    other = laconic.compress(model, adam(model.parameters()), "topk(density=0.1)")
    with pytest.raises(AttachError, match=r"another handle as 'laconic' already.*name='laconic2'"):
        keep_with(run.accelerator, other)


def test_a_removed_handle_is_saved_no_more(pool, tmp_path):
    found = pool.run(2, compressed_again, str(tmp_path / "state"), timeout_s=300)
    assert found == [("topk(density=0.1)", 2)] * 2


@launched
def quick_tour(folder: str) -> tuple[float, float, float]:
    losses, ratio = runpy.run_path(str(EXAMPLES / "accelerate_quick_tour.py"))["main"](Path(folder), cpu=True)
    assert Path(folder, "laconic.pt").exists()
    return losses[0], sum(losses[-8:]) / 8, ratio


def test_the_quick_tour(pool, tmp_path):
    for first, last, ratio in pool.run(2, quick_tour, str(tmp_path / "half"), timeout_s=300):
        assert last < 0.7 * first and ratio > 12
