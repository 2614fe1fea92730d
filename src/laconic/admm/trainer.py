"""BlockTrainer: one rank's block of a model, trained side by side with the others'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.admm.block_admm import BlockAdmm
from laconic.admm.cutting import cut_into, shapes
from laconic.admm.kept import Kept
from laconic.admm.neighbours import Neighbours
from laconic.admm.stats import Span, Stats
from laconic.admm.sub_problem import Loss, SubProblem
from laconic.admm.worker import Fed, Worker
from laconic.comm.comm import Comm
from laconic.comm.torch_comm import TorchComm
from laconic.core import arguments
from laconic.core.errors import AttachError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.spec import parse
from laconic.data.sample_ids import sample_ids
from laconic.exchange.agreement import Fingerprint, accepted_by_all, agree

MISSING = (
    "mode='batch' stores activations and duals by sample, and needs the ids of a batch's samples: trainer"
    ".step(x, y, samples=ids), on every rank; laconic.data.with_ids(dataset) gives them. Or mode='online'"
)
FORMAT = 1
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The default: targets have other scales than a loss, and Adam's steps do not depend on them."""
    return torch.optim.Adam(parameters, lr=1e-3)


@outside_inference_mode("drain", "finish", "gather", "stats", "state_dict", "load_state_dict", "close")
class BlockTrainer:
    """A model cut into blocks, one a rank, that train at the same time (a reconstruction: see `block_admm`).

        trainer = laconic.admm.BlockTrainer(model, "block_admm(blocks=3)", example=x)   # on each of 3 ranks
        for x, y in loader:
            loss = trainer.step(x, y)      # the same batches on every rank; the last block's loss, or None
        trainer.finish()                   # what is under way is trained on
        trainer.gather()                   # the whole model, on every rank

    A mini-batch takes 2 (blocks - 1) ticks from its forward pass in the first block to the first block's
    update: a call of `step` is a tick, and in each all blocks train, on different mini-batches.

    Called by all ranks of the group, with equal models. Each rank trains its own block of `model`, in place.

    Args:
        model: An `nn.Sequential`.
        training: "block_admm(blocks=3)" or the object.
        example: A batch of inputs, of any size, from which shapes follow.
        loss: Mean over samples of outputs and labels; default: cross-entropy.
        optimizer: Makes the optimiser of a block's parameters; default: Adam at 1e-3.
        samples: How many samples the dataset has, with ids 0..samples - 1. Only in mode 'batch'.
        folder: In mode 'batch', where X and U are kept in a file for each boundary; default: in RAM.
        group: The process group, a rank for each block; default: all ranks.
        comm: In place of a group.
        seed: Of random rounding.

    Raises:
        SpecError: The spec is wrong.
        AttachError: On every rank: the model cannot be cut so, or there is not one rank for each block.
        StateError: There is no room for X and U, or `samples` is missing.
    """

    def __init__(
        self,
        model: nn.Module,
        training: str | BlockAdmm,
        *,
        example: Tensor,
        loss: Loss = F.cross_entropy,
        optimizer: Make = adam,
        samples: int | None = None,
        folder: str | Path | None = None,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        seed: int = 0,
    ) -> None:
        spec = parse(training) if isinstance(training, str) else training
        if not isinstance(spec, BlockAdmm):
            raise AttachError(f"BlockTrainer takes block_admm(...), got {spec!r}")
        self.spec, self.model, self.samples, self._seed = spec, model, samples, seed
        self._own_comm = TorchComm.own(group) if comm is None else None
        self.comm: Comm = self._own_comm or comm  # type: ignore[assignment]

        def build() -> Fingerprint:
            self._build(model, example, loss, optimizer, None if folder is None else Path(folder))
            return self._fingerprint()

        agree(self.comm, build)

    def _build(self, model: nn.Module, example: Tensor, loss: Loss, make: Make, folder: Path | None) -> None:
        spec, rank = self.spec, self.comm.rank
        if self.comm.size != spec.blocks:
            raise AttachError(
                f"{spec!r} has a rank for each block, so it needs {spec.blocks} ranks, got {self.comm.size}"
            )
        if (spec.mode == "batch") != (self.samples is not None):
            raise StateError(
                "mode='batch' needs the number of samples of the dataset: samples=len(dataset)"
                if spec.mode == "batch"
                else f"samples={self.samples} is for mode='batch': mode='online' stores nothing by sample"
            )
        self.blocks = cut_into(model, spec.blocks, spec.cut)
        self._shapes = shapes(self.blocks, example)
        self.block, self.last = self.blocks[rank], spec.blocks - 1
        self.optimizer = make(self.block.layers.parameters())
        ends = loss if rank == self.last else None
        problem = SubProblem(self.block.layers, self.block.proximal, self.optimizer, spec, ends)
        links = Neighbours(self.comm, spec.activations, spec.targets, self._seed, example.device)
        inside, outside = [None, *self._shapes][rank], [*self._shapes, None][rank]
        kept = None
        if self.samples is not None and inside is not None:
            path = None if folder is None else folder / f"block{rank + 1}.rows"
            kept = Kept(self.samples, inside, spec.keep, path, self._seed)
        self._worker = Worker(rank, self.last, problem, links, inside, outside, kept)

    @property
    def delay(self) -> int:
        """Ticks from a mini-batch's first forward pass to its last update."""
        return 2 * self.last

    def step(
        self, x: Tensor | None, y: Tensor | None, samples: Tensor | Sequence[int] | None = None
    ) -> float | None:
        """Give a mini-batch, and train this block on the one whose turn it is.

        Args:
            x: Inputs (rows, ...); on other ranks than the first, None will do.
            y: Labels (rows, ...); on other ranks than the last, None will do, if there is x.
            samples: In mode 'batch' the samples' ids, int64 (rows,), equal on all ranks.

        Returns:
            On the last rank, the loss of the mini-batch that it has trained on; None before it has any, and
            on other ranks.

        Raises:
            StateError: Ids are missing or wrong, in mode 'batch'.
            NonFiniteError: Training has diverged.
            PeerError: A neighbour has failed; its own error says why.
        """
        with self._worker.telling():
            fed = self._fed(x, y, samples)
        return self._worker.tick(fed)

    def drain(self) -> float | None:
        """One tick without a new mini-batch. Returns what `step` returns."""
        return self._worker.tick(None)

    def finish(self) -> list[float]:
        """Train on what is under way: `drain`, `delay` times. Training may go on afterwards.

        Returns:
            On the last rank, the losses of those mini-batches.
        """
        losses = [self.drain() for _ in range(self.delay)]
        return [loss for loss in losses if loss is not None]

    def gather(self) -> nn.Module:
        """The model with all blocks' parameters and buffers, on every rank. What is under way stays so."""
        self._worker.links.hear()
        for rank, block in enumerate(self.blocks):
            for tensor in block.tensors:
                self.comm.broadcast(tensor.data, rank)
        return self.model

    def stats(self) -> Stats:
        """Figures of this rank since the start."""
        worker, links = self._worker, self._worker.links
        return Stats(
            ticks=worker.ticks,
            updates=worker.updates,
            activations=links.messages["activations"],
            targets=links.messages["targets"],
            forward_s=worker.forward_s,
            update_s=worker.update_s,
            encode_s=links.encode_s,
            decode_s=links.decode_s,
            waited_s=links.waited_s,
            primal=worker.primal,
            dual=worker.dual,
            kept_bytes=0 if worker.kept is None else worker.kept.nbytes,
        )

    def spans(self) -> list[Span]:
        """What this block did in the last tick, and when."""
        return list(self._worker.spans)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state with what is under way, saved by this rank between steps: same bits on resuming.

        Plain numbers, strings and tensors, which load under `torch.load(weights_only=True)`.
        """
        return {"format": FORMAT, **self._identity(), "worker": self._worker.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Called on every rank, with states of one checkpoint.

        Raises:
            StateError: With nothing changed on any rank: a state is of another rank or training, or damaged.
        """
        before = self._worker.trained()

        def take() -> None:
            self._check_identity(saved)
            self._worker.take(saved["worker"])

        try:
            accepted_by_all(self.comm, take)
        except Exception:
            self._worker.put(before)
            raise
        self._worker.go_on(saved["worker"])

    def _check_identity(self, saved: Mapping[str, Any]) -> None:
        known = {"format": FORMAT, **self._identity()}
        if not isinstance(saved, Mapping) or saved.keys() != {*known, "worker"}:
            raise StateError(
                f"the saved state is none of BlockTrainer.state_dict(): {arguments.shown(saved)}"
            )
        for key, value in known.items():
            if saved[key] != value:
                raise StateError(
                    f"the saved state is of {key} {saved[key]!r}, this trainer has {value!r}: save and"
                    " load one file a rank, with the same call of BlockTrainer"
                )

    def close(self) -> None:
        """Free stored X and U, and the process group that was made here."""
        if self._worker.kept is not None:
            self._worker.kept.close()
        if self._own_comm is not None:
            self._own_comm.close()

    def _fed(self, x: Tensor | None, y: Tensor | None, samples: Tensor | Sequence[int] | None) -> Fed:
        """The mini-batch as this rank needs it."""
        for name, tensor, rank in (("x", x, 0), ("y", y, self.last)):
            if tensor is None and self.comm.rank == rank:
                raise StateError(
                    f"rank {rank} has the {'first' if name == 'x' else 'last'} block: give it {name}"
                )
        given = x if x is not None else y
        ids = None
        if self.samples is not None:
            ids = sample_ids(samples, self.samples, missing=MISSING, call="BlockTrainer")
        if given is None and ids is None:
            raise StateError("give x, y or sample ids on every rank: a rank must know how long a batch is")
        rows = len(given) if given is not None else len(ids)  # type: ignore[arg-type]
        if ids is not None and len(ids) != rows:
            raise StateError(f"give one id for each sample of the batch: {rows} samples, {len(ids)} ids")
        # copies, as a script may fill its batch anew before the last tick that reads this one
        inputs = x.clone() if x is not None and self.comm.rank == 0 else None
        labels = y.clone() if y is not None and self.comm.rank == self.last else None
        return Fed(rows, ids, inputs, labels)

    def _identity(self) -> dict[str, Any]:
        return {
            "spec": repr(self.spec),
            "rank": self.comm.rank,
            "seed": self._seed,
            "samples": self.samples,
            "shapes": [list(shape) for shape in self._shapes],
        }

    def _fingerprint(self) -> dict[str, str]:
        return {f"the {key}": str(value) for key, value in self._identity().items() if key != "rank"}
