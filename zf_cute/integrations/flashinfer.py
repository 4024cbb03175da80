"""From FlashInfer's page tables to ours."""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute.checks import check_tensor
from zf_cute.errors import ArgumentError

INT32_MAX = torch.iinfo(torch.int32).max


def block_table_from_csr(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    *,
    max_pages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn FlashInfer's CSR page table into a block table and lengths.

    Parameters
    ----------
    indptr : Tensor
        [batch + 1] int32 or int64: request b has pages ``indices[indptr[b]:indptr[b + 1]]``.
    indices : Tensor
        [pages] int32 or int64 page ids; those past ``indptr[-1]`` are ignored.
    last_page_len : Tensor
        [batch] int32 or int64 tokens in each request's last page, 1 to `page_size`; ignored for a
        request without pages.
    page_size : int
        Tokens in a page.
    max_pages : int, optional
        Columns of the block table.  With it the host does not wait for the device, so that the
        call can be captured in a CUDA graph; what the tables hold is then not checked, and pages
        past it are dropped.

    Returns
    -------
    block_table : Tensor
        [batch, max_pages or most pages of a request] int32, 0 past a request's own pages.
    seq_lens : Tensor
        [batch] int32.

    Raises
    ------
    ArgumentError
        If the tables do not fit each other.
    """
    for name, x in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        check_tensor(name, x)
        if x.dtype not in (torch.int32, torch.int64) or x.dim() != 1:
            raise ArgumentError(
                f"{name} is {x.dtype} with {x.dim()} dimensions; int32 or int64 with one is wanted"
            )
    for name, number in (("page_size", page_size), ("max_pages", max_pages)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ArgumentError(f"{name}={number!r} must be an int of at least 1")
    indptr, indices, last_page_len = indptr.long(), indices.long(), last_page_len.long()
    if last_page_len.shape != (indptr.numel() - 1,):
        raise ArgumentError(
            f"indptr has shape {tuple(indptr.shape)} and last_page_len "
            f"{tuple(last_page_len.shape)}; [batch + 1] and [batch] are wanted"
        )
    if max_pages is None:
        max_pages = _checked_width(indptr, indices, last_page_len, page_size)
    pages = indptr.diff()
    column = torch.arange(max_pages, device=indptr.device)
    inside = column < pages[:, None]
    at = torch.where(inside, indptr[:-1, None] + column, 0)
    table = indices[at] if len(indices) else torch.zeros_like(at)
    block_table = torch.where(inside, table, 0).to(torch.int32)
    seq_lens = torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)
    return block_table, seq_lens.to(torch.int32)


def _checked_width(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> int:
    """Most pages of a request; ArgumentError if the int64 tables do not fit each other."""
    pages = indptr.diff()
    if (pages < 0).any() or indptr[0] != 0 or indptr[-1] > len(indices):
        raise ArgumentError("indptr must start at 0, never fall, and end within indices")
    outside = (last_page_len < 1) | (last_page_len > page_size)
    if (outside & (pages > 0)).any():
        raise ArgumentError(f"last_page_len must be 1 to page_size={page_size}")
    used = indices[: int(indptr[-1])]
    if ((used < 0) | (used > INT32_MAX)).any():
        raise ArgumentError("indices holds a page id that is negative or past 31 bits")
    width = int(pages.max()) if len(pages) else 0
    if width * page_size > INT32_MAX:
        raise ArgumentError(f"a request of {width} pages of {page_size} is past 31 bits of tokens")
    return width
