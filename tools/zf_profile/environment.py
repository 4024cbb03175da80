"""Where a result was made: versions, GPU and git commit, for the JSON documents of results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = {
    "zf_cute": "zf_cute",
    "torch": "torch",
    "dsl": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "cuda_python": "cuda-python",
}


def version(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the checkout this runs from, with ``-dirty`` if it was changed, or None.

    The environment variable ``ZF_COMMIT`` names it where the files are a copy without history.
    """
    if os.environ.get("ZF_COMMIT"):
        return os.environ["ZF_COMMIT"]
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        tracked = subprocess.run(
            [*command[:3], "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=10,
        )
        if tracked.returncode:
            return None  # installed in a folder that merely lies inside some checkout
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def gpu() -> dict[str, Any]:
    """Name, compute capability and driver-side CUDA of the current GPU; nulls without one."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None, "sm": None, "cuda": torch.version.cuda}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "sm": f"{properties.major}{properties.minor}",
        "cuda": torch.version.cuda,
    }


def environment() -> dict[str, Any]:
    """Build the ``env`` object of a JSON document."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        **{key: version(name) for key, name in PACKAGES.items()},
        **gpu(),
        "git": git_commit(),
    }
