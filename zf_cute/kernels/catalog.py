"""Which kernels there are, and how one is made from its key.

A kernel's class lies in a module of its own and is imported when it is first wanted, so that this
module needs neither cutlass nor torch.  Such a class has

``Kernel(key)``         the Python-side constants of one variant
``__call__``            ``@cute.jit``: takes tensors, scalars and last the stream; launches
``kernel``              ``@cute.kernel``: the device code
``arguments()``         stand-ins for the tensors and scalars, to compile with
``variants(arch)``      the keys of all its variants
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from zf_cute.compile_key import ARCHS, CompileKey
from zf_cute.errors import UnsupportedError

KERNELS = {
    "append": "zf_cute.kernels.append:AppendKernel",
    "encode": "zf_cute.kernels.encode:EncodeKernel",
    "decode_pages": "zf_cute.kernels.decode_pages:DecodePagesKernel",
    "clear": "zf_cute.kernels.clear:ClearKernel",
}


def check_name(name: str) -> None:
    """Raise UnsupportedError, which names the known kernels, for another name."""
    if name not in KERNELS:
        raise UnsupportedError(f"kernel={name!r}: choose {', '.join(map(repr, KERNELS))}")


def kernel_class(name: str) -> Any:
    """Class of a kernel."""
    check_name(name)
    module, attribute = KERNELS[name].split(":")
    return getattr(import_module(module), attribute)


def build(key: CompileKey) -> Any:
    """Return the kernel object of a key, ready to be compiled.

    Raises
    ------
    UnsupportedError
        For a key that is none of its kernel's variants: a head_dim that it has not, or a field that
        it does not depend on and that would make the same code twice.
    """
    kernel = kernel_class(key.kernel)
    known = kernel.variants(key.arch)
    if replace(key, line_info=False) not in known:
        raise UnsupportedError(
            f"{key} is no variant of {key.kernel}: 'zf-profile compile --kernel {key.kernel}' "
            f"lists the {len(known)} there are"
        )
    return kernel(key)


def variants(arch: str = "sm_90a") -> tuple[CompileKey, ...]:
    """Keys of every variant of every kernel."""
    if arch not in ARCHS:
        raise UnsupportedError(f"arch={arch!r}: kernels are compiled for {', '.join(ARCHS)}")
    return tuple(key for name in KERNELS for key in kernel_class(name).variants(arch))
