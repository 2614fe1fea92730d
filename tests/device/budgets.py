"""Budgets of waits and launches per bucket, and present limits, which are not to rise.

A limit is the largest count of 1, 54 and 161 matrices and 2 and 8 ranks, with Triton, whose interpreter is
slow, of 1 and 3 matrices: docs/gpu.md has more, at most 6 launches above. Where it is above the budget, the
method does not meet it yet. In plain torch the budget of launches is out of reach of methods that round at
random: it is that of the Triton kernels.
"""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """Waits in the communication thread, and launches, of one bucket.

    `launches` leaves out the additions of sparse messages, one for each rank.
    """

    waits: int
    launches: int


BUDGETS = {
    "dgc": Counts(2, 40),
    "qsgd": Counts(2, 40),
    "cgx": Counts(2, 25),
    "powersgd": Counts(2, 16),  # for each shape of matrix
    "terngrad": Counts(2, 40),
    "onebit_adam": Counts(2, 40),
    "FSDP2 cgx": Counts(2, 25),
}

LIMITS = {
    "triton": {
        "dgc": Counts(3, 27),
        "qsgd": Counts(2, 12),
        "cgx": Counts(2, 18),
        "powersgd": Counts(2, 19),
        "terngrad": Counts(2, 20),
        "onebit_adam": Counts(3, 35),
        "FSDP2 cgx": Counts(1, 15),
    },
    "reference": {
        "dgc": Counts(6, 169),
        "qsgd": Counts(4, 1052),
        "cgx": Counts(2, 162),
        "powersgd": Counts(2, 54),
        "terngrad": Counts(3, 628),
        "onebit_adam": Counts(3, 641),
        "FSDP2 cgx": Counts(1, 100),
    },
}

SPREAD = 12  # launches: uneven pieces can need another kernel

# Of methods without a separate budget, in plain torch.
OTHERS_WAITS, OTHERS_LAUNCHES = 13, 430
GROWTH = 80  # launches: a few for each rank's message
