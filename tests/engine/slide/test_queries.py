from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine.model.spec import ModelSpec, RopeSpec
from cacheslide_agents.engine.slide.queries import PROBE_DEPTHS, StoredQueries, probe_layers
from cacheslide_agents.engine.slide.slots import Slots

CPU = torch.device("cpu")


def geometry(
    layers: int, heads: int, kv_heads: int, head_dim: int, windows: tuple[int | None, ...] | None = None
) -> ModelSpec:
    rope = RopeSpec(torch.ones(head_dim // 2), rotary_dim=head_dim)
    width = heads * head_dim
    seen = windows or (None,) * layers
    return ModelSpec("llama", layers, width, heads, kv_heads, head_dim, 8, 64, seen, rope, head_dim**-0.5)


SMOLLM2_135M = geometry(30, 9, 3, 64)
MISTRAL_7B = geometry(32, 32, 8, 128)
ONE_KEY_HEAD = geometry(32, 71, 1, 64)


def stored_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that one slot really takes."""
    stored = StoredQueries(spec, 1, dtype, CPU)
    tensors = [value for value in vars(stored).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 3
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("spec", "dtype", "layers"),
    [
        (SMOLLM2_135M, torch.bfloat16, (7, 9, 15, 18, 21)),
        (SMOLLM2_135M, torch.float32, (7, 9, 15, 18, 21)),
        (MISTRAL_7B, torch.bfloat16, (10, 16, 19, 22)),
        (ONE_KEY_HEAD, torch.bfloat16, ()),
        (
            geometry(26, 8, 4, 64, tuple(None if layer % 6 == 5 else 64 for layer in range(26))),
            torch.float32,
            (5, 11, 17),
        ),
        (
            geometry(26, 8, 4, 64, tuple(None if layer % 2 else 64 for layer in range(26))),
            torch.float32,
            (5, 7, 13, 15, 17),
        ),
        (geometry(1, 4, 4, 64), torch.float32, ()),
        (geometry(2, 4, 4, 64), torch.float32, ()),
        (geometry(3, 4, 4, 64), torch.float32, (1,)),
    ],
)
def test_probes_are_spread_when_the_model_leaves_room(
    spec: ModelSpec, dtype: torch.dtype, layers: tuple[int, ...]
) -> None:
    assert probe_layers(spec, dtype) == layers
    assert stored_bytes(spec, dtype) <= 0.15 * spec.kv_bytes_per_token(dtype)


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([16, 64, 128]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 1, 2]),
)
def test_probes_are_inner_layers_of_few_bytes_when_the_geometry_is_any(
    layers: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, windowed: int
) -> None:
    windows = tuple((None, 64)[windowed == 2 or (windowed == 1 and layer % 6 != 5)] for layer in range(layers))
    spec = geometry(layers, kv_heads * group, kv_heads, head_dim, windows)
    probes = probe_layers(spec, dtype)
    assert len(probes) <= len(PROBE_DEPTHS) and list(probes) == sorted(set(probes))
    assert 0 not in probes and layers - 1 not in probes
    assert stored_bytes(spec, dtype) <= 0.15 * spec.kv_bytes_per_token(dtype)
    if any(windows[layer] is None for layer in range(1, layers - 1)):
        assert all(windows[layer] is None for layer in probes), "layers that see everything are preferred"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_come_back_within_half_a_step_when_they_are_stored(dtype: torch.dtype) -> None:
    stored = StoredQueries(SMOLLM2_135M, 64, dtype, CPU)
    random = torch.Generator().manual_seed(0)
    query = (torch.randn(40, 9, 64, generator=random) * torch.logspace(-2, 3, 9)[:, None]).to(dtype)
    query[3] = 0.0
    lse = torch.randn(40, 9, generator=random) * 100
    slots = np.random.default_rng(0).permutation(64)[:40]
    for layer_idx in stored.layers:
        stored.write(layer_idx, Slots(slots, CPU), query + layer_idx, lse + layer_idx)
    for layer_idx in stored.layers:
        back, sums = stored.read(layer_idx, torch.from_numpy(slots))
        wanted = (query + layer_idx).float()
        assert back.dtype == sums.dtype == torch.float32
        assert ((back - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) * 0.505 / 127).all()
        assert torch.equal(sums, lse + layer_idx)


def test_zeros_come_back_when_a_query_is_nothing() -> None:
    stored = StoredQueries(SMOLLM2_135M, 16, torch.float32, CPU)
    probe = stored.layers[0]
    stored.write(probe, Slots(np.arange(4), CPU), torch.zeros(4, 9, 64), torch.zeros(4, 9))
    assert not stored.read(probe, torch.arange(4))[0].any()


@pytest.mark.parametrize("slots", [np.arange(8), np.arange(0, 16, 2)])
def test_one_layer_moves_when_slots_are_copied(slots: np.ndarray) -> None:
    stored = StoredQueries(SMOLLM2_135M, 64, torch.float32, CPU)
    random = torch.Generator().manual_seed(0)
    for layer_idx in stored.layers:
        asked, lse = torch.randn(64, 9, 64, generator=random), torch.randn(64, 9, generator=random)
        stored.write(layer_idx, Slots(np.arange(64), CPU), asked, lse)
    first, second = stored.layers[:2]
    every, target = torch.arange(64), np.arange(40, 48)
    before = [stored.read(layer_idx, every) for layer_idx in (first, second)]
    stored.move(first, Slots(slots, CPU), Slots(target, CPU))
    for moved, old in zip(stored.read(first, every), before[0], strict=True):
        expected = old.clone()
        expected[target] = old[slots]
        assert torch.equal(moved, expected)
    assert all(map(torch.equal, stored.read(second, every), before[1]))
    assert stored.wants(first) and not stored.wants(0)
