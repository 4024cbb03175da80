"""What ``bench`` measures: the launch functions of zf_cute, and pools of pages for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zf_cute.config import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pool:
    """The pages of one layer.

    Attributes
    ----------
    kv : LayerPages
        Bytes and places.
    state : PageState
        ``written``, ``sealed`` and ``refused``.
    """

    kv: Any
    state: Any


class Backend(Protocol):
    """Functions to measure, as `zf_cute.launch` has them, and where they run."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""

    @property
    def launch(self) -> Any:
        """Holds ``append``, ``encode`` and ``decode_pages``."""

    @property
    def operators(self) -> Any:
        """Holds the same as torch operators, or None."""

    def new_pool(self, shape: KVShape, num_pages: int) -> Pool:
        """Pages of one layer, raw and empty."""

    def compiled(self) -> int:
        """How many kernels have been compiled in this process."""


class Kernels:
    """The kernels, on torch's current CUDA device."""

    def __init__(self) -> None:
        """Import what launches them."""
        import torch

        from zf_cute import launch, operators

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.launch: Any = launch
        self.operators: Any = operators

    def new_pool(self, shape: KVShape, num_pages: int) -> Pool:
        """Layer 0 of a new store."""
        from zf_cute import PageStore

        store = PageStore(shape, num_pages, device=self.device)
        return Pool(store.layer(0), store.state(0))

    def compiled(self) -> int:
        """Number of compile keys that `zf_cute.compile` holds kernels for."""
        from zf_cute.compile import compiled_keys

        return len(compiled_keys())
