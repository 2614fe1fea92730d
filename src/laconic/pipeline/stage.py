"""Torch's pipeline stage with coded sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from laconic.pipeline.links import StageLinks
from laconic.pipeline.message import PeerFailed


class CompressedStage(PipelineStage):
    """Class of an attached stage. Messages are decoded when torch reads the buffer to be filled."""

    _laconic: StageLinks
    _laconic_begin: Callable[[Any], None]
    _laconic_end: Callable[[Any], None]
    _laconic_ids: Callable[[Tensor | Sequence[int]], None]

    @property
    def samples(self) -> None:
        raise AttributeError("samples is write-only: set it before each step")

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

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        plain = super().forward_one_chunk
        self._laconic.arrived("forward", fwd_chunk_id)

        def zeros() -> Any:
            metas = self._stage_meta.outputs or ()
            outputs = tuple(torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) for meta in metas)
            self._laconic.void.add(fwd_chunk_id)
            self.fwd_cache[fwd_chunk_id] = (outputs, [])
            output = outputs[0] if len(outputs) == 1 else outputs
            if self.is_last and save_forward_output:
                self.output_chunks.append(output)
            return output

        return self._laconic.guarded(
            fwd_chunk_id, "forward", lambda: plain(fwd_chunk_id, args, kwargs, save_forward_output), zeros
        )

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        plain = super().backward_one_chunk
        self._laconic.arrived("backward", bwd_chunk_id)

        def backward() -> None:
            if bwd_chunk_id in self._laconic.void:
                raise PeerFailed("there was no forward pass")
            plain(bwd_chunk_id, loss, full_backward, last_backward)

        def nothing() -> None:
            self.fwd_cache.pop(bwd_chunk_id, None)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self._stage_meta.inputs or ())
            if not full_backward:
                self.dw_runner[bwd_chunk_id] = lambda: None

        self._laconic.guarded(bwd_chunk_id, "backward", backward, nothing)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        plain = super().backward_weight_one_chunk
        self._laconic.guarded(
            bwd_chunk_id, "backward", lambda: plain(bwd_chunk_id, last_backward), lambda: None
        )

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self._laconic_end(self)
