"""Coding: a spec applied to a whole model, as one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from laconic.codecs.cast import Cast
from laconic.codecs.dense import Dense
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.layout_codec import LayoutCodec, Part
from laconic.core.turn import Turn
from laconic.exchange.method import Method, Route, lift
from laconic.feedback import Feedback
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.feedback.memory.contraction import safe_gain
from laconic.feedback.momentum_correction import MomentumCorrection
from laconic.feedback.no_feedback import NoFeedback
from laconic.reducers.dense_first import DenseFirst
from laconic.reducers.gather import Gather
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum

LATE = (1 << 63) - 1  # after every warm-up


@dataclass(frozen=True)
class UpdatePart(Part):
    """Group of tensors of an update. `decay`: factor of the residual; None: no residual."""

    decay: float | None = 1.0


@dataclass(frozen=True)
class Coding:
    text: str
    layout: Layout
    parts: tuple[UpdatePart, ...]
    feedbacks: tuple[Feedback, ...] = ()

    @classmethod
    def up(cls, spec: Any, layout: Layout) -> Coding:
        """Return the coding of client updates.

        `dgc` has no momentum correction, which works between steps. Warm-up and schedules count rounds.
        Raises `SpecError` if the method needs all ranks, or its memory would grow without bound.
        """
        found = lift(spec)
        made = cls._of(found, layout, [_codec(found, route) for route in found.routes])
        return replace(made, feedbacks=tuple(route.feedback for route in found.routes))

    @classmethod
    def down(cls, spec: Any, layout: Layout) -> Coding:
        """Return the coding of the server's updates.

        A codec that may lose more than it sends is damped by 1 / (1 + omega).
        """
        found = lift(spec)
        if any(route.feedback.clip_at(LATE) is not None for route in found.routes):
            raise SpecError(
                f"{found.text} is used for down, where clip would limit the model update: omit clip"
            )
        made = cls._of(found, layout, [_codec(found, route) for route in found.routes])
        return cls(found.text, layout, _answered(found, made.parts))

    @classmethod
    def answer(cls, spec: Any, layout: Layout) -> Coding | None:
        """Return the server's coding if the method has one, as `stc(down=0.01)`."""
        found = lift(spec)
        if not any(isinstance(route.reducer, Server) for route in found.routes):
            return None
        codecs = [
            route.reducer.down if isinstance(route.reducer, Server) else _codec(found, route)
            for route in found.routes
        ]
        made = cls._of(found, layout, codecs, check=False)
        return cls(found.text, layout, _answered(found, made.parts))

    @classmethod
    def _of(cls, method: Method, layout: Layout, codecs: Sequence[Codec], check: bool = True) -> Coding:
        parts = []
        for route, part, codec in zip(method.routes, method.assign(layout), codecs, strict=True):
            if part.numel:
                decay = _decay(method, route)
                gain = route.feedback.gain(codec, part) if check else 1.0
                parts.append(UpdatePart(part, codec, gain, decay))
        return cls(method.text, layout, tuple(parts))

    @property
    def lossless(self) -> bool:
        return all(part.codec.lossless for part in self.parts)

    @property
    def remembers(self) -> bool:
        return any(part.decay is not None for part in self.parts)

    def encode(self, x: Tensor, turn: Turn) -> Tensor:
        """Encode flat x float32 (n,) as one message, uint8 (m,)."""
        return self._wires.encode(x, turn)

    def decode_add_(self, wire: Tensor, out: Tensor, step: int, alpha: float = 1.0) -> Tensor:
        return self._wires.decode_add_(wire, out, step, alpha)

    def limit_(self, update: Tensor, step: int) -> Tensor:
        """Clip an update float32 (n,) to the spec's norm, in place."""
        clips = [clip for each in self.feedbacks if (clip := each.clip_at(step)) is not None]
        if clips and (norm := float(update.double().norm())) > min(clips):
            update.mul_(min(clips) / norm)
        return update

    def correct_(self, residual: Tensor, update: Tensor) -> Tensor:
        for part in self.parts:
            for kept, new in zip(
                part.layout.segments.views(residual), part.layout.segments.views(update), strict=True
            ):
                kept.mul_(1.0 if part.decay is None else part.decay).add_(new)
        return residual

    def settle_(self, residual: Tensor, wire: Tensor, step: int) -> Tensor:
        """Subtract the sent share; zero parts without a residual."""
        self.decode_add_(wire, residual, step, alpha=-1.0)
        for part in self.parts:
            if part.decay is None:
                part.layout.segments.zero_(residual)
        return residual

    def most_nbytes(self) -> int:
        return self._wires.most_nbytes

    @cached_property
    def _wires(self) -> LayoutCodec:
        return LayoutCodec(self.parts, framed=True)


def _answered(method: Method, parts: Sequence[UpdatePart]) -> tuple[UpdatePart, ...]:
    try:
        return tuple(
            UpdatePart(part.layout, part.codec, safe_gain(part.codec, part.layout, damped=True))
            for part in parts
        )
    except SpecError as error:
        raise SpecError(
            f"a server cannot answer with {method.text}: {error}; use a spec such as stc(density=0.01) or"
            " qsgd(levels=7), or send the uncompressed model"
        ) from None


def _codec(method: Method, route: Route) -> Codec:
    reducer = route.reducer
    if isinstance(reducer, Gather) and reducer.grain == "tensor":
        return reducer.codec
    if isinstance(reducer, Gather):
        raise SpecError(f"{method.text}: a client has no buckets, each tensor is encoded alone: omit grain")
    if isinstance(reducer, DenseFirst) and isinstance(reducer.then, (Gather, Server)):
        raise SpecError(
            f"{method.text} starts with {reducer.steps} dense steps, and a client's rounds have one codec:"
            " start with a density below 1"
        )
    if isinstance(reducer, Server):
        return reducer.up
    if isinstance(reducer, Sum):
        return Dense() if reducer.dtype == "fp32" else Cast(reducer.dtype)
    raise SpecError(
        f"{method.text}: {reducer!r} needs all ranks at once, and a client talks only to the server; use a"
        " method that gathers messages, such as stc(density=0.01), or a codec, such as qsgd(levels=7)"
    )


def _decay(method: Method, route: Route) -> float | None:
    feedback = route.feedback
    if route.rule is not None and not isinstance(feedback, MomentumCorrection):
        raise SpecError(f"{method.text} changes the optimiser's update, which stays on each client")
    if isinstance(feedback, ErrorFeedback):
        return feedback.decay
    if isinstance(feedback, MomentumCorrection):
        return 1.0
    if isinstance(feedback, NoFeedback):
        return None
    raise SpecError(
        f"{method.text}: {feedback!r} needs single steps, and a client sends rounds; use error_feedback()"
    )
