"""What all tests share: the real KV sample, bitwise equality, seeds, and why a test is skipped.

Helper modules of the tests (`bits`, `format.format_decoder`) are imported from this folder, which
pytest puts on the path because this file lies in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch starts its threads: by default they spin while they wait, and on a busy machine with
# few cores that makes small operations take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import bits
import hypothesis
import pytest
import torch
from safetensors.torch import load_file

REAL_KV = Path(__file__).parents[1] / "tools" / "zf_profile" / "data" / "real_kv.safetensors"

# No deadline: the first example of a test pays for tables and compilers.  The same examples each
# time and no database, so that a run depends on the code alone.
hypothesis.settings.register_profile(
    "zf",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("zf")


def pytest_configure(config: pytest.Config) -> None:
    """Two threads: results do not depend on their number, and CI machines have few cores."""
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no SM90 device, and name what is missing."""
    missing = _missing_device()
    if missing:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=missing))


def _missing_device() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device: torch.cuda.is_available() is False; these tests need an SM90 GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"no SM90 device: {torch.cuda.get_device_name()} is SM{major}{minor}"
    return None


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(20240806)


@pytest.fixture(scope="session")
def real_kv() -> dict[str, torch.Tensor]:
    """Keys, values and queries of two language models: ``model/layerN/k`` and so on, bfloat16."""
    return load_file(REAL_KV)


@pytest.fixture(scope="session")
def same_bits() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """`bits.same_bits`, for tests that need nothing else of the module."""
    return bits.same_bits
