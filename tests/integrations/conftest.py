"""These tests need Lightning, Accelerate and transformers, and run in an environment of their own:
`make test-integrations`.

Warnings are errors here as everywhere. Those that the libraries raise about themselves are not ours to mend.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """`pool.run(size, function, *args)` calls a function of the test's module on `size` ranks."""
    pool = Pool()
    yield pool
    pool.close()
