"""Torch's pipeline stage with its six send and receive methods packed; everything else is torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from laconic.pipeline.links import StageLinks


class CompressedStage(PipelineStage):
    """What a stage becomes in `compress`: its class is replaced, and restored by `remove`.

    Receives are posted with bytes, and decoded when torch reads the buffer that it believes it received in.
    """

    _laconic: StageLinks
    _laconic_begin: Callable[[Any], None]
    _laconic_end: Callable[[Any], None]
    _laconic_ids: Callable[[Tensor | Sequence[int]], None]

    @property
    def samples(self) -> None:
        """Set the ids of the next step's samples: the same as `handle.samples = ids`."""
        raise AttributeError("samples is set before each step, and read by none")

    @samples.setter
    def samples(self, ids: Tensor | Sequence[int]) -> None:
        self._laconic_ids(ids)

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._laconic.begin()
        self._laconic_begin(self)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._laconic.send("forward", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._laconic.send("backward", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._laconic.post("forward", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._laconic.post("backward", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._laconic.fill("forward", fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._laconic.fill("backward", bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self._laconic_end(self)
