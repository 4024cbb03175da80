"""What tells one compiled kernel from another: a value of plain ints, strings and bools.

A key is looked up in a table, so it holds nothing that could change its hash or never equal itself:
no tensors, no devices, no streams, nothing read from the environment.
Importing this needs the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from zf_cute.errors import UnsupportedError

ARCHS = ("sm_90a",)
INDEX_NAMES = {"int32": "i32", "int64": "i64"}

_TYPES = (
    ("kernel", str),
    ("head_dim", int),
    ("rope", str),
    ("index", str),
    ("vectors", bool),
    ("arch", str),
    ("line_info", bool),
)


@dataclass(frozen=True, slots=True)
class CompileKey:
    """One variant of one kernel.  Lengths, strides and batch sizes are run-time arguments.

    Parameters
    ----------
    kernel : str
        Which kernel: a name in `zf_cute.kernels.catalog.KERNELS`.
    head_dim : int
        64, 128 or 256; 0 where the kernel does not depend on it.
    rope : str
        "half" or "interleaved"; "" where it does not matter.
    index : str
        Dtype of slots or page ids: "int32" or "int64".
    vectors : bool
        Whether rows are dense along head_dim and aligned to 16 bytes.
    arch : str
        What to compile for: "sm_90a".
    line_info : bool
        Whether the code names its source lines, for Nsight Compute.  Compiled apart, so that what
        is timed is never what is traced.

    Raises
    ------
    TypeError
        Names the field that is not exactly of its type: a tensor, a NumPy integer, a bool for an
        int.  Such a key would be compiled anew at every call.
    UnsupportedError
        Names what a field may be.
    """

    kernel: str
    head_dim: int = 0
    rope: str = ""
    index: str = "int64"
    vectors: bool = True
    arch: str = "sm_90a"
    line_info: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no key."""
        for field, wanted in _TYPES:
            found = type(getattr(self, field))
            if found is not wanted:
                raise TypeError(
                    f"CompileKey.{field} is a {found.__module__}.{found.__qualname__}; exactly "
                    f"{wanted.__name__} is wanted, so that equal keys are one compile"
                )
        if self.index not in INDEX_NAMES:
            raise UnsupportedError(f"index={self.index!r}: choose 'int32' or 'int64'")
        if self.arch not in ARCHS:
            raise UnsupportedError(
                f"arch={self.arch!r}: kernels are compiled for {', '.join(ARCHS)} (H100, H200)"
            )
        # Both become part of a symbol and of a file's name.
        if not (self.kernel.isidentifier() and self.kernel.isascii()):
            raise UnsupportedError(f"kernel={self.kernel!r} is no kernel's name")
        if self.head_dim < 0 or not (self.rope + "_").isidentifier() or not self.rope.isascii():
            raise UnsupportedError(
                f"head_dim={self.head_dim}, rope={self.rope!r}: head_dim is 64, 128 or 256, or 0; "
                "rope 'half', 'interleaved' or ''"
            )

    @property
    def name(self) -> str:
        """Name of the kernel's entry in PTX and in profilers: ``zf_append_d128_half_i64``.

        Tells all variants for one `arch` apart; code with line info has the name of the code
        without, so that one profiler filter finds both.
        """
        parts = ["zf", self.kernel]
        if self.head_dim:
            parts.append(f"d{self.head_dim}")
        if self.rope:
            parts.append(self.rope)
        parts.append(INDEX_NAMES[self.index])
        if not self.vectors:
            parts.append("rows")
        return "_".join(parts)
