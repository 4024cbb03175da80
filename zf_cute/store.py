"""PageStore: the byte pool of a KV cache, and what is done to its pages.

Every (layer, page) has a home of `PageLayout.page_stride` bytes, enough for it raw.  A page starts
raw; `append` writes tokens straight to where attention reads them; `seal` encodes a full page in
place, and `clear` makes it raw and empty again.  A page id means the same tokens in every layer.
Sealing shrinks what attention reads; lending the freed bytes to other pages is a cache manager's
work, and this store does not do it.

Operations check everything before they write anything: a call that raises one of zf_cute's errors
has changed nothing.
What a tensor holds (slots, page ids, the state of pages) is checked on the host, so the reference
backend waits for the device.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from zf_cute import reference
from zf_cute.checks import check_device, check_tensor
from zf_cute.config import KVShape
from zf_cute.errors import ArgumentError, FormatError, PageStateError, UnsupportedError
from zf_cute.pages import LayerPages
from zf_layouts import PARTS
from zf_layouts.page import SPAN_ALIGNMENT

PageIds: TypeAlias = "Tensor | Iterable[int] | int"
"""Page ids: an integer tensor on any device, an iterable of ints, or one int."""

_VALUES_AT_ONCE = 1 << 22
"""Values sealed at a time: bounds the working memory to about 200 MB."""


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
        torch cannot use here.

    References
    ----------
    layouts/FORMAT.md, section 3, for places and raw pages; ZipFusion (arXiv 2610.33719) for pages
    that stay raw until they are full.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, *, device: str | torch.device = "cpu"
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
        metadata = list(layout.raw_metadata())
        self._raw_metadata = torch.tensor(metadata, dtype=torch.uint8, device=device)
        self._homes[..., : layout.metadata_bytes] = self._raw_metadata
        # Bit t of a page: slot t has been written.  A page holds at most 64 tokens.
        self._written = torch.zeros(grid[:2], dtype=torch.int64, device=device)
        self._sealed = torch.zeros(grid[:2], dtype=torch.bool, device=device)
        self._raw_words = self._words_of_raw_pages()

    @property
    def _homes(self) -> Tensor:
        """[num_layers, num_pages, spans, span_stride] view of the pool."""
        return self.pool.view(*self.places.shape[:3], self.shape.layout.span_stride)

    def _words_of_raw_pages(self) -> Tensor:
        """[page_size, 2, num_kv_heads, head_dim] int64: a value's 16-bit word in a raw page.

        Counted from the page's home; axis 1 is K, V.
        """
        layout = self.shape.layout
        word = torch.tensor(
            [
                [
                    [layout.raw_byte(0, part, token, dim) // 2 for dim in range(layout.head_dim)]
                    for part in PARTS
                ]
                for token in range(layout.page_size)
            ],
            device=self.device,
        )
        head = torch.arange(layout.num_kv_heads, device=self.device)
        span, in_span = head // layout.heads_per_span, head % layout.heads_per_span
        # K and V of a head are neighbours: two raw parts a head.
        home = (span * layout.span_stride + in_span * 2 * layout.raw_part_bytes) // 2
        return word[:, :, None] + home.view(1, 1, -1, 1)

    # ---- reading -------------------------------------------------------------------------------
    def layer(self, layer: int) -> LayerPages:
        """View of a layer's pages, as `BatchAttention.run` takes it.

        The view follows the store: tokens appended and pages sealed later are seen through it.
        """
        self._check_layer(layer)
        return LayerPages(self.pool, self.places[layer], self.shape.layout)

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
            If a page's bytes are none that a writer makes.
        """
        ids = self._page_ids(layer, pages)
        k, v = reference.decode_pages(self.layer(layer), ids)
        return k.flatten(0, 1), v.flatten(0, 1)

    def descriptors(self, layer: int, pages: PageIds) -> Tensor:
        """How each block of some pages is stored.

        Returns
        -------
        Tensor
            [n, num_kv_heads, 2, blocks_per_part] uint8; axis 2 is K, V.  0..127 compressed,
            128..248 with exceptions, 255 raw (FORMAT.md section 5).
        """
        ids = self._page_ids(layer, pages)
        return reference.read_metadata(self.layer(layer), ids)[0]

    def page_bytes(self, layer: int, pages: PageIds) -> Tensor:
        """[n] int64: bytes of each page, metadata included, before spans are aligned to 128."""
        ids = self._page_ids(layer, pages)
        return (self.places[layer, ids, :, 1].long() & 0xFFFFFFFF).sum(1)

    def is_sealed(self, layer: int, pages: PageIds) -> Tensor:
        """[n] bool: whether each page is sealed."""
        return self._sealed[layer, self._page_ids(layer, pages)]

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
            If a slot lies in a sealed page.  Nothing is written when anything is raised.
        """
        self._check_layer(layer)
        layout, page_size = self.shape.layout, self.shape.page_size
        for name, x in (("k", k), ("v", v)):
            self._check_rows(name, x)
        if k.shape != v.shape:
            raise ArgumentError(f"k has {len(k)} tokens and v {len(v)}")
        slots = self._slots(slot_mapping, len(k))
        kept = torch.nonzero(slots >= 0).flatten()
        slots = slots[kept]
        if not len(kept):
            return
        pages, offsets = slots // page_size, slots % page_size
        blocked = self._sealed[layer, pages]
        if blocked.any():
            raise PageStateError(
                f"page {int(pages[blocked][0])} of layer {layer} is full and sealed: give new "
                "tokens a new page, or clear(layer, pages) to use its id again"
            )
        # Word of each value: the page's home, then its place in a raw page.
        home = (layer * self.num_pages + pages) * (layout.page_stride // 2)
        words = self._raw_words[offsets] + home[:, None, None, None]
        rows = torch.stack([k[kept], v[kept]], 1).view(torch.int16)
        distinct, written = self._with_written(layer, pages, offsets)
        self.pool.view(torch.int16)[words] = rows
        self._written[layer, distinct] = written

    def _with_written(self, layer: int, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Pages, each once, and what `_written` is for them once these slots are."""
        distinct, row = torch.unique(pages, return_inverse=True)
        new = torch.zeros(len(distinct), 64, dtype=torch.int64, device=self.device)
        new[row, offsets] = 1
        bit = torch.ones(64, dtype=torch.int64, device=self.device)
        bit = bit << torch.arange(64, device=self.device)
        return distinct, self._written[layer, distinct] | (new * bit).sum(1)

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
        """
        ids = self._page_ids(layer, pages)
        self._check_distinct("pages", ids)
        if self._sealed[layer, ids].any():
            first = int(ids[self._sealed[layer, ids]][0])
            raise PageStateError(f"page {first} of layer {layer} is sealed already")
        partial = ~self._full(layer, ids)
        if partial.any():
            first = int(ids[partial][0])
            filled = (int(self._written[layer, first]) & (1 << 64) - 1).bit_count()
            raise PageStateError(
                f"page {first} of layer {layer} holds {filled} of {self.shape.page_size} tokens: "
                "only a full page can be sealed"
            )
        layout, kv = self.shape.layout, self.layer(layer)
        self._check_raw(layer, ids)
        # Some at a time; each group is encoded whole before any of its bytes change.
        for some in ids.split(max(1, _VALUES_AT_ONCE // layout.page_values)):
            spans, lengths = reference.encode_pages(*reference.decode_pages(kv, some), layout)
            self._homes[layer, some] = spans
            self.places[layer, some, :, 1] = lengths.to(torch.int32)
            self._sealed[layer, some] = True
        return self.page_bytes(layer, ids)

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
        self._homes[layer, ids, :, : len(self._raw_metadata)] = self._raw_metadata
        self.places[layer, ids] = self._raw_places[layer, ids]
        self._written[layer, ids] = 0
        self._sealed[layer, ids] = False

    # ---- checks --------------------------------------------------------------------------------
    def _full(self, layer: int, ids: Tensor) -> Tensor:
        every = (1 << self.shape.page_size) - 1
        every = every - (1 << 64) if every >> 63 else every
        return self._written[layer, ids] == every

    def _check_raw(self, layer: int, ids: Tensor) -> None:
        """Raise FormatError unless the pages' metadata and places are those of raw pages.

        A raw page has no descriptors or entries that could fail later, when others are sealed.
        """
        metadata = self._homes[layer, ids, :, : len(self._raw_metadata)]
        places = self.places[layer, ids] == self._raw_places[layer, ids]
        fine = (metadata == self._raw_metadata).all(-1) & places.all(-1)
        if not fine.all():
            damaged = int(ids[~fine.all(1)][0])
            raise FormatError(
                f"page {damaged} of layer {layer} has metadata that is not a raw page's: its "
                "bytes were overwritten by something other than append, seal and clear"
            )

    def _check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ArgumentError(f"layer={layer!r} must be an int")
        if not 0 <= layer < self.shape.num_layers:
            raise ArgumentError(f"layer={layer} is outside 0..{self.shape.num_layers - 1}")

    def _check_rows(self, name: str, x: Tensor) -> None:
        check_tensor(name, x)
        if x.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"{name} is {str(x.dtype).removeprefix('torch.')}: the format is lossless for "
                "bfloat16 alone; a cast would change the cache"
            )
        want = (self.shape.num_kv_heads, self.shape.head_dim)
        if x.dim() != 3 or tuple(x.shape[1:]) != want:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}; [tokens, {want[0]}, {want[1]}] is wanted"
            )
        if x.device != self.device:
            raise ArgumentError(f"{name} is on {x.device} and the store on {self.device}")

    def _slots(self, slot_mapping: Tensor, tokens: int) -> Tensor:
        check_tensor("slot_mapping", slot_mapping)
        if slot_mapping.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"slot_mapping is {slot_mapping.dtype}; int32 or int64 is wanted")
        if slot_mapping.shape != (tokens,):
            raise ArgumentError(
                f"slot_mapping has shape {tuple(slot_mapping.shape)}; one slot for each of the "
                f"{tokens} tokens is wanted"
            )
        if slot_mapping.device != self.device:
            raise ArgumentError(
                f"slot_mapping is on {slot_mapping.device} and the store on {self.device}"
            )
        slots = slot_mapping.long()
        count = self.num_pages * self.shape.page_size
        wrong = (slots < -1) | (slots >= count)
        if wrong.any():
            raise ArgumentError(
                f"slot {int(slots[wrong][0])} is outside 0..{count - 1} "
                f"({self.num_pages} pages of {self.shape.page_size}; -1 skips a token)"
            )
        self._check_distinct("slot_mapping", slots[slots >= 0])
        return slots

    def _page_ids(self, layer: int, pages: PageIds) -> Tensor:
        self._check_layer(layer)
        if isinstance(pages, Tensor):
            if pages.dtype not in (torch.int32, torch.int64):
                raise ArgumentError(f"pages is {pages.dtype}; int32 or int64 is wanted")
            ids = pages.reshape(-1).to(self.device, torch.int64)
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
        return ids

    def _check_distinct(self, name: str, ids: Tensor) -> None:
        values, counts = torch.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise ArgumentError(f"{name} holds {int(values[counts > 1][0])} more than once")


def _ints(pages: Iterable[int] | int) -> list[int]:
    """Page ids as a list of ints; numpy's integers are ints, bools are not."""
    try:
        listed = list(pages) if isinstance(pages, Iterable) else [pages]
        if any(isinstance(page, bool) for page in listed):
            raise TypeError
        return [operator.index(page) for page in listed]
    except TypeError:
        raise ArgumentError(f"pages must be ints, not {pages!r:.60}") from None
