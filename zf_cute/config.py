"""The shape of a model's KV cache: what every other object is built from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zf_cute.errors import UnsupportedError
from zf_layouts import PageLayout, Rope


@dataclass(frozen=True)
class KVShape:
    """Attention shape of a model on one GPU, and how its pages are laid out.

    Parameters
    ----------
    num_layers : int
        Layers that keep a KV cache.
    num_qo_heads : int
        Query (and output) heads; a multiple of `num_kv_heads`.
    num_kv_heads : int
        Key/value heads.
    head_dim : int
        64, 128 or 256.
    page_size : int
        Tokens in a page: 16 (default), 32 or 64.
    rope : {"half", "interleaved"}
        Dims that the model rotates together: i with i + head_dim / 2 (default), or 2i with 2i + 1.
        Changes only which dims share a block, never the result.
    max_exceptions : int
        Values outside its window that a compressed block may have, 0 to 4 (default).  0 is the
        ZipFusion paper's format.
    heads_per_span : int
        KV heads that are stored, and copied, together; 0 (default) chooses, and
        ``layout.heads_per_span`` says what.

    Raises
    ------
    UnsupportedError
        Names the parameter, its value and what is supported.

    References
    ----------
    layouts/FORMAT.md, section 2: what a reader of pages must know.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    rope: Rope = "half"
    max_exceptions: int = 4
    heads_per_span: int = 0

    def __post_init__(self) -> None:
        """Refuse unsupported shapes at once."""
        for name in ("num_layers", "num_qo_heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UnsupportedError(f"{name}={value!r} must be an int of at least 1")
        _ = self.layout  # raises if the format cannot hold the shape
        if self.num_qo_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"num_qo_heads={self.num_qo_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}: every KV head serves the same number of "
                "query heads"
            )

    @cached_property
    def layout(self) -> PageLayout:
        """Where every value of a page lies (zf_layouts)."""
        try:
            return PageLayout(
                self.num_kv_heads,
                self.head_dim,
                self.page_size,
                self.rope,
                self.max_exceptions,
                self.heads_per_span,
            )
        except ValueError as error:
            raise UnsupportedError(str(error)) from None

    @property
    def gqa_group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def bf16_token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers, as plain BF16 without metadata."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim
