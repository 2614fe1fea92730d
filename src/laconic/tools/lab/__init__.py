"""Emulated hosts on one Linux machine: see `docs/lab.md`."""

from laconic.tools.lab.lab import Lab as Lab
from laconic.tools.lab.lab import missing as missing
from laconic.tools.lab.link import Link as Link
from laconic.tools.lab.profiles import PROFILES as PROFILES
from laconic.tools.lab.profiles import Profile as Profile
from laconic.tools.lab.profiles import profile as profile

__all__ = ["PROFILES", "Lab", "Link", "Profile", "missing", "profile"]
