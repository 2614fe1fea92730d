"""`compress`: send fewer bytes between the stages of torch's pipelines."""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.comm.torch_comm import TorchComm
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import AttachError, LaconicError, SpecError, StateError
from laconic.core.selector import Selector
from laconic.core.spec import parse
from laconic.core.warning import warn
from laconic.exchange.agreement import built_by_all
from laconic.exchange.method import lift_codec
from laconic.pipeline.coding import PipelineCoding
from laconic.pipeline.codings.ac_sgd import AcSgd
from laconic.pipeline.codings.change import LIMIT, Change
from laconic.pipeline.codings.direct import Direct
from laconic.pipeline.handle import Handle
from laconic.pipeline.place import Place
from laconic.pipeline.plan import Plan

FORWARD, BACKWARD = "change(minmax(bits=4))", "minmax(bits=8)"
NO_TARGET = "the loss has no target: pass target= to step, on the rank of the last stage"
TESTED = ((2, 13), (2, 13))  # torch's stages change: widen after running the tests


def compress(
    schedule_or_stage: Any,
    spec: str | PipelineCoding | Codec | Selector | None = None,
    *,
    forward: str | Change | Codec = FORWARD,
    backward: str | Codec = BACKWARD,
    samples: int | None = None,
    keep: str | Codec = "dense()",
    folder: str | Path | None = None,
    most_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Handle:
    """Compress the activations and gradients sent between pipeline stages.

        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
        handle = laconic.pipeline.compress(schedule, "ac_sgd(forward=4, backward=8)", samples=len(dataset))
        ...
        handle.step(x, samples=ids)        # in place of schedule.step(x), with the same ids on every rank

    Supports the GPipe, 1F1B, interleaved and V schedules of `torch.distributed.pipelining` with
    `PipelineStage`. `schedule.eval` sends `change(...)` activations as first visits, without buffers. A stage
    may be wrapped in `DistributedDataParallel`, also under `laconic.compress`: pass the ranks of all replicas
    as `group`.

    Call this on every rank of the group, before the schedule's first step.

    Args:
        schedule_or_stage: a schedule; or this rank's stage or stages, before a schedule is made.
        spec: a method such as "ac_sgd(forward=4, backward=8)" or a codec for both directions, or
            `change(...)` for activations; replaces `forward` and `backward`.
        forward: coding of activations: `change(codec)`, or any codec or selector.
        backward: codec or selector of their gradients.
        samples: size of the dataset, for `change(...)`; ids are 0..samples - 1.
        keep: codec of fixed size for stored activations, such as "cast('fp16')".
        folder: folder for buffer files; several handles may share it. None: in RAM.
        most_bytes: limit of this rank's buffers. None: the free memory or disk space.
        group: the ranks that raise together. None: the stages' group.
        seed: seed of random rounding.

    Raises:
        AttachError: Nothing is attached: torch's version is untested, there is no such schedule or stage, a
            stage is compressed already, or ranks disagree.
        SpecError: An argument is invalid.
    """
    check_version(torch.__version__)
    stages = stages_of(schedule_or_stage)
    schedule = schedule_or_stage if is_schedule(schedule_or_stage) else None
    comm = TorchComm.own(group or stages[0].group)
    exact_lengths = dist.get_backend(stages[0].group) != "gloo"

    def build() -> Handle:
        plan = _plan(spec, forward, backward, samples, keep, folder, most_bytes, seed)
        return _attach(Handle(plan, schedule, stages, comm, exact_lengths), schedule, stages)

    try:
        handle = built_by_all(comm, build)
    except BaseException:
        comm.close()
        raise
    handle.when_removed(comm.close, _register_exit_warning(handle))
    return handle


def check_version(version: str) -> None:
    """Raise `AttachError` for a version of torch whose stages are untested.

    >>> check_version("2.7.1+cpu")
    Traceback (most recent call last):
    laconic.core.errors.AttachError: compressed pipelines override torch's stages, tested with 2.13, not \
with 2.7.1+cpu: install torch==2.13.*
    """
    least, most = TESTED
    if not least <= tuple(int(part) for part in version.split(".")[:2]) <= most:
        known = " to ".join(dict.fromkeys(".".join(map(str, end)) for end in TESTED))
        raise AttachError(
            f"compressed pipelines override torch's stages, tested with {known}, not with {version}:"
            f" install torch=={most[0]}.{most[1]}.*"
        )


def is_schedule(given: Any) -> bool:
    from torch.distributed.pipelining import schedules

    return isinstance(given, schedules._PipelineSchedule)


def stages_of(given: Any) -> list[Any]:
    from torch.distributed.pipelining import PipelineStage

    from laconic.pipeline.stage import CompressedStage

    stages = [given]
    if is_schedule(given):
        stages = list(vars(given).get("_stages") or [given._stage])
    elif isinstance(given, Sequence) and given:
        stages = list(given)
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            got = type(stage).__name__
            raise AttachError(
                "compress takes a schedule of torch.distributed.pipelining whose stages are PipelineStage, or"
                f" such a stage, got {got}: split the model by hand with PipelineStage(module, index, ...)"
            )
        if isinstance(stage, CompressedStage):
            raise AttachError(
                f"stage {stage.stage_index} is already compressed: call its handle.remove() first"
            )
    return stages


def _plan(
    spec: str | PipelineCoding | Codec | Selector | None,
    forward: str | Change | Codec,
    backward: str | Codec,
    samples: int | None,
    keep: str | Codec,
    folder: str | Path | None,
    most_bytes: int | None,
    seed: int,
) -> Plan:
    if spec is not None:
        method = parse(spec) if isinstance(spec, str) else spec
        if isinstance(method, Change):
            if forward != FORWARD:
                raise SpecError(f"{method!r} sets the coding of activations: omit forward={forward!r}")
        elif forward != FORWARD or backward != BACKWARD:
            raise SpecError(
                f"{method!r} sets both directions: pass it, or forward= and backward=,"
                f" not both: got forward={forward!r}, backward={backward!r}"
            )
        if isinstance(method, AcSgd | Direct):
            forward, backward = method.forward_coding, method.backward_coding
        elif isinstance(method, Change):
            forward = method
        elif isinstance(method, (Codec, Selector)):
            forward = backward = lift_codec(method)
        else:
            raise SpecError(
                "between stages use ac_sgd(...), direct(...), change(...), codecs or selectors, got"
                f" {method!r}"
            )
    up = parse(forward) if isinstance(forward, str) else forward
    up = up if isinstance(up, Change) else lift_codec(up)
    kept = lift_codec(keep)
    if not kept.fixed_size:
        raise SpecError(f"keep must be a codec of fixed size, such as minmax(bits=8), got {kept!r}")
    if isinstance(up, Change):
        if samples is None:
            raise SpecError(f"{up!r} stores a buffer for each sample: pass samples=len(dataset)")
        arguments.whole("samples", samples, 1)
        if (error := up.error()) >= LIMIT:
            warn(
                f"{up!r} loses {error:.2f} of |x|^2 at each visit, and theory requires less than {LIMIT}:"
                " use more bits or shorter blocks",
            )
    if most_bytes is not None:
        arguments.whole("most_bytes", most_bytes, 1)
    place = Place(None if folder is None else Path(folder), most_bytes)
    return Plan(up, lift_codec(backward), samples or 0, kept, place, seed)


def _attach(handle: Handle, schedule: Any, stages: Sequence[Any]) -> Handle:
    from laconic.pipeline.stage import CompressedStage

    def ends(stage: Any) -> None:
        if schedule is None:
            handle.end(stage)

    for links in handle.links:
        stage, kind = links.stage, type(links.stage)
        stage._laconic, stage._laconic_begin, stage._laconic_end = links, handle.begin, ends
        stage._laconic_ids = functools.partial(setattr, handle, "samples")
        stage.__class__ = type(f"Compressed{kind.__name__}", (CompressedStage, kind), {})
        handle.when_removed(functools.partial(_restore, stage, kind))
    if (batches := handle.batches) is not None:
        plain = schedule._step_microbatches

        @functools.wraps(plain)
        def step(
            arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *more: Any, **named: Any
        ) -> Any:
            missing = target_mbs is None and schedule._loss_fn is not None and any(s.is_last for s in stages)
            handle.begin_first(StateError(NO_TARGET) if missing else None)
            out = plain(arg_mbs, kwarg_mbs, target_mbs, *more, **named)
            try:
                handle.end()
            except LaconicError:
                batches.failed()
                raise
            return out

        plain_step = schedule.step

        @functools.wraps(plain_step)
        def whole_step(*args: Any, target: Any = None, **kwargs: Any) -> Any:
            training = bool(schedule._has_backward)
            args, kwargs, target = batches.whole(args, kwargs, target, training)
            try:
                return plain_step(*args, target=target, **kwargs)
            finally:
                batches.ended()  # torch may reject a step before it begins

        schedule._step_microbatches, schedule.step = step, whole_step
        handle.when_removed(
            *(functools.partial(delattr, schedule, n) for n in ("_step_microbatches", "step"))
        )
        _guard_loss(handle, schedule)
    return handle


def _guard_loss(handle: Handle, schedule: Any) -> None:
    one, each = schedule._compute_loss, schedule._maybe_compute_loss
    zero = functools.partial(torch.zeros, (), dtype=torch.float32, device="cpu")

    def checked(output: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target is None:
            raise StateError(NO_TARGET)
        return one(output, target, *args, **kwargs)

    @functools.wraps(one)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return handle.links[-1].guarded(-1, "loss", lambda: checked(*args, **kwargs), zero)

    @functools.wraps(each)
    def with_targets(stage: Any, output: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        none = [None] * schedule._n_microbatches
        return each(stage, output, none if targets is None else targets, *args, **kwargs)

    schedule._compute_loss, schedule._maybe_compute_loss = guarded, with_targets
    for name in ("_compute_loss", "_maybe_compute_loss"):
        handle.when_removed(functools.partial(delattr, schedule, name))


def _restore(stage: Any, kind: type) -> None:
    stage.__class__ = kind
    for name in ("_laconic", "_laconic_begin", "_laconic_end", "_laconic_ids"):
        delattr(stage, name)


def _register_exit_warning(handle: Handle) -> Callable[[], None]:
    """Warn at exit if buffers were never reused; return the call that cancels it."""
    known = weakref.ref(handle)

    def warn_if_alive() -> None:
        alive = known()
        if alive is not None:
            alive.warn_of_one_epoch()

    atexit.register(warn_if_alive)
    return functools.partial(atexit.unregister, warn_if_alive)
