"""Fixtures of the tests of the terminal tool."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from profile_tool import Ran


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the tool in this process."""

    def run(*words: object) -> Ran:
        from zf_profile.cli import main

        try:
            code: Any = main([str(word) for word in words])
        except SystemExit as left:
            code = left.code
        printed = capsys.readouterr()
        return Ran(int(code), printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def demo_document() -> dict[str, Any]:
    """What ``demo --json -`` writes, run once."""
    from zf_profile.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["demo", "--json", "-"]) == 0
    document = json.loads(out.getvalue())
    assert isinstance(document, dict)
    return document
