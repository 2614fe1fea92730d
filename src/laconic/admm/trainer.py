"""Training of one block of a model per rank, all concurrently."""

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
from laconic.admm.neighbours import Neighbours
from laconic.admm.stats import Span, Stats
from laconic.admm.stored_rows import StoredRows
from laconic.admm.sub_problem import Loss, SubProblem
from laconic.admm.worker import MiniBatch, Worker
from laconic.comm.comm import Comm
from laconic.comm.torch_comm import TorchComm
from laconic.core import arguments
from laconic.core.errors import AttachError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.spec import parse
from laconic.data.sample_ids import sample_ids
from laconic.exchange.agreement import Fingerprint, accepted_by_all, agree

MISSING_IDS = (
    "mode='batch' stores activations and duals by sample, and needs the ids of a batch's samples: call"
    " trainer.step(x, y, samples=ids) on every rank, with ids from laconic.data.with_ids(dataset), or use"
    " mode='online'"
)
FORMAT = 1
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam, whose steps do not depend on the scale of the targets."""
    return torch.optim.Adam(parameters, lr=1e-3)


@outside_inference_mode("drain", "finish", "gather", "stats", "state_dict", "load_state_dict", "close")
class BlockTrainer:
    """A model cut into blocks, one per rank, that train concurrently (a reconstruction: see `block_admm`).

        trainer = laconic.admm.BlockTrainer(model, "block_admm(blocks=3)", example=x)   # on each of 3 ranks
        for x, y in loader:
            loss = trainer.step(x, y)      # the same batches on every rank; the last block's loss, or None
        trainer.finish()                   # train on pending mini-batches
        trainer.gather()                   # the whole model, on every rank

    Each call of `step` is a tick: all blocks train, on different mini-batches, the first block 2 (blocks - 1)
    ticks after its forward pass. All ranks make the same calls, with equal models; each trains its block of
    `model` in place.

    Args:
        model: An `nn.Sequential`.
        training: "block_admm(blocks=3)" or the object.
        example: A batch of inputs, of any size, to infer shapes.
        loss: Function of outputs and labels, mean over samples; default: cross-entropy.
        optimizer: Function of a block's parameters that returns an optimiser; default: Adam at 1e-3.
        samples: Number of samples, with ids 0..samples - 1; only in mode 'batch'.
        folder: Folder for files of X and U in mode 'batch'; default: in RAM.
        group: The process group, one rank per block; default: all ranks.
        comm: Comm to use instead of a group.
        seed: Seed of random rounding.

    Raises:
        SpecError: The spec is wrong.
        AttachError: On every rank: the model cannot be cut like this, or there is not one rank per block.
        StateError: Not enough space for X and U, or `samples` is missing.
    """

    def __init__(
        self,
        model: nn.Module,
        training: str | BlockAdmm,
        *,
        example: Tensor,
        loss: Loss = F.cross_entropy,
        optimizer: OptimizerFactory = adam,
        samples: int | None = None,
        folder: str | Path | None = None,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        seed: int = 0,
    ) -> None:
        spec = parse(training) if isinstance(training, str) else training
        if not isinstance(spec, BlockAdmm):
            raise AttachError(f"training must be block_admm(...), got {spec!r}")
        self.spec, self.model, self.samples, self._seed = spec, model, samples, seed
        self._own_comm = TorchComm.own(group) if comm is None else None
        self.comm: Comm = self._own_comm or comm  # type: ignore[assignment]

        def build() -> Fingerprint:
            self._build(model, example, loss, optimizer, None if folder is None else Path(folder))
            return self._fingerprint()

        agree(self.comm, build)

    def _build(
        self, model: nn.Module, example: Tensor, loss: Loss, make: OptimizerFactory, folder: Path | None
    ) -> None:
        spec, rank = self.spec, self.comm.rank
        if self.comm.size != spec.blocks:
            raise AttachError(f"{spec!r} needs one rank per block, {spec.blocks} ranks, got {self.comm.size}")
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
        input_shape, output_shape = [None, *self._shapes][rank], [*self._shapes, None][rank]
        rows = None
        if self.samples is not None and input_shape is not None:
            path = None if folder is None else folder / f"block{rank + 1}.rows"
            rows = StoredRows(self.samples, input_shape, spec.keep, path, self._seed)
        self._worker = Worker(rank, self.last, problem, links, input_shape, output_shape, rows)

    @property
    def delay(self) -> int:
        """Ticks from a mini-batch's first forward pass to its last update."""
        return 2 * self.last

    def step(
        self, x: Tensor | None, y: Tensor | None, samples: Tensor | Sequence[int] | None = None
    ) -> float | None:
        """Add a mini-batch, and train this block on the one that is due.

        Args:
            x: Inputs (rows, ...), needed on the first rank.
            y: Labels (rows, ...), needed on the last rank, and on ranks without x.
            samples: In mode 'batch', sample ids int64 (rows,), equal on all ranks.

        Returns:
            On the last rank the loss of its mini-batch; None before the first and on other ranks.

        Raises:
            StateError: Ids are missing or wrong, in mode 'batch'.
            NonFiniteError: Training has diverged.
            PeerError: A neighbour has failed; its error has the reason.
        """
        with self._worker.abort_on_error():
            batch = self._local_batch(x, y, samples)
        return self._worker.tick(batch)

    def drain(self) -> float | None:
        """Make one tick without a new mini-batch; return the loss as `step` does."""
        return self._worker.tick(None)

    def finish(self) -> list[float]:
        """Train on pending mini-batches; return their losses on the last rank. Training can continue."""
        losses = [self.drain() for _ in range(self.delay)]
        return [loss for loss in losses if loss is not None]

    def gather(self) -> nn.Module:
        """Return the whole model, on every rank."""
        self._worker.links.check_peers()
        for rank, block in enumerate(self.blocks):
            for tensor in block.tensors:
                self.comm.broadcast(tensor.data, rank)
        return self.model

    def stats(self) -> Stats:
        """Return the figures of this rank."""
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
            kept_bytes=0 if worker.rows is None else worker.rows.nbytes,
        )

    def spans(self) -> list[Span]:
        """Return this block's work in the last tick."""
        return list(self._worker.spans)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with pending mini-batches, to resume with the same bits.

        Save one per rank, between steps, for `torch.load(weights_only=True)`.
        """
        return {"format": FORMAT, **self._identity(), "worker": self._worker.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state. All ranks call it, with states of one checkpoint.

        Raises `StateError`, with nothing changed, if one is damaged or of another rank or training.
        """
        before = self._worker.trained_state()

        def take() -> None:
            self._check_identity(saved)
            self._worker.load_trained(saved["worker"])

        try:
            accepted_by_all(self.comm, take)
        except Exception:
            self._worker.restore_trained(before)
            raise
        self._worker.load_progress(saved["worker"])

    def _check_identity(self, saved: Mapping[str, Any]) -> None:
        known = {"format": FORMAT, **self._identity()}
        if not isinstance(saved, Mapping) or saved.keys() != {*known, "worker"}:
            raise StateError(
                f"the saved state is not from BlockTrainer.state_dict(): {arguments.shown(saved)}"
            )
        for key, value in known.items():
            if saved[key] != value:
                raise StateError(
                    f"the saved state is of {key} {saved[key]!r}, this trainer has {value!r}: save and load"
                    " one file per rank, with the same arguments of BlockTrainer"
                )

    def close(self) -> None:
        """Free stored X and U, and the trainer's process group."""
        if self._worker.rows is not None:
            self._worker.rows.close()
        if self._own_comm is not None:
            self._own_comm.close()

    def _local_batch(
        self, x: Tensor | None, y: Tensor | None, samples: Tensor | Sequence[int] | None
    ) -> MiniBatch:
        for name, tensor, rank in (("x", x, 0), ("y", y, self.last)):
            if tensor is None and self.comm.rank == rank:
                raise StateError(
                    f"rank {rank} has the {'first' if name == 'x' else 'last'} block: pass {name}"
                )
        given = x if x is not None else y
        ids = None
        if self.samples is not None:
            ids = sample_ids(samples, self.samples, missing=MISSING_IDS, call="BlockTrainer")
        if given is None and ids is None:
            raise StateError("the size of the batch is unknown: pass x, y or samples on every rank")
        rows = len(given) if given is not None else len(ids)  # type: ignore[arg-type]
        if ids is not None and len(ids) != rows:
            raise StateError(f"pass one id for each sample of the batch: {rows} samples, {len(ids)} ids")
        # a script may overwrite its batch before the last tick that reads it
        inputs = x.clone() if x is not None and self.comm.rank == 0 else None
        labels = y.clone() if y is not None and self.comm.rank == self.last else None
        return MiniBatch(rows, ids, inputs, labels)

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
