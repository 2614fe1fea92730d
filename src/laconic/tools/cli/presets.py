"""Four specs to begin with, shown in README, docs and --help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    spec: str
    when: str


PRESETS = (
    Preset(
        "auto()", "you do not know your link: it compresses only what saves time, and little on a fast one"
    ),
    Preset("cgx()", "you want a safe choice: 4 bits a value, the accuracy of dense training"),
    Preset(
        "stc(density=0.01)",
        "the link is very slow: the sign of one value in a hundred, the rest is kept for later; with SGD and"
        " thousands of steps",
    ),
    Preset(
        "diloco()",
        "machines are far apart: ranks train alone and meet every 100 steps, by `laconic.distribute`; plan"
        " more steps, or a smaller `every=`",
    ),
)
BRIEFLY = (
    'begin with "auto()"; safe: "cgx()"; extreme: "stc(density=0.01)"; without a barrier: "diloco()";'
    " `laconic methods` lists all"
)
