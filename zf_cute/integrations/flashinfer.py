"""From FlashInfer's page tables to ours."""

from __future__ import annotations

import torch
from torch import Tensor

from zf_cute.errors import ArgumentError


def block_table_from_csr(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Turn FlashInfer's CSR page table into a block table and lengths.

    Parameters
    ----------
    indptr : Tensor
        [batch + 1] integer: request b has pages ``indices[indptr[b]:indptr[b + 1]]``.
    indices : Tensor
        [pages] integer page ids.
    last_page_len : Tensor
        [batch] integer tokens in each request's last page, 1 to `page_size`; ignored for a
        request without pages.
    page_size : int
        Tokens in a page.

    Returns
    -------
    block_table : Tensor
        [batch, most pages of a request] int32, 0 past a request's own pages.
    seq_lens : Tensor
        [batch] int32.

    Raises
    ------
    ArgumentError
        If the tables do not fit each other.
    """
    if indptr.dim() != 1 or last_page_len.shape != (indptr.numel() - 1,):
        raise ArgumentError(
            f"indptr has shape {tuple(indptr.shape)} and last_page_len "
            f"{tuple(last_page_len.shape)}; [batch + 1] and [batch] are wanted"
        )
    pages = indptr.diff()
    batch = len(pages)
    if (pages < 0).any() or (batch and (indptr[0] != 0 or indptr[-1] > len(indices))):
        raise ArgumentError("indptr must start at 0, never fall, and end within indices")
    outside = (last_page_len < 1) | (last_page_len > page_size)
    if (outside & (pages > 0)).any():
        raise ArgumentError(f"last_page_len must be 1 to page_size={page_size}")
    width = int(pages.max()) if batch else 0
    if (indices < 0).any() or (indices > torch.iinfo(torch.int32).max).any():
        raise ArgumentError("indices holds a page id that is negative or past 31 bits")
    column = torch.arange(width, device=indptr.device)
    inside = column < pages[:, None]
    at = torch.where(inside, indptr[:-1, None] + column, 0).long()
    table = indices[at] if len(indices) else torch.zeros_like(at)
    block_table = torch.where(inside, table, 0).to(torch.int32)
    seq_lens = torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)
    return block_table, seq_lens.to(torch.int32)
