"""The page pool: the one tensor that holds all K and V, and who owns which page of it.

A page number stands for the same 16 tokens' worth of slots in every layer. The pool knows no tokens and no sequences;
block tables map tokens to pages and `reuse.index` decides what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..config import PAGE_TOKENS, EngineConfig
from ..errors import ConfigError
from ..model.spec import ModelSpec
from .free_runs import FreeRuns
from .memory import free_host_bytes
from .queries import query_bytes_per_token

MAX_POOL_CONTEXTS = 64
"""A pool sized by `pool_share` holds at most this many sequences of full context length: past that, idle ones are
cheaper to forget than to keep."""


class PoolFullError(Exception):
    """The pool has fewer free pages than wanted. Internal: the caller evicts, or tells the user in its own words.

    Attributes:
        wanted_pages: Pages asked for.
        free_pages: Pages free at that moment.
    """

    def __init__(self, wanted_pages: int, free_pages: int) -> None:
        self.wanted_pages = wanted_pages
        self.free_pages = free_pages
        super().__init__(f"{wanted_pages} pages of {PAGE_TOKENS} tokens wanted, {free_pages} free")


class PagePool:
    """All K and V of an engine, with a reference count for each page.

    Attributes:
        kv: (layers, num_pages * PAGE_TOKENS, 2 * kv_heads, head_dim), `dtype`, `device`; for each slot the keys of all
            heads, rotated at their token's position, then the values. Never cleared: an unwritten slot holds anything.
        num_pages: Pages in the pool.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, dtype: torch.dtype, device: torch.device | str) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        shape = (spec.num_layers, num_pages * PAGE_TOKENS, 2 * spec.num_kv_heads, spec.head_dim)
        # On a CPU the system hands out memory when a slot is first written, so an unused pool costs nothing.
        try:
            self.kv = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:  # out of memory, or a size that no tensor has
            tokens, token_bytes = num_pages * PAGE_TOKENS, spec.kv_bytes_per_token(dtype)
            raise ConfigError(
                f"a pool of {tokens} tokens needs {tokens * token_bytes / 2**20:.0f} MiB, which {device} does not "
                "hold: lower pool_tokens or pool_share"
            ) from error
        self._free = FreeRuns(num_pages)
        self._references = np.zeros(num_pages, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._free.num_free

    def layer(self, layer_idx: int) -> torch.Tensor:
        """One layer's slots, a view: (num_pages * PAGE_TOKENS, 2 * kv_heads, head_dim)."""
        return self.kv[layer_idx]

    def references(self, pages: Sequence[int] | np.ndarray) -> np.ndarray:
        """(n,) int32: how many owners each of the pages has."""
        return self._references[np.asarray(pages, dtype=np.int64)]

    def allocate(self, num_pages: int, after: int | None = None) -> list[int]:
        """Takes free pages, each with one reference, contiguous where possible.

        Args:
            num_pages: How many; 0 gives an empty list.
            after: The last page of a sequence that grows; its pages stay one run if there is room behind it.

        Raises:
            PoolFullError: Fewer pages are free; nothing was taken.
        """
        if num_pages > self.num_free:
            raise PoolFullError(num_pages, self.num_free)
        pages = self._free.take(num_pages, after)
        self._references[pages] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Adds an owner to each of the pages, which are in use and given once each."""
        indices = np.asarray(pages, dtype=np.int64)
        assert (self._references[indices] > 0).all(), "a free page cannot be retained"
        self._references[indices] += 1

    def release(self, pages: Sequence[int]) -> int:
        """Takes an owner from each of the pages, given once each; those without one become free.

        Returns:
            How many pages became free.
        """
        indices = np.asarray(pages, dtype=np.int64)
        assert (self._references[indices] > 0).all(), "a free page cannot be released"
        self._references[indices] -= 1
        unowned = indices[self._references[indices] == 0]
        self._free.give(unowned.tolist())
        return len(unowned)


def pool_pages(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> int:
    """How many pages the pool gets.

    `pool_tokens` if set, rounded up to whole pages. Otherwise `pool_share` of the memory free now on the device
    (on a CPU: within the container's limit), but at most `MAX_POOL_CONTEXTS` sequences of full context length.

    Raises:
        ConfigError: The share of free memory does not hold a single page.
    """
    if config.pool_tokens is not None:
        return -(-config.pool_tokens // PAGE_TOKENS)
    device = torch.device(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    page_bytes = PAGE_TOKENS * (spec.kv_bytes_per_token(dtype) + query_bytes_per_token(spec, dtype))
    num_pages = int(free_bytes * config.pool_share) // page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"pool_share = {config.pool_share} of {free_bytes / 2**20:.0f} MiB free memory on {device} is less than "
            f"one page of {page_bytes / 2**20:.2f} MiB: free some memory, raise pool_share or set pool_tokens"
        )
    context_tokens = min(spec.context_tokens, config.max_context_tokens or spec.context_tokens)
    return min(num_pages, MAX_POOL_CONTEXTS * -(-context_tokens // PAGE_TOKENS))
