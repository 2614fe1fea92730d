"""Compressed all-gather of FSDP2's parameters.

All ranks decode every shard, including their own, to compute with the same weights. The optimiser's shards
stay exact, as in QSDP (Markov, Vladu, Guo, Alistarh 2023, arXiv:2302.02390) and in ZeRO++'s qwZ (Wang et al.
2023, arXiv:2306.10209): a reconstruction, without QSDP's learned levels. Both gathers of a step have the same
bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from laconic.codecs.sparse import Sparse
from laconic.core.codec import Codec
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.fsdp.models import default_collective, gather_of
from laconic.fsdp.reduce_scatter import Shards

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CodedAllGather:
    """All-gather of one module, in place of `before`.

    Wire: the encoded shard, to each other rank; an empty message for a non-finite shard, which is NaN on
    every rank. Parameters of several dtypes, or of integers, are sent unencoded. Gathers in the smaller group
    of an integer `reshard_after_forward` stay FSDP's own, uncounted.
    """

    def __init__(self, codec: Codec, shards: Shards, module: str, before: Any) -> None:
        self.before = before
        self._codec, self._shards = codec, shards
        self._name = f"parameters of {module}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Write every rank's decoded input (m,) to output (size * m,). They may overlap."""
        began = time.perf_counter()
        shards, comm = self._shards, self._shards.comm
        if dist.get_world_size(group) != comm.size:
            work: dist.Work | None = self.before(output_tensor, input_tensor, group, async_op)
            return work
        comm.mark()
        if input_tensor.dtype in FLOATS:
            self._coded(output_tensor, input_tensor)
        else:
            with comm.phase("parameters uncompressed"):
                parts = comm.all_gather(input_tensor.contiguous().view(torch.uint8))
            for chunk, part in zip(output_tensor.chunk(comm.size), parts, strict=True):
                chunk.view(torch.uint8).copy_(part)
        shards.dense_bytes += comm.dense_scattered(input_tensor.element_size() * output_tensor.numel())
        shards.seconds.add(began, time.perf_counter(), *comm.since_mark())
        return None

    def _coded(self, output: Tensor, own: Tensor) -> None:
        shards, comm, n = self._shards, self._shards.comm, own.numel()
        x = own.to(torch.float32)
        key = Turn(shards.step, comm.rank, shards.seed).own(self._name)
        finite = bool(torch.isfinite(x).all())
        wire = self._codec.encode(x, key) if finite else torch.empty(0, dtype=torch.uint8, device=x.device)
        with comm.phase(f"parameters {self._codec!r}"):
            wires = comm.all_gather(wire)
        for chunk, each in zip(output.chunk(comm.size), wires, strict=True):
            if n and not each.numel():
                chunk.fill_(torch.nan)
            else:
                chunk.copy_(self._codec.decode(each, n))


def codec_of(spec: Any) -> Codec | None:
    """Return the codec of a `parameters=` spec. Raises `SpecError`, or `AttachError` if it is sparse."""
    found = parse(spec) if isinstance(spec, str) else spec
    if found is None or (isinstance(found, Codec) and not isinstance(found, Sparse)):
        return found
    hint = "such as 'minmax(bits=8)', 'rotated(minmax(bits=4))' or 'cast(\"bf16\")'"
    if isinstance(found, Sparse):
        raise AttachError(f"parameters={found!r} does not send all parameters: use a dense codec, {hint}")
    raise SpecError(f"parameters= must be a codec, {hint}, got {found!r}")


def default_gather(name: str, module: FSDPModule) -> Any:
    return default_collective(name, gather_of(module), CodedAllGather, "all-gather")


def restore(module: FSDPModule, before: Any) -> None:
    if isinstance(gather_of(module), CodedAllGather):
        module.set_custom_all_gather(before)
