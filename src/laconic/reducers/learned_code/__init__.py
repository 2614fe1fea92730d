"""Learned code: a net, trained during the first steps, that then compresses the selected entries.

Abrahamyan et al. 2021, arXiv:2103.08870 (LGC), known from its abstract, third-party code and memory. Per
tensor, with k = ceil(density * n) and the step's leader, rank t mod N:

    1. S = positions of the leader's k largest; s = root mean square of its values there     sent to all
    2. w_i = x_i[S] / s, rotated by a common random number of places; in every second round of leaders each
       entry times a common random sign
    3. t < until: all_gather of x_i[S]; mean = their average; the autoencoder takes a step of Adam on the w_i
       after that: mean = s * result of `ring` or `server` (see code_exchange) for the w_i, on S

Ours:

- Rotation and signs: a fixed code never carries its null space, where the residual would grow without bound.
- Adam, rate 1e-3: the third party's SGD of this rate learns too slowly.
- `server` has one decoder, the paper one per node (`per_node`). The losses are averages, not sums.
- The sent share is scaled to |x - sent| <= |x| on every rank.

`python -m benchmarks.learned_code` measures which share of the energy codes retain. Do not use `server` or
`per_node` if ranks have different data: they then retain almost nothing.

Results depend on DDP's buckets, so a resumed run may continue with other bits. Replicas agree to the bit on
equal CPUs; between kinds of CPU a last bit may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentEntries, sent_by
from laconic.comm.skippable import broadcast_or_skip, fits
from laconic.core import arguments, deferred
from laconic.core.framing import as_bytes, as_numbers, read_bytes
from laconic.core.layout import Layout, PerLayout
from laconic.core.selector import counts_per_segment, kept
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, DensityReducer
from laconic.reducers.entries import positions_read, positions_wire
from laconic.reducers.learned_code.autoencoder import (
    Autoencoder,
    code_length,
    first_weights,
    with_decoders,
)
from laconic.reducers.learned_code.code_exchange import (
    AveragedCode,
    CodeExchange,
    LeaderCode,
    Outcome,
    Vector,
)
from laconic.reducers.learned_code.trained import Trained

Instance = Literal["ring", "server", "per_node"]
NORMAL = 2.0**-126  # smallest scale


@dataclass(frozen=True, repr=False)
class LearnedCode(DensityReducer):
    """mean = an autoencoder's reconstruction of the values at the leader's k = ceil(density * n) largest.

    `until`: the step at which codes replace values. `instance`: 'ring' averages all ranks' codes; 'server'
    uses the leader's, plus the `innovation` * n largest values of each rank, at least one; 'per_node' is
    'server' with a decoder for each rank.

    Payload, with K entries in a bucket: the leader's positions by `golomb`, 4 bytes per tensor and 12; before
    `until` 4 K bytes of values, then 16 * ceil(K / 16) bytes of code, of all ranks or the leader, and the
    gain or innovation. A bucket of at most 4 entries sends values. Once, after training, 4 bytes for each of
    216 thousand weights, and of 44 thousand per further decoder. State: weights and Adam's moments, equal on
    all ranks; with 'per_node' for one number of ranks.

    >>> from laconic.core.layout import Layout, PerLayout
    >>> model = Layout.of([("weight", (1000, 1000))])
    >>> LearnedCode(density=0.001, until=0).nbytes(model), LearnedCode(density=0.001, until=1).nbytes(model)
    (2534, 5510)
    """

    until: int = 500
    instance: Instance = "ring"
    innovation: float = 1e-5

    paper: ClassVar[str] = "Abrahamyan et al. 2021, arXiv:2103.08870"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "learned_code(density=0.1, until=0)",
        "learned_code(density=0.1, until=100)",
        "learned_code(density=0.1, until=0, instance='server', innovation=0.01)",
        "learned_code(density=0.1, until=0, instance='per_node', innovation=0.01)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("learned_code: until", self.until)
        arguments.choice("learned_code: instance", self.instance, get_args(Instance))
        arguments.number("learned_code: innovation", self.innovation, above=0, most=1)

    @property
    def warm_at(self) -> int:
        return self.until

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _LearnedCode(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        kept_n = [(kept(self.density, entry.numel), entry.numel) for entry in layout]
        k = sum(k for k, _ in kept_n)
        coded = self.exchange(layout).nbytes(k) if code_length(k) < k else 0
        # a bucket, or a leader's tensor with zeros, can have fewer entries, sent as values
        values = 4 * k if self.until else 4 * min(k, code_length(1))
        positions = sum(4 + kernels.rice_bound(k, n) for k, n in kept_n)
        return 8 + 4 + positions + max(coded, values)

    def exchange(self, layout: Layout) -> CodeExchange:
        if self.instance == "ring":
            return AveragedCode()
        return LeaderCode(kept(self.innovation, layout.numel))


class _LearnedCode(BoundReducer):
    def __init__(self, spec: LearnedCode, layout: Layout, comm: Comm) -> None:
        self._spec = spec
        self._comm = comm
        place = {name: i for i, name in enumerate(layout.names)}
        self._ordered = PerLayout(lambda bucket: in_order(bucket, place))
        self._decoders = comm.size if spec.instance == "per_node" else 1
        self._net = Trained("once/autoencoder", with_decoders(first_weights(), self._decoders))

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        ordered, leader = self._ordered(layout), turn.step % self._comm.size
        segments = ordered.segments
        learning = turn.step < self._spec.until
        self._net.begin(turn.step)
        if learning:
            self._net.may_differ()
        else:
            self._net.agree(self._comm, out.device)
        own = None if x is None else out.new_empty(0, dtype=torch.uint8)
        if x is not None and self._comm.rank == leader:
            own = self._announcement(x, ordered)
        wire = broadcast_or_skip(self._comm, leader, own, out.device)
        if x is None or wire is None:
            return None
        with sent_by(leader):
            head, rest = read_bytes(wire, 4, "the scale")
            indices, counts = positions_read(rest, segments)
        values, scale = kernels.gather(x, segments, indices, counts), float(as_numbers(head, torch.float32))
        vector = Vector(values, scale, *self._mixing(turn, values.numel()))
        if learning or code_length(values.numel()) >= values.numel():
            outcome = self._whole(vector, layout, turn, learning)
        else:
            exchange = self._spec.exchange(layout)
            outcome = exchange.exchange(self._comm, self._net.weights, vector, leader)
        if deferred.is_late() and not fits([outcome.mean], alpha):
            return None
        deferred.write(
            lambda: kernels.scatter_add_(segments.zero_(out), segments, indices, counts, outcome.mean, alpha)
        )
        return SentEntries(segments, indices, counts, outcome.own)

    def _announcement(self, x: Tensor, layout: Layout) -> Tensor:
        segments = layout.segments
        indices, counts = kernels.topk(x, segments, counts_per_segment(self._spec.density, segments))
        largest = kernels.gather(x, segments, indices, counts).double()
        rms = largest.square().mean().sqrt() if largest.numel() else largest.new_zeros(())
        scale = rms.clamp(min=NORMAL).float().reshape(1)
        return torch.cat([as_bytes(scale), positions_wire(indices, counts, segments)])

    def _mixing(self, turn: Turn, k: int) -> tuple[int, Tensor]:
        key = turn.common("learned_code")
        signs = torch.ones(k, dtype=torch.float32, device="cpu")
        if turn.step // self._comm.size % 2:
            signs[kernels.uniform(key, k) < 0.5] = -1.0
        return key % max(1, k), signs

    def _whole(self, vector: Vector, layout: Layout, turn: Turn, learning: bool) -> Outcome:
        mean = torch.zeros_like(vector.values)
        if not mean.numel():
            return Outcome(mean, mean)
        all_values = self._comm.all_gather(vector.values)
        for values in all_values:
            mean += values / self._comm.size
        if learning:
            normals = torch.stack([vector.normalised(values) for values in all_values])
            with torch.enable_grad():
                weights = self._net.weights.clone().requires_grad_()
                leader = turn.step % self._comm.size
                loss = self._spec.exchange(layout).loss(Autoencoder(weights), normals, leader)
                (gradient,) = torch.autograd.grad(loss, weights)
            if bool(gradient.isfinite().all()):
                self._net.teach((gradient, mean.numel()), layout, turn.step)
        return Outcome(mean, vector.values)

    def writes_late(self, step: int) -> bool:
        return True

    def put_back(self, layout: Layout) -> None:
        self._net.forget(layout)

    def accept(self, layout: Layout) -> None:
        self._net.accept()

    def state_dict(self) -> dict[str, Tensor]:
        return self._net.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._net.load_state_dict(state)


def in_order(bucket: Layout, place: Mapping[str, int]) -> Layout:
    """Sort the bucket's tensors as in the model: DDP reorders them after the first step."""
    return Layout(tuple(sorted(bucket, key=lambda entry: place[entry.name])))
