"""Which runs of a prompt's tokens also stand in another sequence, in the same order.

A diff made for reuse: only runs of some length count, the result covers as many tokens as it can, and repetitive text
costs no more than other text. Knows tokens only: no positions, no taint, no policy.
"""

from __future__ import annotations

import numpy as np

Run = tuple[int, int, int]
"""Prompt start, donor start, length in tokens."""

GRAM_TOKENS = 16
"""Longest anchor: runs are found through their windows of `min(min_tokens, GRAM_TOKENS)` tokens."""

MAX_OCCURRENCES = 4
"""Up to this many donor occurrences of an anchor are all tried; of more only the likeliest (see `_likely`)."""

MAX_BLOCKS = 1024
"""So many of the longest matching blocks go into the choice of the best chain, whose cost grows with their square."""

_MAX_STATES = 4  # trades between coverage and room to trim that are kept for a block

_RUN_COST = 1.0 / (4 * MAX_BLOCKS)  # of two chains that cover the same, the one with fewer runs is better


def matching_runs(prompt: np.ndarray, donor: np.ndarray, min_tokens: int) -> list[Run]:
    """The runs of equal tokens that cover most of the prompt, in the order of both sequences.

    Covers at least as much as the common prefix and common suffix do, and as much as any such chain where no window
    of `min(min_tokens, GRAM_TOKENS)` tokens repeats.

    Args:
        prompt: (n,) int64.
        donor: (m,) int64.
        min_tokens: Shortest run, at least 1.

    Returns:
        Runs of at least `min_tokens`, without overlap and increasing in prompt and donor.
    """
    assert min_tokens >= 1
    if min(len(prompt), len(donor)) < min_tokens:
        return []
    return _best_chain(_blocks(prompt, donor, min_tokens), min_tokens)


def common_prefix_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(first), len(second))
    start = 0
    step = 64
    while start < length:
        stop = min(start + step, length)
        unequal = first[start:stop] != second[start:stop]
        if unequal.any():
            return start + int(unequal.argmax())
        start, step = stop, step * 4
    return length


def _blocks(prompt: np.ndarray, donor: np.ndarray, min_tokens: int) -> np.ndarray:
    """Maximal runs of equal tokens, at least `min_tokens` long: (blocks, 3) int64 as `Run`, no two alike."""
    gram_tokens = min(min_tokens, GRAM_TOKENS)
    pairs, all_pairs = _anchor_pairs(_gram_hashes(prompt, gram_tokens), _gram_hashes(donor, gram_tokens))
    starts, ends = pairs[:0], pairs[:0]
    if len(pairs):
        # Pairs come diagonal by diagonal; those that follow each other on one diagonal are one block.
        breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
        starts = pairs[np.concatenate([[0], breaks])]
        ends = pairs[np.concatenate([breaks - 1, [len(pairs) - 1]])]
    lengths = ends[:, 0] - starts[:, 0] + gram_tokens
    blocks = np.column_stack([starts, lengths])
    if all_pairs:
        blocks = blocks[lengths >= min_tokens]
    if len(blocks) > MAX_BLOCKS:
        blocks = blocks[np.argsort(-blocks[:, 2], kind="stable")[:MAX_BLOCKS]]
    prefix = common_prefix_tokens(prompt, donor)
    suffix = common_prefix_tokens(prompt[::-1], donor[::-1])
    found = {(0, 0, prefix), (len(prompt) - suffix, len(donor) - suffix, suffix)}
    for block in blocks.tolist():
        found.update(_equal_pieces(prompt, donor, block, extend=not all_pairs))
    kept = sorted(block for block in found if block[2] >= min_tokens)
    return np.array(kept, dtype=np.int64).reshape(-1, 3)


def _gram_hashes(tokens: np.ndarray, gram_tokens: int) -> np.ndarray:
    """(tokens − gram_tokens + 1,) uint64: a hash of each window. Equal hashes are checked later, token by token."""
    hashes = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(29)
    result = hashes[:0]
    result_tokens, window_tokens, rest = 0, 1, gram_tokens
    while rest:  # windows of 1, 2, 4, ... tokens; the wanted length is a sum of some of them
        if rest & 1:
            result = hashes if result_tokens == 0 else _join(result, hashes, result_tokens)
            result_tokens += window_tokens
        rest >>= 1
        if rest:
            hashes = _join(hashes, hashes, window_tokens)
            window_tokens *= 2
    return result


def _join(first: np.ndarray, second: np.ndarray, offset: int) -> np.ndarray:
    """Hashes of windows made of `first`'s window and `second`'s, `offset` tokens later."""
    count = min(len(first), len(second) - offset)
    joined = first[:count] * np.uint64(0xC2B2AE3D27D4EB4F) + second[offset : offset + count]
    mixed: np.ndarray = joined ^ (joined >> np.uint64(31))
    return mixed


def _anchor_pairs(prompt_grams: np.ndarray, donor_grams: np.ndarray) -> tuple[np.ndarray, bool]:
    """Where equal grams stand: ((pairs, 2) int64 by diagonal and place, whether these are all pairs there are)."""
    order = np.argsort(donor_grams, kind="stable")
    ordered = donor_grams[order]
    first = np.searchsorted(ordered, prompt_grams)
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))  # of each gram's occurrences in `order`
    sizes = np.diff(np.append(starts, len(order)))
    occurrences = np.zeros(len(order) + 1, dtype=np.int64)
    occurrences[starts] = sizes
    found = np.append(ordered, ordered[:1])[first] == prompt_grams
    count = np.where(found, occurrences[first], 0)
    prompt_starts, donor_starts = [], []
    for occurrence in range(MAX_OCCURRENCES):
        at = np.flatnonzero((count > occurrence) & (count <= MAX_OCCURRENCES))
        prompt_starts.append(at)
        donor_starts.append(order[first[at] + occurrence])
    frequent = np.flatnonzero(count > MAX_OCCURRENCES)
    if len(frequent):
        for chosen in _likely(order, np.repeat(starts, sizes), first, count, frequent):
            prompt_starts.append(frequent)
            donor_starts.append(chosen)
    at, to = np.concatenate(prompt_starts), np.concatenate(donor_starts)
    width = len(prompt_grams) + 1
    keys = np.sort((to - at + width) * width + at)
    keys = keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]
    at = keys % width
    return np.column_stack([at, keys // width - width + at]), len(frequent) == 0


def _likely(
    order: np.ndarray, donor_group: np.ndarray, first: np.ndarray, count: np.ndarray, frequent: np.ndarray
) -> list[np.ndarray]:
    """For prompt grams with many donor occurrences the few to try, so that repetition stays linear.

    They are: the one as many occurrences from the start as in the prompt, the one as many from the end, and the ones
    nearest to the diagonals of the unambiguous grams before and behind.
    """
    num_prompt, num_donor = len(first), len(order)
    group, size = first[frequent], count[frequent]  # a gram is known by its first place in `order`
    by_group = np.argsort(group, kind="stable")
    begin = np.flatnonzero(np.concatenate([[True], np.diff(group[by_group]) != 0]))
    members = np.diff(np.append(begin, len(group)))
    rank, rank_from_end = np.empty_like(group), np.empty_like(group)
    rank[by_group] = np.arange(len(group)) - np.repeat(begin, members)
    rank_from_end[by_group] = np.repeat(members, members) - 1 - rank[by_group]
    chosen = [order[group + np.minimum(rank, size - 1)], order[group + size - 1 - np.minimum(rank_from_end, size - 1)]]

    single = np.flatnonzero(count == 1)
    diagonals = np.concatenate([[0], order[first[single]] - single, [num_donor - num_prompt]])
    place = np.searchsorted(single, frequent)
    width = num_donor + 1
    keys = donor_group * width + order  # ascending, so that one search finds the nearest within each group
    for diagonal in (diagonals[place], diagonals[place + 1]):
        target = np.clip(frequent + diagonal, 0, num_donor)
        slot = np.searchsorted(keys, group * width + target)
        above = order[np.clip(slot, group, group + size - 1)]
        below = order[np.clip(slot - 1, group, group + size - 1)]
        chosen.append(np.where(np.abs(above - target) <= np.abs(below - target), above, below))
    return chosen


def _equal_pieces(prompt: np.ndarray, donor: np.ndarray, block: list[int], *, extend: bool) -> list[Run]:
    """The block's runs of really equal tokens; with `extend`, as far as they reach in both directions."""
    at, to, length = block
    equal = prompt[at : at + length] == donor[to : to + length]
    if equal.all():
        if not extend:
            return [(at, to, length)]
        before = common_prefix_tokens(prompt[:at][::-1], donor[:to][::-1])
        behind = common_prefix_tokens(prompt[at + length :], donor[to + length :])
        return [(at - before, to - before, before + length + behind)]
    borders = np.flatnonzero(np.diff(np.concatenate([[0], equal.view(np.int8), [0]])))
    return [
        (at + start, to + start, stop - start)
        for start, stop in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True)
    ]


def _best_chain(blocks: np.ndarray, min_tokens: int) -> list[Run]:
    """The chain of blocks that covers most tokens, overlaps trimmed, every run at least `min_tokens` long.

    Dynamic programming over blocks by their end. Where two neighbours overlap (in prompt or donor), the tokens they
    share are taken from the end of the earlier one as far as its length allows, the rest from the start of the later.
    A block keeps a state for each worthwhile trade between coverage and length left to trim.
    """
    if len(blocks) == 0:
        return []
    blocks = blocks[np.argsort(blocks[:, 0] + blocks[:, 2], kind="stable")]
    ends = blocks[:, :2] + blocks[:, 2:]
    room = len(blocks) * _MAX_STATES
    covered = np.empty(room)  # tokens of the chain up to the block's end, minus a little for each run
    left = np.empty(room, dtype=np.int64)  # tokens of the chain's last run
    end = np.empty((room, 2), dtype=np.int64)
    parent = np.empty(room, dtype=np.int64)
    count = 0
    for block_idx, (at, to, length) in enumerate(blocks.tolist()):
        overlap = np.maximum(np.maximum(end[:count, 0] - at, end[:count, 1] - to), 0)
        trim = np.maximum(overlap - (left[:count] - min_tokens), 0)
        gain = np.where((trim <= length - min_tokens) & (overlap < length), length - overlap, -np.inf)
        totals = np.append(covered[:count] + gain, length) - _RUN_COST
        remains = length - np.append(trim, 0)
        for state in _worthwhile(totals, remains):
            covered[count], left[count], end[count] = totals[state], remains[state], ends[block_idx]
            parent[count] = state if state < len(totals) - 1 else -1
            count += 1
    runs: list[Run] = []
    state = int(covered[:count].argmax())
    limit = end[state]
    while state >= 0:
        trimmed = max(0, int((end[state] - limit).max()))
        length = int(left[state]) - trimmed
        at, to = (end[state] - left[state]).tolist()
        runs.append((at, to, length))
        limit = np.array([at, to])
        state = int(parent[state])
    return runs[::-1]


def _worthwhile(totals: np.ndarray, remains: np.ndarray) -> list[int]:
    """Indices of the few best choices: each covers most among those that leave more tokens than the one before."""
    chosen: list[int] = []
    open_choices = totals.copy()
    while len(chosen) < _MAX_STATES:
        best = int(open_choices.argmax())
        if open_choices[best] == -np.inf:
            break
        ties = np.flatnonzero(open_choices == open_choices[best])
        best = int(ties[remains[ties].argmax()])
        chosen.append(best)
        open_choices[remains <= remains[best]] = -np.inf
        if remains[best] == remains.max():
            break
    return chosen
