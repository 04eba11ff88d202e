from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheslide_agents.engine.slide.slots import Slots


@given(st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True))
def test_slots_are_read_and_written_in_order_when_given_in_any(numbers: list[int]) -> None:
    layer = torch.randn(40, 2, 4)
    slots, index = Slots(np.array(numbers), torch.device("cpu")), torch.tensor(numbers)
    assert torch.equal(slots.read(layer), layer[index])
    expected, kv = layer.clone(), torch.randn(len(numbers), 2, 4)
    expected[index] = kv
    slots.write(layer, kv)
    assert torch.equal(layer, expected)


@pytest.mark.parametrize("num_runs", [1, 4, 5, 9])
def test_some_heads_are_written_when_they_are_given(num_runs: int) -> None:
    numbers = np.concatenate([np.arange(10 * run, 10 * run + 3) for run in range(num_runs)])
    layer, kv = torch.zeros(100, 2, 4), torch.ones(len(numbers), 1, 4)
    Slots(numbers, torch.device("cpu")).write(layer[:, 1:], kv)
    assert layer[:, 1].sum() == layer.sum() == 4 * len(numbers)


@pytest.mark.parametrize("first_head", [0, 1])
@pytest.mark.parametrize("target_runs", [1, 4, 5, 9])
@pytest.mark.parametrize("source_runs", [1, 4, 5, 9])
def test_slots_are_copied_within_one_layer_when_either_lies_scattered(
    source_runs: int, target_runs: int, first_head: int
) -> None:
    layer = torch.randn(200, 2, 4)
    before = layer.clone()
    source, target = (
        start + np.concatenate([run + run * 2 + place for run, place in enumerate(np.array_split(np.arange(36), runs))])
        for start, runs in ((0, source_runs), (100, target_runs))
    )
    heads, cpu = layer[:, first_head:], torch.device("cpu")
    Slots(target, cpu).write(heads, Slots(source, cpu).read(heads))
    before[target, first_head:] = before[source, first_head:]
    assert torch.equal(layer, before)
