"""Where a result was made: versions, GPU and git commit, for the JSON documents of results."""

from __future__ import annotations

import contextlib
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


_CLOCKS = ("sm_mhz", "memory_mhz", "sm_max_mhz", "memory_max_mhz")
_FIELDS = (
    "driver_version",
    "ecc.mode.current",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
)
THROTTLE = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Why a GPU runs below its highest clocks, by NVML's bit."""


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


def missing_gpu() -> str:
    """Say in a line why kernels cannot run here; "" if they can."""
    import torch

    if torch.version.cuda is None:
        return "no CUDA device: this torch is built without CUDA; kernels run on SM90 (H100, H200)"
    if not torch.cuda.is_available():
        return (
            "no CUDA device: torch finds none; an SM90 GPU (H100, H200) and its driver are needed"
        )
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        name = torch.cuda.get_device_name()
        return f"{name} is sm_{major}{minor}; kernels are for sm_90a (H100, H200)"
    return ""


def gpu_state() -> dict[str, Any]:
    """Driver, clocks in MHz and why they are held back, of the current GPU as nvidia-smi has them.

    Nulls without a GPU or nvidia-smi.
    """
    state: dict[str, Any] = dict.fromkeys(("driver", "ecc", "clocks", "throttle"))
    import torch

    if not torch.cuda.is_available():
        return state
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    # Older drivers know the last field by its older name; one that knows neither has no answer.
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active", None):
        answer = _ask_driver([*_FIELDS, *([reasons] if reasons else [])], uuid)
        if answer is not None:
            break
    else:
        return state
    driver, ecc, *numbers = answer[: len(_FIELDS)]
    state["driver"], state["ecc"] = driver, ecc
    state["clocks"] = dict(zip(_CLOCKS, map(_number, numbers), strict=True))
    if reasons and answer[-1]:
        with contextlib.suppress(ValueError):
            active = int(answer[-1], 16)
            state["throttle"] = [name for bit, name in THROTTLE.items() if active & bit]
    return state


def _ask_driver(fields: list[str], uuid: object) -> list[str | None] | None:
    """Values of nvidia-smi's fields for one GPU, None for those it has none of; or None."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if uuid is not None:
        command.append(f"--id=GPU-{str(uuid).removeprefix('GPU-')}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if done.returncode or len(values) != len(fields):
        return None
    return [None if value.startswith("[") or value == "N/A" else value for value in values]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def environment() -> dict[str, Any]:
    """Build the ``env`` object of a JSON document."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        **{key: version(name) for key, name in PACKAGES.items()},
        **gpu(),
        **gpu_state(),
        "git": git_commit(),
    }
