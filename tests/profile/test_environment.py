"""What nvidia-smi tells of the GPU, and what is said where it tells nothing."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from zf_profile import environment

NOTHING = {"driver": None, "ecc": None, "clocks": None, "throttle": None}
ANSWER = "580.159.03, Enabled, 1980, 3201, 1980, 3201"


@pytest.fixture
def smi(monkeypatch):
    """A GPU, and an nvidia-smi that answers what it is set to."""
    asked = SimpleNamespace(commands=[], answers={}, code=0)

    def run(command, **_):
        asked.commands.append(command)
        reasons = command[1].split(",")[-1]
        text = asked.answers.get(reasons)
        code = 0 if text is not None else 2
        return SimpleNamespace(stdout=f"{text or 'not a valid field'}\n", returncode=code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(uuid="01234567-89ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_clocks_and_reasons(smi):
    smi.answers["clocks_event_reasons.active"] = f"{ANSWER}, 0x0000000000000024"
    assert environment.gpu_state() == {
        "driver": "580.159.03",
        "ecc": "Enabled",
        "clocks": {
            "sm_mhz": 1980,
            "memory_mhz": 3201,
            "sm_max_mhz": 1980,
            "memory_max_mhz": 3201,
        },
        "throttle": ["sw_power_cap", "sw_thermal_slowdown"],
    }
    (command,) = smi.commands
    assert command[0] == "nvidia-smi"
    assert command[-1] == "--id=GPU-01234567-89ab"


def test_no_reason_is_an_empty_list(smi):
    smi.answers["clocks_event_reasons.active"] = f"{ANSWER}, 0x0000000000000000"
    assert environment.gpu_state()["throttle"] == []


def test_older_drivers(smi):
    smi.answers["clocks_throttle_reasons.active"] = f"{ANSWER}, 0x0000000000000001"
    assert environment.gpu_state()["throttle"] == ["gpu_idle"]
    smi.answers = {"clocks.max.mem": ANSWER}
    state = environment.gpu_state()
    assert state["throttle"] is None
    assert state["clocks"]["sm_mhz"] == 1980


def test_what_the_driver_does_not_tell(smi):
    smi.answers["clocks_event_reasons.active"] = "580.1, [N/A], [Not Supported], 3201, 1, 2, [N/A]"
    state = environment.gpu_state()
    assert (state["driver"], state["ecc"], state["throttle"]) == ("580.1", None, None)
    assert state["clocks"]["sm_mhz"] is None
    assert state["clocks"]["memory_mhz"] == 3201


def test_an_nvidia_smi_that_fails(smi):
    assert environment.gpu_state() == NOTHING


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no"), subprocess.TimeoutExpired("x", 20)])
def test_no_nvidia_smi(smi, monkeypatch, error):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert environment.gpu_state() == NOTHING


def test_no_gpu_asks_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*_, **__):
        raise AssertionError("nvidia-smi was asked")

    monkeypatch.setattr(environment, "_ask_driver", run)
    assert environment.gpu_state() == NOTHING
    assert NOTHING.items() <= environment.environment().items()
