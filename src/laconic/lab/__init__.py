"""Several emulated hosts on one Linux machine, with links as slow as you like: see `docs/lab.md`."""

from laconic.lab.lab import Lab as Lab
from laconic.lab.lab import missing as missing
from laconic.lab.link import Link as Link
from laconic.lab.profiles import PROFILES as PROFILES
from laconic.lab.profiles import Profile as Profile
from laconic.lab.profiles import profile as profile

__all__ = ["PROFILES", "Lab", "Link", "Profile", "missing", "profile"]
