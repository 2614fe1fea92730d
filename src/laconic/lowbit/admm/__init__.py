"""ADMM towards a table: weights of 1 to 3 bits with scales, for recurrent language models above all."""

from laconic.lowbit.admm.attach import admm as admm
from laconic.lowbit.admm.handle import Admm as Admm
from laconic.lowbit.admm.packing import Size as Size
from laconic.lowbit.admm.packing import load_tables as load_tables
from laconic.lowbit.admm.straight_through import StraightThrough as StraightThrough
from laconic.lowbit.admm.straight_through import straight_through as straight_through
