"""ADMM quantisation to a table: weights of 1 to 3 bits with scales."""

from laconic.lowbit.tables.admm import Admm as Admm
from laconic.lowbit.tables.admm import admm as admm
from laconic.lowbit.tables.packing import Size as Size
from laconic.lowbit.tables.packing import load_tables as load_tables
from laconic.lowbit.tables.straight_through import StraightThrough as StraightThrough
from laconic.lowbit.tables.straight_through import straight_through as straight_through
