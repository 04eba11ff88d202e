"""Oracle of `reuse.diff`: the most tokens that runs in order can cover, by trying every pair of places."""

from __future__ import annotations

import numpy as np


def longest_chain_tokens(prompt: np.ndarray, donor: np.ndarray, min_tokens: int) -> int:
    """Tokens covered by the best chain of runs of at least `min_tokens`; cubic time."""
    rows, columns = len(prompt) + 1, len(donor) + 1
    equal = np.zeros((rows, columns), dtype=np.int64)  # length of the equal run that ends here
    best = np.zeros((rows, columns), dtype=np.int64)
    for i in range(1, rows):
        for j in range(1, columns):
            if prompt[i - 1] == donor[j - 1]:
                equal[i, j] = equal[i - 1, j - 1] + 1
            best[i, j] = max(best[i - 1, j], best[i, j - 1])
            for length in range(min_tokens, int(equal[i, j]) + 1):
                best[i, j] = max(best[i, j], best[i - length, j - length] + length)
    return int(best[-1, -1])
