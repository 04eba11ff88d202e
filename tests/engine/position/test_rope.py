from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheslide_agents.engine.errors import ConfigError, UnsupportedModelError
from cacheslide_agents.engine.position.rope import (
    apply_rotary,
    rope_spec,
    rotary_at,
    rotate_keys,
    served_context,
    turn_by,
)
from tests.reference.complex_rope import rotate_directly
from tests.tiny import tiny_model

SHORT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
LONG = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0]
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 512,
    },
}


def model_with(kind: str) -> Any:
    return tiny_model("llama", num_hidden_layers=1, rope_parameters={"rope_theta": 10000.0, **KINDS[kind]})


def partial_model() -> Any:
    parameters = {"rope_theta": 10000.0, "rope_type": "longrope", "partial_rotary_factor": 0.5}
    factors = {"short_factor": SHORT[:4], "long_factor": LONG[:4]}
    return tiny_model(
        "phi3",
        num_hidden_layers=1,
        original_max_position_embeddings=512,
        rope_parameters={**parameters, **factors},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_transformers_own_when_the_kind_is_fixed(kind):
    model = model_with(kind)
    spec = rope_spec(model.config)
    torch.testing.assert_close(spec.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert spec.attention_scaling == pytest.approx(model.model.rotary_emb.attention_scaling)
    assert spec.rotary_dim == 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosines_are_transformers_own_when_cast(kind, dtype):
    model = model_with(kind)
    spec = rope_spec(model.config)
    positions = torch.tensor([0, 1, 17, 400, 511])
    rotary = rotary_at(positions, spec.inv_freq, spec.attention_scaling, dtype)
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=dtype), positions[None])
    torch.testing.assert_close(rotary.cos[:, 0], cos[0])
    torch.testing.assert_close(rotary.sin[:, 0, 8:], sin[0, :, 8:])
    torch.testing.assert_close(rotary.sin[:, 0, :8], -sin[0, :, :8])


@pytest.mark.parametrize("kind", [*KINDS, "partial"])
def test_moved_keys_equal_direct_rotation_when_moved_by_any_delta(kind):
    spec = rope_spec((partial_model() if kind == "partial" else model_with(kind)).config)
    raw = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(1))
    before = torch.arange(100, 150)
    deltas = torch.tensor([-100, -7, 0, 1, 300] * 10)
    keys = apply_rotary(raw.clone(), rotary_at(before, spec.inv_freq, spec.attention_scaling, torch.float32))
    moved = rotate_keys(keys, deltas, spec)
    direct = rotate_directly(raw, before + deltas, spec.inv_freq, spec.attention_scaling)
    torch.testing.assert_close(moved.double(), direct, atol=2e-5, rtol=0)
    together = rotate_keys(keys, 63, spec)
    direct = rotate_directly(raw, before + 63, spec.inv_freq, spec.attention_scaling)
    torch.testing.assert_close(together.double(), direct, atol=2e-5, rtol=0)


def test_moved_keys_equal_direct_rotation_when_positions_are_large():
    spec = rope_spec(model_with("default").config)
    raw = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1))
    start = torch.full((4,), 3)
    keys = rotate_directly(raw, start, spec.inv_freq, 1.0).float()
    moved = rotate_keys(keys, 120_001, spec)
    torch.testing.assert_close(
        moved.double(), rotate_directly(raw, start + 120_001, spec.inv_freq, 1.0), atol=1e-5, rtol=0
    )


def test_moving_there_and_back_is_close_when_keys_are_bfloat16():
    spec = rope_spec(model_with("yarn").config)
    keys = torch.randn(30, 3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    back = rotate_keys(rotate_keys(keys, 57, spec), -57, spec)
    assert back.dtype == torch.bfloat16
    torch.testing.assert_close(back, keys, atol=0.04, rtol=0)


def test_result_goes_to_out_when_given_and_may_be_the_keys_themselves():
    spec = rope_spec(partial_model().config)
    keys = torch.randn(2, 10, 3, 16, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([rotate_keys(layer, 9, spec) for layer in keys])
    out = torch.empty_like(keys)
    assert rotate_keys(keys, turn_by(9, spec), spec, out=out) is out
    torch.testing.assert_close(out, expected)
    assert rotate_keys(keys, 9, spec, out=keys) is keys
    torch.testing.assert_close(keys, expected)


def test_context_ends_with_the_short_factors_when_longrope_is_not_asked_for_more():
    config = model_with("longrope").config
    assert served_context(config) == 512
    assert served_context(config, 300) == 300
    assert served_context(config, 513) == 513
    short, long = rope_spec(config, 512), rope_spec(config, 513)
    torch.testing.assert_close(short.inv_freq / long.inv_freq, torch.tensor(LONG) / torch.tensor(SHORT))
    assert short.attention_scaling == long.attention_scaling > 1


def test_context_may_reach_as_far_as_yarn_stretches_it():
    config = tiny_model(
        "llama",
        num_hidden_layers=1,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **KINDS["yarn"]},
    ).config
    assert served_context(config) == 512
    assert served_context(config, 2048) == 2048
    with pytest.raises(ConfigError, match=r"2049.*2048"):
        served_context(config, 2049)


def test_context_is_refused_when_positions_do_not_reach_it():
    with pytest.raises(ConfigError, match=r"max_context_tokens = 4096.*at most 2048"):
        rope_spec(model_with("default").config, 4096)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "length of the prompt.*yarn"),
        ({"rope_type": "proportional", "rope_theta": 1e4}, "'proportional'.*default, linear"),
        (
            {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
            "each kind of layer",
        ),
        ({}, "no rotary frequencies"),
    ],
)
def test_kind_is_refused_when_its_frequencies_are_not_fixed(parameters, reason):
    config = SimpleNamespace(model_type="llama", max_position_embeddings=64, head_dim=16, rope_parameters=parameters)
    with pytest.raises(UnsupportedModelError, match=reason):
        rope_spec(config)
