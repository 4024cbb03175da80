"""Fixtures of the tests of the terminal tool."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from profile_tool import Ran
from safetensors.torch import save_file


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


@pytest.fixture
def measure(tool, tmp_path):
    """Save tensors, run the command with ``--json -`` and return its document."""

    def run(content, *words, name="kv.safetensors"):
        path = content if isinstance(content, os.PathLike) else tmp_path / name
        if path is not content:
            save = save_file if name.endswith(".safetensors") else torch.save
            save(content, path)
        ran = tool("ratio", path, *words, "--json", "-")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    return run
