"""Methods from papers, one file per paper, each composed of the library's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from laconic.core import spec
from laconic.core.codec import Codec
from laconic.core.lazy import name_makers
from laconic.core.selector import Selector
from laconic.exchange.method import Paper
from laconic.reducers import Reducer
from laconic.strategies.strategy import Strategy

if TYPE_CHECKING:
    from laconic.methods.adam import adam as adam
    from laconic.methods.auto import auto as auto
    from laconic.methods.bf16 import bf16 as bf16
    from laconic.methods.by_name import by_name as by_name
    from laconic.methods.by_size import by_size as by_size
    from laconic.methods.cgx import cgx as cgx
    from laconic.methods.comp_ams import comp_ams as comp_ams
    from laconic.methods.demo import demo as demo
    from laconic.methods.dgc import dgc as dgc
    from laconic.methods.dhqc import dhqc as dhqc
    from laconic.methods.dion2 import dion2 as dion2
    from laconic.methods.ef21_sgdm import ef21_sgdm as ef21_sgdm
    from laconic.methods.error_fed import error_fed as error_fed
    from laconic.methods.fastsgd import fastsgd as fastsgd
    from laconic.methods.fp16 import fp16 as fp16
    from laconic.methods.lgc import lgc as lgc
    from laconic.methods.onebit_adam import onebit_adam as onebit_adam
    from laconic.methods.qcmd_adagrad import qcmd_adagrad as qcmd_adagrad
    from laconic.methods.qrda_adagrad import qrda_adagrad as qrda_adagrad
    from laconic.methods.signum import signum as signum
    from laconic.methods.sketchml import sketchml as sketchml
    from laconic.methods.sparse_adam import sparse_adam as sparse_adam
    from laconic.methods.stc import stc as stc
    from laconic.methods.terngrad import terngrad as terngrad
    from laconic.methods.zero_one_adam import zero_one_adam as zero_one_adam

__all__ = [
    "adam",
    "auto",
    "bf16",
    "by_name",
    "by_size",
    "catalogue",
    "cgx",
    "comp_ams",
    "demo",
    "dgc",
    "dhqc",
    "dion2",
    "ef21_sgdm",
    "error_fed",
    "fastsgd",
    "fp16",
    "lgc",
    "onebit_adam",
    "qcmd_adagrad",
    "qrda_adagrad",
    "signum",
    "sketchml",
    "sparse_adam",
    "stc",
    "terngrad",
    "zero_one_adam",
]

name_makers(__name__)


def catalogue() -> dict[str, Callable[..., Any]]:
    """Return the constructors that `distribute` accepts, by name; `compress` accepts all but strategies.

    >>> [name for name in catalogue() if name in ("dgc", "golomb", "local_sgd", "topk")]
    ['dgc', 'local_sgd', 'topk']
    """
    makers = {name: spec.find(name) for name in spec.names()}
    return {name: make for name, make in makers.items() if _fits(make)}


def _fits(make: Callable[..., Any]) -> bool:
    if isinstance(make, Paper):
        return True
    return isinstance(make, type) and issubclass(make, (Codec, Selector, Reducer, Strategy))
