"""Third-party step hooks around a step on masters: unlike ours, they expect the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

Hooks = dict[int, Callable[..., Any]]
OURS = __name__.partition(".")[0]


def between_hooks(
    optimizer: Optimizer, step: Callable[[Callable[[], Any] | None], Any], closure: Callable[[], Any] | None
) -> Any:
    args: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
    kwargs: dict[str, Any] = {}
    for hook in _of_others(optimizer._optimizer_step_pre_hooks).values():
        if (changed := hook(optimizer, args, kwargs)) is not None:
            args, kwargs = changed
    with _set_aside(optimizer._optimizer_step_pre_hooks), _set_aside(optimizer._optimizer_step_post_hooks):
        result = step(args[1] if len(args) > 1 else kwargs.get("closure"))
    for hook in _of_others(optimizer._optimizer_step_post_hooks).values():
        hook(optimizer, args, kwargs)
    return result


@contextmanager
def _set_aside(hooks: Hooks) -> Iterator[None]:
    order, others = [*hooks], _of_others(hooks)
    for key in others:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(others)
        for key in order:
            if key in hooks:
                hooks[key] = hooks.pop(key)


def _of_others(hooks: Hooks) -> Hooks:
    return {key: hook for key, hook in hooks.items() if not _ours(hook)}


def _ours(hook: Callable[..., Any]) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    module: str = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] == OURS
