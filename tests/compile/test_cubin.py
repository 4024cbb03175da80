"""What is read from a cubin is what ptxas says of it, spills included."""

import contextlib
import re
import struct

import pytest
from toy_kernels import SMEM_WORDS

from zf_cute import compile as compiler
from zf_cute import cubin
from zf_cute.compile import inspect_kernel
from zf_cute.compile_key import CompileKey


@pytest.fixture(scope="module")
def toy():
    """Cubin of the toy kernel."""
    with pytest.MonkeyPatch.context() as patch:
        from toy_kernels import KERNELS

        patch.setattr("zf_cute.kernels.catalog.KERNELS", dict(KERNELS))
        return inspect_kernel(CompileKey("toy"))


def ptxas(key, folder, capsys):
    """(registers, stack frame, spill stores) that ptxas prints, and what its cubin says."""
    capsys.readouterr()
    made = compiler._compile(key, f"--keep-cubin --dump-dir {folder} remarks{{ptx}}")
    said = " ".join(capsys.readouterr().err.split())
    numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    (found,) = cubin.read(made.__cubin__).values()
    return (int(registers[1]), int(numbers[1]), int(numbers[2])), found


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("name", "spills", "frame"), [("toy", 0, 0), ("spill", 1, 1), ("local", 0, 1)]
)
def test_registers_and_frame_are_those_of_ptxas(name, spills, frame, tmp_path, capsys):
    key = CompileKey(name)
    (registers, frame_bytes, spill_stores), found = ptxas(key, tmp_path, capsys)
    assert (spill_stores > 0, frame_bytes > 0) == (bool(spills), bool(frame))
    assert (found.registers, found.local_bytes) == (registers, frame_bytes)
    report = inspect_kernel(key)
    assert (report.registers, report.spill_bytes) == (registers, frame_bytes)
    assert (".local" in report.ptx) == (name == "local")


def test_numbers_of_our_largest_kernel(kernel_reports, tmp_path, capsys):
    key = CompileKey("encode")
    (registers, frame_bytes, spill_stores), _ = ptxas(key, tmp_path, capsys)
    report = kernel_reports(key)
    assert report.registers == registers
    assert report.spill_bytes == frame_bytes == spill_stores == 0


def test_shared_memory_is_what_the_launch_asks_for(toy):
    assert toy.smem_bytes == 4 * SMEM_WORDS
    (found,) = cubin.read(toy.cubin).values()
    assert found.smem_bytes == 0  # 1024 bytes in the file, which CUDA keeps for itself


def test_static_shared_memory(toy):
    """A section of 1024 + 112 bytes, as ptxas writes for an array of 100 bytes."""
    changed = bytearray(toy.cubin)
    (table,) = struct.unpack_from("<Q", changed, 0x28)
    size, count = struct.unpack_from("<HH", changed, 0x3A)
    names = [section.name for section in cubin._sections(toy.cubin)]
    assert len(names) == count
    (index,) = (i for i, name in enumerate(names) if name == f".nv.shared.{toy.name}_0")
    struct.pack_into("<Q", changed, table + index * size + 0x20, 1024 + 112)
    (found,) = cubin.read(bytes(changed)).values()
    assert found.smem_bytes == 112


def test_code_is_that_of_the_section(toy):
    (found,) = cubin.read(toy.cubin).values()
    assert found.entry == f"{toy.name}_0"
    assert found.code_bytes == toy.code_bytes > 0
    assert found.code_bytes % 128 == 0


def test_what_is_no_cubin(toy):
    for data in (b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(100), toy.ptx.encode()):
        with pytest.raises(ValueError, match="no cubin"):
            cubin.read(data)


def test_a_cubin_that_ends_early(toy):
    (table,) = struct.unpack_from("<Q", toy.cubin, 0x28)
    for length in range(6, table, 61):
        with pytest.raises(ValueError, match="ends early or is damaged"):
            cubin.read(toy.cubin[:length])


def test_damage_is_a_value_error_or_harmless(toy):
    for at in range(6, len(toy.cubin), 13):
        changed = bytearray(toy.cubin)
        changed[at] ^= 0xFF
        with contextlib.suppress(ValueError):
            cubin.read(bytes(changed))
