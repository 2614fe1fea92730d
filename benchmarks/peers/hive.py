"""hivemind (PyPI): its 8-bit codec, in the pattern of its averager, tensor by tensor after backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.plain import running
from benchmarks.peers.running import Running, gradient


def uniform8(model: nn.Module) -> Running:
    """Each rank averages its part of a tensor, which goes there and back in 256 levels of the codec's."""
    from hivemind.compression import (  # type: ignore[import-not-found]  # see installed.py
        CompressionInfo,
        Uniform8BitQuantization,
        deserialize_torch_tensor,
    )
    from hivemind.proto.runtime_pb2 import Tensor as Message  # type: ignore[import-not-found]

    codec, size = Uniform8BitQuantization(), dist.get_world_size()

    def packed(x: Tensor) -> Tensor:
        message = codec.compress(x, CompressionInfo.from_tensor(x))
        return torch.frombuffer(bytearray(message.SerializeToString()), dtype=torch.uint8)

    def unpacked(wire: Tensor) -> Tensor:
        x: Tensor = deserialize_torch_tensor(Message.FromString(wire.numpy().tobytes()))
        return x

    def exchange(p: nn.Parameter) -> Tensor:
        x = gradient(p)
        parts = F.pad(x, (0, -len(x) % size)).chunk(size)
        going = torch.stack([packed(part) for part in parts])
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going)
        own = packed(torch.stack([unpacked(each) for each in coming]).mean(dim=0))
        everyone = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(everyone, own)
        return torch.cat([unpacked(each) for each in everyone])[: len(x)]

    return running(model, exchange)
