"""Transforms of a training, from --lowbit, --sparsity and --activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.tools.tasks.settings import Event, TrainingSettings
from laconic.transforms.transform import DEFAULT_RUN, Option, Run, Transform, TransformHandle

KEYS: dict[Option, str] = {"lowbit": "lowbit", "sparsity": "sparsity", "activations": "keeping"}
"""Key of each option's state in a checkpoint."""
TAKES: dict[Option, str] = {
    "lowbit": "--lowbit takes a low-bit training such as admm(table='ternary')",
    "sparsity": "--sparsity takes a sparsifier, such as rigl(density=0.1), or swat()",
    "activations": "--activations: activations take comet(...) or blocks(...)",
}
PACKED = "packed.pt"


def transform_of(option: Option, text: str) -> Transform:
    found = parse(text)
    if not isinstance(found, Transform) or found.option != option:
        raise SpecError(f"{TAKES[option]}, got {found!r}")
    return found


def attached(
    option: Option, text: str, model: nn.Module, optimizer: Optimizer, run: Run = DEFAULT_RUN
) -> TransformHandle:
    transform = transform_of(option, text)
    try:
        return transform.attach(model, optimizer, run)
    except AttachError as error:
        raise AttachError(f"--{option} {text} does not work with this model: {error}") from error


def attach_all(
    settings: TrainingSettings, model: nn.Module, optimizer: Optimizer, *, distributed: bool
) -> dict[str, TransformHandle]:
    specs = {option: getattr(settings, option) for option in KEYS}
    run = Run(settings.steps, settings.seed, scaled=settings.precision == "fp16")
    return {
        KEYS[option]: attached(option, text, model, optimizer, run)
        for option, text in specs.items()
        if text is not None and transform_of(option, text).after_distribute is distributed
    }


class Transforms:
    def __init__(self, handles: Mapping[str, TransformHandle]) -> None:
        self.handles = dict(handles)

    @contextmanager
    def training(self) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in self.handles.values():
                stack.enter_context(handle.training())
            yield

    def before_step(self, *, evaluated: bool) -> None:
        for handle in self.handles.values():
            handle.before_step(evaluated=evaluated)

    def events(self) -> list[Event]:
        return [event for handle in self.handles.values() for event in handle.events()]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in self.handles.values():
                stack.enter_context(handle.evaluating())
            yield

    def figures(self) -> Event:
        return {name: figure for handle in self.handles.values() for name, figure in handle.figures().items()}

    def finish(self, folder: Path, rank: int) -> list[Event]:
        events = []
        for handle in self.handles.values():
            model = handle.finish()
            small = None if rank else handle.save_packed(folder / PACKED)
            if small is not None:
                message = _sizes(small, model.state_dict(), folder / PACKED)
                events.append({"kind": "decision", "message": message})
        return events

    def state_dict(self) -> dict[str, Any]:
        return {key: handle.state_dict() for key, handle in self.handles.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, handle in self.handles.items():
            handle.load_state_dict(state[key])


def _sizes(small: Mapping[str, Any], large: Mapping[str, Any], path: Path) -> str:
    packed, dense = (sum(each.numel() * each.element_size() for each in d.values()) for d in (small, large))
    return f"packed: {packed:,} bytes, {dense / packed:.1f} times smaller, in {path}"
