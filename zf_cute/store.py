"""PageStore: the byte pool of a KV cache, and what is done to its pages.

Every (layer, page) has a home of `PageLayout.page_stride` bytes, enough for it raw.  A page starts
raw; `append` writes tokens straight to where attention reads them; `seal` encodes a full page in
place, and `clear` makes it raw and empty again.  A page id means the same tokens in every layer.
Sealing shrinks what attention reads; lending the freed bytes to other pages is a cache manager's
work, and this store does not do it.

Two backends write the same bytes.  "kernels" runs on SM90 GPUs: append, seal, read and clear do not
wait for the device if page ids are there (a list is copied, which does).  What tensors hold (slots,
page ids, the state of pages) is checked on the device, and what is wrong is left alone and counted
until `check` raises for it.  "reference" is torch on any device: it looks at everything
on the host first, and a call that raises has changed nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import ModuleType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from zf_cute import launch, operators, reference
from zf_cute.checks import INDEX_DTYPES, check_device, check_distinct
from zf_cute.config import KVShape
from zf_cute.errors import ArgumentError, PageStateError, UnsupportedError
from zf_cute.kernels.refusals import Refusal
from zf_cute.pages import LayerPages, PageState
from zf_cute.reference import writing
from zf_layouts.page import SPAN_ALIGNMENT

PageIds: TypeAlias = "Tensor | Iterable[int] | int"
"""Page ids: an integer tensor on any device, an iterable of ints, or one int."""


class PageStore:
    """The pages of all layers, raw and sealed, in one pool of bytes.

    Parameters
    ----------
    shape : KVShape
        The model's attention shape and the page layout.
    num_pages : int
        Page ids run from 0 to num_pages - 1 in every layer.
    device : str or torch.device
        Where the pool lies: "cpu" (default) or a CUDA device.
    backend : {"auto", "kernels", "reference"}
        "auto" (default) is "kernels" where they can run, and "reference" elsewhere.  The attribute
        `backend` says which it became.

    Attributes
    ----------
    pool : Tensor
        [num_layers * num_pages * page_stride] uint8.
    places : Tensor
        [num_layers, num_pages, spans, 2] int32 (read as u32): start of each span in units of 128
        bytes from the pool's first byte, and its length in bytes.

    Raises
    ------
    UnsupportedError
        For a number of pages below 1, a pool past the 512 GiB that places reach, or a device that
        torch cannot use here, or that cannot run the kernels asked for.

    References
    ----------
    layouts/FORMAT.md, section 3, for places and raw pages; ZipFusion (arXiv 2610.33719) for pages
    that stay raw until they are full.
    """

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        *,
        device: str | torch.device = "cpu",
        backend: Literal["auto", "kernels", "reference"] = "auto",
    ) -> None:
        """Allocate the pool and write the metadata of empty raw pages."""
        if not isinstance(shape, KVShape):
            raise ArgumentError(f"shape is a {type(shape).__name__}; a KVShape is wanted")
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise UnsupportedError(f"num_pages={num_pages!r} must be an int of at least 1")
        pool_bytes = shape.num_layers * num_pages * shape.layout.page_stride
        if pool_bytes > SPAN_ALIGNMENT << 32:
            raise UnsupportedError(
                f"num_pages={num_pages} of {shape.num_layers} layers take {pool_bytes >> 30} GiB; "
                "places reach 512 GiB"
            )
        self.device = check_device(device)
        self.backend = _choose(backend, self.device)
        self.shape = shape
        self.num_pages = num_pages
        # Inference tensors could not be written outside inference_mode, where engines allocate.
        with torch.inference_mode(False):
            self._allocate(pool_bytes)

    def _allocate(self, pool_bytes: int) -> None:
        layout, device = self.shape.layout, self.device
        grid = (self.shape.num_layers, self.num_pages, layout.spans)
        homes = pool_bytes // layout.span_stride
        self.pool = torch.empty(pool_bytes, dtype=torch.uint8, device=device)
        start = torch.arange(homes, device=device) * (layout.span_stride // SPAN_ALIGNMENT)
        length = torch.full_like(start, layout.raw_span_bytes)
        self._raw_places = torch.stack([start, length], 1).to(torch.int32).view(*grid, 2)
        self.places = self._raw_places.clone()
        metadata = writing.raw_metadata(layout, device)
        self._homes[..., : layout.metadata_bytes] = metadata
        # Bit t of a page: slot t has been written.  A page holds at most 64 tokens.
        self._written = torch.zeros(grid[:2], dtype=torch.int64, device=device)
        self._sealed = torch.zeros(grid, dtype=torch.int32, device=device)
        self._claimed = torch.zeros(grid[:2], dtype=torch.int32, device=device)
        self._refused = torch.zeros(len(Refusal), dtype=torch.int32, device=device)
        self._layers = [self._views(layer) for layer in range(self.shape.num_layers)]

    def _views(self, layer: int) -> tuple[LayerPages, PageState]:
        kv = LayerPages(self.pool, self.places[layer], self.shape.layout)
        state = PageState(
            self._written[layer],
            self._sealed[layer],
            self._claimed[layer],
            self._raw_places[layer],
            self._refused,
            layer,
        )
        return kv, state

    def __getstate__(self) -> dict[str, object]:
        """Leave out the views: pickle would make tensors of their own of them."""
        return {name: value for name, value in vars(self).items() if name != "_layers"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Make the views anew."""
        vars(self).update(state)
        self._layers = [self._views(layer) for layer in range(self.shape.num_layers)]

    @property
    def _homes(self) -> Tensor:
        """[num_layers, num_pages, spans, span_stride] view of the pool."""
        return self.pool.view(*self.places.shape[:3], self.shape.layout.span_stride)

    @property
    def _kernels(self) -> ModuleType:
        """Where the kernels are called: as torch operators while torch.compile traces."""
        return operators if torch.compiler.is_compiling() else launch

    # ---- reading -------------------------------------------------------------------------------
    def layer(self, layer: int) -> LayerPages:
        """View of a layer's pages, as `BatchAttention.run` takes it.

        The view follows the store: tokens appended and pages sealed later are seen through it.
        """
        self._check_layer(layer)
        return self._layers[layer][0]

    def state(self, layer: int) -> PageState:
        """View of what is known of a layer's pages, as `zf_cute.launch` takes it."""
        self._check_layer(layer)
        return self._layers[layer][1]

    def read(self, layer: int, pages: PageIds) -> tuple[Tensor, Tensor]:
        """Decode pages, raw or sealed.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.
        pages : Tensor, iterable of int, or int
            [n] page ids; may repeat.

        Returns
        -------
        k, v : Tensor
            [n * page_size, num_kv_heads, head_dim] bfloat16, bit for bit what was appended.
            Slots that were never written hold anything, NaN included.

        Raises
        ------
        ArgumentError
            If the layer or a page id is out of range.
        FormatError
            If a page's bytes are none that a writer makes.  The kernels return zeros instead, also
            for ids on the device that are out of range, and `check` raises.
        """
        ids = self._page_ids(layer, pages)
        kv, state = self._layers[layer]
        if self.backend == "kernels":
            k, v = self._kernels.decode_pages(kv, state, ids)
        else:
            k, v = reference.decode_pages(kv, ids)
        return k.flatten(0, 1), v.flatten(0, 1)

    def descriptors(self, layer: int, pages: PageIds) -> Tensor:
        """How each block of some pages is stored.

        Returns
        -------
        Tensor
            [n, num_kv_heads, 2, blocks_per_part] uint8; axis 2 is K, V.  0..127 compressed,
            128..248 with exceptions, 255 raw (FORMAT.md section 5).
        """
        ids = self._page_ids(layer, pages, looked_at=True)
        return reference.read_metadata(self.layer(layer), ids)[0]

    def page_bytes(self, layer: int, pages: PageIds) -> Tensor:
        """[n] int64: bytes of each page, metadata included, before spans are aligned to 128.

        Waits for the device to check the ids; `seal` returns the same without.
        """
        ids = self._page_ids(layer, pages, looked_at=True)
        return (self.places[layer, ids, :, 1].long() & 0xFFFFFFFF).sum(1)

    def is_sealed(self, layer: int, pages: PageIds) -> Tensor:
        """[n] bool: whether each page is sealed.  Waits for the device to check the ids."""
        return self._sealed[layer, self._page_ids(layer, pages, looked_at=True)].all(1)

    def check(self) -> None:
        """Raise for what kernels have refused since the last check; waits for the current stream.

        Raises
        ------
        PageStateError
            Counts of what was left alone, by kind.  The counts start again from zero.
        """
        counts = self._refused.tolist()
        if any(counts):
            self._refused.sub_(torch.tensor(counts, dtype=torch.int32, device=self.device))
            said = [
                f"{count} {_REFUSALS[refusal]}"
                for refusal, count in zip(Refusal, counts, strict=True)
                if count
            ]
            raise PageStateError(
                f"the kernels refused {'; '.join(said)}: nothing was written there, and what was "
                "read is zeros"
            )

    # ---- writing -------------------------------------------------------------------------------
    @torch.no_grad()
    def append(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write new tokens into raw pages.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.
        k, v : Tensor
            [tokens, num_kv_heads, head_dim] bfloat16 on the store's device, any strides.
        slot_mapping : Tensor
            [tokens] int32 or int64 on the store's device: ``page * page_size + offset``, or -1 for
            a token to skip (padding).  A slot of a raw page may be written again; `clear` a page
            before another request uses it.

        Raises
        ------
        UnsupportedError
            If k or v is not bfloat16.
        ArgumentError
            If a shape, dtype or device does not fit, or a slot is out of range or given twice.
        PageStateError
            If a slot lies in a sealed page.  Nothing is written when anything is raised.  The
            kernels leave rows out whose slot is out of range or in a sealed page, and `check`
            raises; where a slot is given twice, any of its values may be either row's.
        """
        self._check_layer(layer)
        kv, state = self._layers[layer]
        backend = self._kernels if self.backend == "kernels" else writing
        backend.append(kv, state, k, v, slot_mapping)

    def seal(self, layer: int, pages: PageIds) -> Tensor:
        """Encode full raw pages in place, losslessly.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.
        pages : Tensor, iterable of int, or int
            [n] page ids, each once.

        Returns
        -------
        Tensor
            [n] int64: bytes of each sealed page, before spans are aligned to 128.

        Raises
        ------
        ArgumentError
            If the layer or a page id is out of range, or an id is given twice.
        PageStateError
            If a page is not full, or sealed already.
        FormatError
            If a page's metadata has been damaged.  Nothing is written when anything is raised.
            With the kernels, pages on the device that must not be sealed stay as they are, their
            size here is 0, and `check` raises; metadata of raw pages is not looked at.
        """
        pages = pages if isinstance(pages, Tensor) else _ints(pages)  # an iterator gives them once
        ids = self._page_ids(layer, pages)
        kv, state = self._layers[layer]
        if self.backend == "kernels":
            if not isinstance(pages, Tensor) or pages.device != self.device:
                check_distinct("pages", torch.as_tensor(pages).flatten())
            return self._kernels.encode(kv, state, ids).sum(1)
        return writing.encode(kv, state, ids).long().sum(1)

    def clear(self, layer: int, pages: PageIds) -> None:
        """Make pages raw and empty again, so that their ids can serve another request.

        Parameters
        ----------
        layer : int
            0 to num_layers - 1.
        pages : Tensor, iterable of int, or int
            [n] page ids.

        Raises
        ------
        ArgumentError
            If the layer or a page id is out of range.
        """
        ids = self._page_ids(layer, pages)
        backend = self._kernels if self.backend == "kernels" else writing
        backend.clear(*self._layers[layer], ids)

    # ---- checks --------------------------------------------------------------------------------
    def _check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ArgumentError(f"layer={layer!r} must be an int")
        if not 0 <= layer < self.shape.num_layers:
            raise ArgumentError(f"layer={layer} is outside 0..{self.shape.num_layers - 1}")

    def _page_ids(self, layer: int, pages: PageIds, *, looked_at: bool = False) -> Tensor:
        """Page ids as a tensor on the device; ids there are `looked_at` only where that is asked.

        The reference backend always does.
        """
        self._check_layer(layer)
        if isinstance(pages, Tensor):
            if pages.dtype not in INDEX_DTYPES:
                raise ArgumentError(f"pages is {pages.dtype}; int32 or int64 is wanted")
            ids = pages.reshape(-1)
            if self.backend == "kernels" and ids.device == self.device and not looked_at:
                return ids
            ids = ids.to(torch.int64)
            outside = ids[(ids < 0) | (ids >= self.num_pages)].tolist()
        else:
            listed = _ints(pages)
            outside = [page for page in listed if not 0 <= page < self.num_pages]
            # An int past 64 bits is outside like any other, but no tensor could hold it.
            ids = torch.tensor([] if outside else listed, dtype=torch.int64, device=self.device)
        if outside:
            raise ArgumentError(
                f"page {outside[0]} is outside 0..{self.num_pages - 1} of layer {layer}"
            )
        return ids.to(self.device)


def _choose(backend: str, device: torch.device) -> Literal["kernels", "reference"]:
    """Backend that a store uses on a device."""
    if backend not in ("auto", "kernels", "reference"):
        raise UnsupportedError(f"backend={backend!r}: choose 'auto', 'kernels' or 'reference'")
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return "reference"
    reason = launch.unsupported(device)
    if reason and backend == "kernels":
        raise UnsupportedError(f"backend='kernels': {reason}. Use 'auto' or 'reference'.")
    return "reference" if reason else "kernels"


_REFUSALS = {
    Refusal.SLOT_OUTSIDE: "rows with a slot out of range (-1 skips a row)",
    Refusal.SLOT_SEALED: "rows with a slot in a sealed page",
    Refusal.PAGE_OUTSIDE: "page ids out of range",
    Refusal.PAGE_NOT_SEALABLE: "pages to seal that are not full, sealed already or given twice",
    Refusal.SPAN_MALFORMED: "parts of pages whose bytes no writer makes",
    Refusal.DESTINATION_OUTSIDE: "pages to seal with a destination outside the pool",
}


def _ints(pages: Iterable[int] | int) -> list[int]:
    """Page ids as a list of ints; numpy's integers are ints, bools are not."""
    try:
        listed = list(pages) if isinstance(pages, Iterable) else [pages]
        if any(isinstance(page, bool) for page in listed):
            raise TypeError
        return [operator.index(page) for page in listed]
    except TypeError:
        raise ArgumentError(f"pages must be ints, not {pages!r:.60}") from None
