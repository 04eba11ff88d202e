"""Reserved ranges: lengths by slot, quantiles, and positions that stay while an update varies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheslide_agents.engine.position.ccpe import (
    MAX_OBSERVATIONS,
    MAX_SLOTS,
    LengthHistogram,
    PositionProfile,
    reserved_positions,
    updates_of,
)
from cacheslide_agents.engine.segments import ROLES, EncodedPrompt, Role

SEGMENTS = st.lists(st.tuples(st.sampled_from(ROLES), st.integers(0, 40)), min_size=1, max_size=10)


def encoded(segments: list[tuple[Role, int]]) -> EncodedPrompt:
    """A prompt of segments with a role and a length."""
    lengths = [length for _, length in segments]
    starts = (0, *np.cumsum(lengths)[:-1].tolist())
    return EncodedPrompt(np.arange(sum(lengths)), starts, tuple(role for role, _ in segments))


def test_slots_are_runs_of_updates_when_several_stand_together() -> None:
    prompt = encoded([("system", 3), ("update", 4), ("update", 5), ("suffix", 2), ("update", 0), ("suffix", 1)])
    assert updates_of(prompt) == ((3, 12), (14, 14))


def test_last_update_has_no_slot_when_nothing_follows() -> None:
    assert updates_of(encoded([("update", 3), ("suffix", 1), ("update", 4)])) == ((0, 3),)


@given(SEGMENTS, st.lists(st.integers(0, 100), min_size=MAX_SLOTS, max_size=MAX_SLOTS))
def test_positions_increase_and_leave_the_rest_of_each_range_when_ranges_are_reserved(
    segments: list[tuple[Role, int]], ranges: list[int]
) -> None:
    prompt = encoded(segments)
    if not len(prompt):
        return
    updates = updates_of(prompt)
    assert len(updates) <= MAX_SLOTS
    positions = reserved_positions(len(prompt), updates, ranges[: len(updates)])
    assert (np.diff(positions) > 0).all() and positions[0] >= 0
    # Another derivation: walk through the prompt and skip what is left of a range behind its update.
    expected, position = [], 0
    by_stop: dict[int, int] = {}
    for update, reserved in zip(updates, ranges, strict=False):
        by_stop[update.stop] = by_stop.get(update.stop, 0) + max(0, reserved - (update.stop - update.start))
    for token in range(len(prompt)):
        position += by_stop.get(token, 0)
        expected.append(position)
        position += 1
    assert positions.tolist() == expected
    contiguous = reserved_positions(len(prompt), updates, [0] * len(updates))
    assert contiguous.tolist() == list(range(len(prompt)))


@given(st.integers(0, 20), st.integers(0, 64), st.integers(0, 64), st.integers(1, 30), st.sampled_from([64, 80]))
def test_suffix_stays_when_the_update_varies_within_its_range(
    system: int, old: int, new: int, suffix: int, reserved: int
) -> None:
    places = []
    for length in (old, new):
        prompt = encoded([("system", system), ("update", length), ("suffix", suffix)])
        places.append(reserved_positions(len(prompt), updates_of(prompt), [reserved])[-suffix:])
    assert np.array_equal(places[0], places[1]) and places[0][0] == system + reserved


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_range_holds_the_wanted_share_when_lengths_were_observed(lengths: list[int], quantile: float) -> None:
    profile = PositionProfile()
    for length in lengths:
        profile.observe([length])
    reserved = profile.range_tokens(0, quantile)
    assert reserved is not None and reserved % 16 == 0
    expected = np.quantile(lengths, quantile, method="inverted_cdf")
    assert expected <= reserved < expected + 16


def test_range_is_unknown_when_a_slot_was_never_observed() -> None:
    profile = PositionProfile()
    profile.observe([5])
    assert profile.range_tokens(1, 0.95) is None and PositionProfile().range_tokens(0, 0.95) is None


def test_old_lengths_fade_when_many_are_observed() -> None:
    histogram = LengthHistogram({500: 10})
    for _ in range(MAX_OBSERVATIONS * 4):
        histogram.add({20: 1})
    assert histogram.num_observations <= MAX_OBSERVATIONS and list(histogram.counts) == [20]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_quantile_is_zero_when_nothing_was_observed(share: float) -> None:
    assert LengthHistogram().quantile(share) == 0
