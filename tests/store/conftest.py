"""Fixtures of the store tests."""

from __future__ import annotations

import pytest
from store.small_store import (
    PAGES,
    SHAPE,
    poisoned,
)

from zf_cute import (
    PageStore,
)


@pytest.fixture
def store() -> PageStore:
    """Two layers of six empty pages over NaN."""
    return poisoned(PageStore(SHAPE, PAGES))
