"""Membership: a strategy's groups, which are recreated after a rank is lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from laconic.comm.comm import Comm
from laconic.comm.joint_calls import Exchanging, JointCalls, unwatched
from laconic.comm.metered import Metered
from laconic.comm.naming import in_store
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import PeerError
from laconic.strategies.membership.average import Agreement
from laconic.strategies.membership.generations import Generations

log = logging.getLogger("laconic")


class Membership:
    """Group `comm` of a strategy and `side_comm` of the same ranks. Called by all ranks of `group`.

    `patience_s`: seconds until a group counts as broken, and `renew` excludes lost ranks. None: the timeout
    of `group`, and a broken group stays broken. `joint_calls`: None once a rank was lost. `start_comm`: with
    the timeout of `group`, as ranks may start at very different times, until `started`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, patience_s: float | None, quorum: int | None = None
    ) -> None:
        self._patience_s = patience_s
        self._quorum = quorum or 1
        self.joint_calls: JointCalls | None = None
        self.heartbeats: Generations | None = None
        with contextlib.ExitStack() as opened:  # closed in reverse order on errors

            def own(timeout: timedelta | None = None) -> TorchComm:
                comm = TorchComm.own(group, timeout)
                opened.callback(comm.close)
                return comm

            timeout = None if patience_s is None else timedelta(seconds=patience_s)
            self._start, side, main = own(), own(timeout), own(timeout)
            self.start_comm: Comm = self._start
            self.side_comm: Comm = side
            self._groups = [side, main]
            self.comm = Metered(main)
            self._parent = main
            self._name = in_store(main.group.group_name)
            self.joint_calls = JointCalls(main, side, survives=patience_s is not None)
            opened.callback(self.joint_calls.close)
            if patience_s is not None:
                store = dist.distributed_c10d._get_default_store()  # has no public name
                self.heartbeats = Generations.of(store, self._name, main.rank, main.size)
                self.heartbeats.hung_after_s = self._start.timeout.total_seconds()
            opened.pop_all()

    @property
    def side_meter(self) -> Metered:
        return self.comm.over(self.side_comm)

    @property
    def regroup_requested(self) -> bool:
        return self.heartbeats is not None and self.heartbeats.regroup_requested

    @property
    def rejoining(self) -> bool:
        return self.heartbeats is not None and self.heartbeats.rejoining

    @property
    def generation(self) -> int:
        return 0 if self.heartbeats is None else self.heartbeats.generation

    @property
    def finishing(self) -> tuple[int, ...]:
        return () if self.heartbeats is None else self.heartbeats.finishing

    @property
    def waited(self) -> bool:
        return self.heartbeats is not None and self.heartbeats.waited

    @property
    def exchanging(self) -> Exchanging:
        return unwatched if self.joint_calls is None else self.joint_calls.exchange

    @property
    def failure(self) -> str:
        return "" if self.joint_calls is None else self.joint_calls.failure

    def started(self) -> None:
        self._start.close()

    @property
    def living(self) -> list[int]:
        return [*range(self._parent.size)] if self.heartbeats is None else [*self.heartbeats.members]

    def renew(self, why: str) -> None:
        """Leave the old groups, which frees ranks that wait in them; create new ones of the living ranks.

        Raises `PeerError` below `quorum` ranks, if this rank is not readmitted, or after repeated failures.
        """
        assert self.heartbeats is not None and self._patience_s is not None
        why_not = ""  # the error would keep a half-made group alive, in which others wait
        joint_calls, self.joint_calls = self.joint_calls, None
        if joint_calls is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # it may be broken
                joint_calls.leave()
        for _ in self._parent.ranks:
            self._leave()
            grace_s, timeout_s = self._patience_s, 60 + 2 * self._patience_s
            members = self.heartbeats.regroup(why, grace_s, timeout_s, self._quorum)
            try:
                self._make(members)
                return
            except (PeerError, RuntimeError) as failed:  # another rank was lost
                why_not = str(failed)
        raise PeerError(f"no new group could be made: {why_not}")

    def tell(self, before: Sequence[int], step: int, agreed: Agreement, fresh: Iterable[str]) -> None:
        assert self.heartbeats is not None
        now = self.living
        lost, back = ([*sorted({*one} - {*other})] for one, other in ((before, now), (now, before)))
        log.warning(
            "rank %d: group %d at step %d is ranks %s; finished: %s; lost: %s; back: %s; why: %s."
            " Model: average of ranks %s. Kept: %s. Reset: %s.",
            self._parent.rank,
            self.generation,
            step,
            now,
            [*self.finishing] or "none",
            sorted({*lost} - {*self.finishing}) or "none",
            back or "none",
            self.heartbeats.why,
            [now[rank] for rank in agreed.averaged],
            _listed(agreed.memory) or "nothing",
            _listed(fresh) or "nothing",
        )

    def _make(self, members: Sequence[int]) -> None:
        assert self.heartbeats is not None
        names = (f"{self._name}/{self.heartbeats.generation}/{which}" for which in ("side", "comm"))
        self._groups = [TorchComm.among(members, name, like=self._parent) for name in names]
        self.side_comm = self._groups[0]
        self.comm = self.comm.over(self._groups[1])

    def _leave(self) -> None:
        for group in self._groups:
            with contextlib.suppress(RuntimeError, ValueError):
                group.close()
        self._groups.clear()

    def abandon(self) -> None:
        if self.heartbeats is not None:
            self.heartbeats.end()
        if self.joint_calls is not None:
            self.joint_calls.close()
        self._leave()

    def close(self) -> None:
        if self.heartbeats is not None:
            self.heartbeats.close()
        self._start.close()
        if self.joint_calls is not None:
            self.joint_calls.close()
        self._leave()


def _listed(names: Iterable[str]) -> str:
    """Return names of memory without the tensors inside.

    >>> _listed(["velocity", "route0/residual/first", "route0/residual/second"])
    'route0/residual, velocity'
    """
    return ", ".join(sorted({"/".join(name.split("/")[:2]) for name in names}))
