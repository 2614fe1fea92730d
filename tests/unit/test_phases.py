"""What `stats().phases` calls the parts of an exchange is explained where `Stats` is."""

from __future__ import annotations

import re
from pathlib import Path

import laconic
from laconic.exchange.stats import Stats

NAMED = re.compile(r'\.phase\(f?"([a-z ]+)')


def test_every_named_phase_is_explained() -> None:
    files = Path(laconic.__file__).parent.rglob("*.py")
    names = {name.strip() for path in files for name in NAMED.findall(path.read_text())}
    assert {"gossip", "leader", "sparse gradients", "parameters"} <= names
    unexplained = {name for name in names if f'"{name}' not in (Stats.__doc__ or "")}
    assert not unexplained
