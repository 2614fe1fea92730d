"""Handle that `compress` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError
from laconic.core.inference import outside_inference_mode
from laconic.core.warning import warn
from laconic.data.memory import Memory
from laconic.pipeline import state
from laconic.pipeline.buffer import Saved
from laconic.pipeline.changes import Changes, channel_of
from laconic.pipeline.channel import Channel
from laconic.pipeline.codings.change import Change
from laconic.pipeline.links import Direction, StageLinks
from laconic.pipeline.plan import Plan
from laconic.pipeline.split import Batches
from laconic.pipeline.stats import Stats, Traffic
from laconic.pipeline.step import Step, checked_ids


@outside_inference_mode("stats", "forget", "state_dict", "load_state_dict", "remove")
class Handle:
    """Compressed pipeline on one rank.

    An error inside a step is raised on every rank at its end. Buffers store nothing of a failed step, and a
    script may continue. After `remove`, only `stats` and `remove` can be called.
    """

    def __init__(self, plan: Plan, schedule: Any, stages: Sequence[Any], comm: Comm, exact: bool) -> None:
        self.plan = plan
        self._schedule, self._stages, self._comm, self._exact = schedule, list(stages), comm, exact
        self._traffic, self._step = Traffic(), Step()
        self.batches = None if schedule is None else Batches(schedule, self._step)
        self._ids: Tensor | Sequence[int] | None = None
        self._upcoming: Tensor | Sequence[int] | None = None
        self._first_rank = dist.get_process_group_ranks(self._stages[0].group or dist.group.WORLD)[0]
        self._ended = 0
        self._loaded: dict[str, Saved] = {}  # for boundaries not yet used
        self._removers: list[Callable[[], None]] = []
        self._removed = False
        self.links = [StageLinks(each, self._step, self._traffic, self._make, exact) for each in stages]

    def __repr__(self) -> str:
        indices = ", ".join(str(stage.stage_index) for stage in self._stages)
        return f"<forward {self.plan.forward!r}, backward {self.plan.backward!r}, stage {indices}>"

    @property
    def fingerprint(self) -> dict[str, str]:
        plan = self.plan
        return {
            "forward": repr(plan.forward),
            "backward": repr(plan.backward),
            "samples": str(plan.samples),
            "keep": repr(plan.keep),
            "the seed": str(plan.seed),
            "the number of stages": str(self._stages[0].num_stages),
            "the kind of schedule": type(self._schedule).__name__,
        }

    @property
    def samples(self) -> Tensor | Sequence[int] | None:
        """Sample ids of the next step: set them before each step, equal on all ranks."""
        return self._ids

    @samples.setter
    def samples(self, ids: Tensor | Sequence[int]) -> None:
        self._check_attached()
        self._ids = ids

    @property
    def upcoming(self) -> Tensor | Sequence[int] | None:
        """Ids of the step after that of `samples`, whose buffers are read ahead from disk."""
        return self._upcoming

    @upcoming.setter
    def upcoming(self, ids: Tensor | Sequence[int] | None) -> None:
        self._upcoming = ids

    def step(
        self,
        *args: Any,
        samples: Tensor | Sequence[int] | None = None,
        upcoming: Tensor | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call `schedule.step(*args, **kwargs)` with the ids of its samples. Call this on every rank.

        Args:
            args, kwargs: arguments of the schedule's step.
            samples: int64 (batch,), distinct ids in 0..N-1, equal on all ranks.
            upcoming: ids of the step after that of `samples`, read ahead from disk.

        Raises:
            AttachError: The handle was removed; or `compress` was given stages: set `handle.samples`, then
                call the schedule's step.
            StateError, NonFiniteError, WireError, OSError: The step failed; raised on every rank.
        """
        self._check_attached()
        if self.batches is None:
            raise AttachError(
                "compress was given stages, not their schedule: set handle.samples = ids, then call"
                " schedule.step; or pass the schedule to compress"
            )
        self.batches.check_ids(samples)
        self._ids, self._upcoming = samples, upcoming
        return self._schedule.step(*args, **kwargs)

    def stats(self) -> Stats:
        """Return bytes and seconds of this rank."""
        buffers = [each.buffer for each in self._changes()]
        return Stats.of(
            self._traffic,
            steps=self._step.number,
            first_visits=sum(each.first_visits for each in buffers),
            changes=sum(each.changes for each in buffers),
            buffer_bytes=sum(each.nbytes for each in buffers),
        )

    def digests(self) -> dict[str, str]:
        """Return digests of this rank's buffers, equal on both sides of a boundary."""
        self._check_attached()
        sides = {"send": "sent", "receive": "received"}
        return {
            f"{channel.name} {sides[side]}": channel.buffer.digest()
            for links in self.links
            for (_, side, _), channel in links.channels.items()
            if isinstance(channel, Changes)
        }

    def forget(self) -> None:
        """Empty all buffers: each sample's next visit is its first. Call this on every rank."""
        self._check_attached()
        self._loaded.clear()
        for each in self._changes():
            each.buffer.forget()

    def state_dict(self, *, buffers: bool = True) -> dict[str, Any]:
        """Return this rank's state, to save between steps. The rank is in every key.

        Args:
            buffers: Whether to save the samples' activations; without them, next visits are first visits.
                Equal on all ranks.

        Returns:
            Values loadable with `torch.load(weights_only=True)`.

        Raises:
            OSError: A file of `folder` could not be written.
        """
        self._check_attached()
        kept = {each.name: each.buffer.save() for each in self._changes()} | self._loaded
        return state.saved(self._identity(), self._step.number, kept if buffers else {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state. Call this on every rank, with states of one checkpoint.

        Raises:
            StateError: The state is damaged, or of another rank, pipeline, spec or shape; nothing is changed.
                The first step checks boundaries not used yet.
            OSError: There is no room; all buffers are empty then.
        """
        self._check_attached()
        step, loaded = state.loaded(saved, self._identity())
        state.check_fit(loaded, list(self._changes()))
        self.forget()
        self._step.number, self._loaded = step, loaded
        try:
            for each in self._changes():
                self._restore(each)
        except Exception:
            self.forget()
            raise

    def remove(self) -> None:
        """Restore torch's stages and free the buffers. Call this on every rank, between steps."""
        removers, self._removers, self._removed = self._removers, [], True
        for remove in reversed(removers):
            remove()
        if removers:
            self.warn_of_one_epoch()
        for each in self._changes():
            each.buffer.close()
        self._loaded.clear()

    def when_removed(self, *removers: Callable[[], None]) -> None:
        self._removers += removers

    def warn_of_one_epoch(self) -> None:
        stats = self.stats()
        if stats.first_visits and not stats.changes:
            warn(
                f"{self.plan.forward!r} has sent {stats.first_visits} samples for the first time and none"
                " again, so its buffers were useless. To train for one epoch, quantise directly: forward="
                f"'{self.plan.direct!r}'",
            )

    def begin(self, stage: Any) -> None:
        if stage is not self._stages[0]:
            return
        step, self._ended = self._step, 0
        step.begin()
        for each in self._changes():
            each.buffer.discard()  # drafts of a failed step
        ids, self._ids = self._ids, None
        if not isinstance(self.plan.forward, Change) or not stage.has_backward:
            return
        try:
            step.ids = checked_ids(ids, self.plan.samples)
            self._read_ahead(step.ids)
        except Exception as error:
            step.fail(error, "")
        if self._exact:  # lengths follow from the ids: agree before sending
            state.agree_on(self._comm, step, list(self._changes()), self._first_rank)

    def begin_first(self, error: Exception | None) -> None:
        self._step.begin_first(self._comm, error)

    def end(self, stage: Any = None) -> None:
        self._ended += 1
        if stage is None or self._ended == len(self._stages):
            self._step.end(self._comm)
            for each in self._changes():
                each.buffer.settle()
            if self._stages[0].has_backward:
                self._step.number += 1

    def _read_ahead(self, ids: Tensor) -> None:
        soon = [] if self._upcoming is None else checked_ids(self._upcoming, self.plan.samples).tolist()
        self._upcoming = None
        for each in self._changes():
            each.buffer.check()
            if each.buffer.opened:
                each.buffer.memory.prefetch(list(dict.fromkeys([*ids.tolist(), *soon])))

    def _changes(self) -> Iterator[Changes]:
        for links in self.links:
            for channel in links.channels.values():
                if isinstance(channel, Changes):
                    yield channel

    def _make(
        self, direction: Direction, name: str, shape: torch.Size, dtype: torch.dtype, training: bool
    ) -> Channel:
        plan = self.plan
        coding = plan.forward if direction == "forward" else plan.backward
        made = channel_of(coding, name, shape, dtype, plan.seed, plan.keep, plan.samples, self._open)
        if training and isinstance(made, Changes):
            try:
                self._restore(made)
            except Exception as error:
                self._step.fail(error, f"the saved buffer of {name}")
        return made

    def _restore(self, channel: Changes) -> None:
        if (buffer := self._loaded.pop(channel.name, None)) is not None:
            state.check_fit({channel.name: buffer}, [channel])
            channel.buffer.restore(buffer)

    def _open(self, name: str, nbytes: int) -> Memory:
        others = [each.buffer for each in self._changes()]
        return self.plan.place.open(name, self.plan.samples, nbytes, others, self._comm.rank)

    def _check_attached(self) -> None:
        if self._removed:
            raise AttachError(
                "this handle was removed, and torch's own stages are back: call compress again for another"
            )

    def _identity(self) -> dict[str, Any]:
        return {
            "forward": repr(self.plan.forward),
            "keep": repr(self.plan.keep),
            "samples": self.plan.samples,
            "rank": self._comm.rank,
            "size": self._comm.size,
            "seed": self.plan.seed,
            "stages": [stage.stage_index for stage in self._stages],
        }
