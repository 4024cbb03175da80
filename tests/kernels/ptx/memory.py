"""Global and shared memory: allocations with gaps between them, each access checked.

Addresses of allocations lie far above 4 GiB, so that an address cut to 32 bits hits nothing, and
nothing is mapped between two of them.  An access lies inside one allocation and is aligned to its
size, or it raises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from .decode import UNSIGNED
from .errors import MemoryFault, Misaligned, Unwritten
from .races import Shadow

PAGE_BITS = 12
PAGE = 1 << PAGE_BITS
FIRST_ADDRESS = 0x7E00_0000_0000
SHARED_WINDOW = 0x7000_0000_0000  # where generic addresses of shared memory begin
SHARED_BASE = 1024  # the first KiB belongs to the system, as on SM90, and 0 is no address
GARBAGE_WORD = 0xFFC5_FFC5  # a NaN in BF16, in FP32 and as half of an FP64

# Where an access goes: the region, offsets in it, and which of the addresses these are (None: all).
Located = tuple[tuple["Region", np.ndarray, "np.ndarray | None"], ...]


class Region:
    """One allocation.

    Parameters
    ----------
    base : int
        Address of its first byte.
    data : ndarray
        Its bytes.  Not copied, so results appear in the caller's array.
    name : str
        For errors.
    """

    def __init__(self, base: int, data: np.ndarray, name: str) -> None:
        """Map `data` at `base`; if it is read-only, stores raise."""
        self.base = base
        self.base_vector = np.uint64(base)
        self.size = data.size
        self.data = data
        self.name = name
        self.writable = data.flags.writeable
        self.shadow: Shadow | None = None
        self._rows: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, bits: int, vector: int) -> np.ndarray:
        """Return the memory as words of `bits`, `vector` of them a row if more than one."""
        key = bits, vector
        if key not in self._rows:
            row = bits // 8 * vector
            words = self.data[: self.data.size // row * row].view(UNSIGNED[bits])
            self._rows[key] = words if vector == 1 else words.reshape(-1, vector)
        return self._rows[key]

    def place(self, offsets: np.ndarray, reads: int = 0) -> np.ndarray:
        """Return where offsets lie in `data`; `reads` is how many bytes will be read there."""
        return offsets

    def placed_name(self, place: int) -> str:
        """Name a byte of `data`."""
        return f"byte {place:#x} of {self.name}"

    def wrote(self, places: np.ndarray, width: int) -> None:
        """Learn that `width` bytes are written at each of the places."""

    def watch(self, *, shared: bool) -> None:
        """Start to look for races: nothing has been accessed in this launch."""
        self.shadow = Shadow(self.data.size, self.placed_name, shared=shared)


class SparseRegion(Region):
    """An allocation whose pages are backed when they are first touched.

    Parameters
    ----------
    base, size : int
    name : str
    strict : bool
        Reading bytes that nobody wrote raises `Unwritten`, instead of giving a NaN pattern.
    """

    def __init__(self, base: int, size: int, name: str, *, strict: bool) -> None:
        """Back nothing yet."""
        super().__init__(base, np.empty(0, np.uint8), name)
        self.size = size
        self.strict = strict
        self.table = np.full(-(-size // PAGE), -1, np.int64)  # page -> its place, in pages
        self.pages: list[int] = []
        self.known = np.zeros(0, bool)

    def place(self, offsets: np.ndarray, reads: int = 0) -> np.ndarray:
        """Translate, and back the pages that are touched for the first time."""
        page = (offsets >> np.uint64(PAGE_BITS)).astype(np.int64)
        places = self.table.take(page)
        if int(places.min()) < 0:
            if reads and self.strict:
                raise self._untouched(int(offsets[places < 0][0]))
            for each in np.unique(page[places < 0]).tolist():
                self._back(each)
            places = self.table.take(page)
        places = places << PAGE_BITS | (offsets & np.uint64(PAGE - 1)).astype(np.int64)
        if reads and self.strict:
            unknown = ~self.known[places[:, None] + np.arange(reads)].all(axis=1)
            if unknown.any():
                raise self._untouched(int(offsets[unknown][0]))
        return places

    def _untouched(self, offset: int) -> Unwritten:
        return Unwritten(f"{self.name} is read at {offset:#x} before all of it is written")

    def _back(self, page: int) -> None:
        used = len(self.pages) << PAGE_BITS
        if used == self.data.size:
            grown = np.full(max(16 * PAGE, 2 * used) // 4, GARBAGE_WORD, np.uint32).view(np.uint8)
            grown[:used] = self.data
            self.data = grown
            self.known = np.concatenate([self.known, np.zeros(grown.size - used, bool)])
            self._rows.clear()
            if self.shadow:
                self.shadow.grow(grown.size)
        self.table[page] = len(self.pages)
        self.pages.append(page)

    def placed_name(self, place: int) -> str:
        """Name a byte by its offset in the allocation."""
        offset = self.pages[place >> PAGE_BITS] << PAGE_BITS | place & PAGE - 1
        return super().placed_name(offset)

    def wrote(self, places: np.ndarray, width: int) -> None:
        """Remember which bytes are known, by rows of `width`."""
        if self.strict:
            self.known.reshape(-1, width)[places // width] = True


class GlobalMemory:
    """The allocations of a simulator."""

    def __init__(self) -> None:
        """Start with none."""
        self.regions: list[Region] = []
        self.bases: list[int] = []
        self.next = FIRST_ADDRESS
        self.used: dict[object, Region] = {}  # by instruction

    def add(self, data: np.ndarray, name: str | None = None) -> Region:
        """Map an array."""
        if not data.flags.c_contiguous:
            raise ValueError("only a contiguous array can be mapped")
        return self._enter(Region(self.next, data.reshape(-1).view(np.uint8), self._name(name)))

    def add_sparse(self, size: int, name: str | None = None, *, strict: bool) -> Region:
        """Map `size` bytes without backing them."""
        return self._enter(SparseRegion(self.next, size, self._name(name), strict=strict))

    def _name(self, name: str | None) -> str:
        return name or f"allocation {len(self.regions)}"

    def _enter(self, region: Region) -> Region:
        self.regions.append(region)
        self.bases.append(region.base)
        # At least one page stays unmapped, and a page after a multiple of 64 KiB starts the next:
        # aligned to 4 KiB, so that code which assumes more than it was promised is seen.
        self.next += (region.size // 0x10000 + 1) * 0x10000 + PAGE
        return region

    def find(self, address: int) -> Region:
        """Return the allocation that holds an address."""
        which = bisect_right(self.bases, address) - 1
        if which < 0 or address - self.bases[which] >= self.regions[which].size:
            raise MemoryFault(f"nothing is mapped at {address:#x}{self._near(address)}")
        return self.regions[which]

    def _near(self, address: int) -> str:
        if address < 1 << 32:
            return ", an address of 32 bits"
        which = bisect_right(self.bases, address) - 1
        if which < 0:
            return ""
        region = self.regions[which]
        return f", {address - region.base - region.size} bytes past {region.name}"

    def locate(self, addresses: np.ndarray, width: int, instruction: object) -> Located:
        """Find the allocations of accesses of `width` bytes.

        The one that the same instruction used before is tried first.
        """
        region = self.used.get(instruction)
        if region is None:
            region = self.used[instruction] = self.find(int(addresses[0]))
        offsets = addresses - region.base_vector
        bits = int(np.bitwise_or.reduce(offsets))  # at least the largest of them
        if bits <= region.size - width and not bits & width - 1:
            return ((region, offsets, None),)
        return tuple(self._locate(addresses, width, instruction))

    def _locate(self, addresses: np.ndarray, width: int, instruction: object) -> Iterator:
        wrong = addresses & np.uint64(width - 1) != 0
        if wrong.any():
            address = int(addresses[wrong][0])
            raise Misaligned(f"address {address:#x} of an access of {width} bytes")
        left = np.arange(addresses.size)
        while left.size:
            region = self.find(int(addresses[left[0]]))
            offsets = addresses[left] - region.base_vector
            inside = offsets < np.uint64(region.size)
            across = inside & (offsets > np.uint64(max(region.size - width, 0)))
            if across.any() or region.size < width:
                address = int(addresses[left[across]][0])
                raise MemoryFault(f"{width} bytes at {address:#x} cross the end of {region.name}")
            self.used[instruction] = region
            if inside.all() and left.size == addresses.size:
                yield region, offsets, None
                return
            yield region, offsets[inside], left[inside]
            left = left[~inside]

    def read(self, address: int, size: int) -> np.ndarray:
        """Return a copy of bytes, as the host sees them."""
        region, offset = self._span(address, size)
        if not isinstance(region, SparseRegion):
            return region.data[offset : offset + size].copy()
        out = np.full(-(-size // 4) + 1, GARBAGE_WORD, np.uint32).view(np.uint8)
        out = np.roll(out, -(offset % 4))[:size].copy()
        for page, start, stop in _pages(offset, size):
            if region.table[page] >= 0:
                place = int(region.table[page]) << PAGE_BITS
                first = (page << PAGE_BITS) + start - offset
                out[first : first + stop - start] = region.data[place + start : place + stop]
        return out

    def write(self, address: int, data: np.ndarray) -> None:
        """Store bytes, as the host does."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        region, offset = self._span(address, raw.size)
        if not isinstance(region, SparseRegion):
            region.data[offset : offset + raw.size] = raw
            return
        for page, start, stop in _pages(offset, raw.size):
            if region.table[page] < 0:
                region._back(page)
            place = int(region.table[page]) << PAGE_BITS
            first = (page << PAGE_BITS) + start - offset
            region.data[place + start : place + stop] = raw[first : first + stop - start]
            region.known[place + start : place + stop] = True

    def _span(self, address: int, size: int) -> tuple[Region, int]:
        region = self.find(address)
        if address - region.base + size > region.size:
            raise MemoryFault(f"{size} bytes at {address:#x} cross the end of {region.name}")
        return region, address - region.base


def _pages(offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield each page of a range of bytes with where the range starts and stops in it."""
    end = offset + size
    while offset < end:
        page, start = offset >> PAGE_BITS, offset & PAGE - 1
        stop = min(PAGE, start + end - offset)
        yield page, start, stop
        offset += stop - start


def locate_shared(region: Region, addresses: np.ndarray, width: int) -> Located:
    """Find accesses in the shared memory of a CTA."""
    offsets = addresses.astype(np.uint64) - region.base_vector
    bits = int(np.bitwise_or.reduce(offsets))
    if bits > region.size - width and int(offsets.max()) > region.size - width:
        address = int(addresses[int(offsets.argmax())])
        raise MemoryFault(
            f"{width} bytes at shared address {address:#x}: there are "
            f"{region.size} bytes from {region.base:#x}"
        )
    if bits & width - 1:
        wrong = addresses.astype(np.uint64) & np.uint64(width - 1) != 0
        raise Misaligned(
            f"shared address {int(addresses[wrong][0]):#x} of an access of {width} bytes"
        )
    return ((region, offsets, None),)
