from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.engine.attention.flash import FlashAttention
from cacheslide_agents.engine.errors import ConfigError
from cacheslide_agents.engine.model.decoder import Decoder
from tests.reference.flash_varlen import flash_attn_varlen_func
from tests.reference.walk import Walk
from tests.tiny import FAMILIES, tiny_model

FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, one head each": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, head width": ("llama", {"head_dim": 24}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, llama3": ("llama", {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}}),
    "llama, yarn": ("llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "llama, longrope": (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, **LONGROPE, **{name: 2 * values for name, values in FACTORS.items()}}},
    ),
    "mistral, window": ("mistral", {"sliding_window": 20}),
    "qwen2, upper windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "head_dim": 24}),
    "qwen3, alternating windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "phi3, window": ("phi3", {"sliding_window": 20}),
    "phi3, partial rotary": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3, partial longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, **LONGROPE, **FACTORS},
        },
    ),
}
TOKENS = 180
IDS = torch.randint(3, 384, (TOKENS,), generator=torch.Generator().manual_seed(3))
CONTIGUOUS = list(range(2, 2 + 12))
SCATTERED = [11, 3, 4, 0, 19, 7, 8, 9, 16, 2, 14, 5]


def build(name: str) -> Any:
    family, settings = MODELS[name]
    return tiny_model(family, **settings)


@torch.inference_mode()
def own_logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    logits: torch.Tensor = model(ids[None]).logits[0]
    return logits


def assert_logits_equal(ours: torch.Tensor, own: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, own, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_own_when_all_rows_run_at_once(name):
    model = build(name)
    own = own_logits(model)
    walk = Walk(Decoder.from_transformers(model), CONTIGUOUS)
    assert_logits_equal(walk.step(IDS, np.arange(TOKENS)), own)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_own_when_pages_are_scattered_and_rows_come_in_pieces(name):
    model = build(name)
    own = own_logits(model)
    walk = Walk(Decoder.from_transformers(model), SCATTERED)
    pieces = [np.arange(0, 70), np.arange(70, 71), np.arange(71, 75), np.arange(75, 150), np.arange(150, TOKENS)]
    logits = torch.cat([walk.step(IDS[piece], piece) for piece in pieces])
    assert_logits_equal(logits, own)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_own_when_sparse_rows_are_computed_again(name):
    model = build(name)
    own = own_logits(model)
    walk = Walk(Decoder.from_transformers(model), SCATTERED)
    walk.step(IDS, np.arange(TOKENS))
    sparse = np.concatenate((np.arange(3, 60, 4), np.arange(80, 150), [155, 156, 170, TOKENS - 1]))
    walk.pool[:, torch.from_numpy(walk.table.slots(sparse))] = 100.0
    assert_logits_equal(walk.step(IDS[sparse], sparse), own[sparse])


@pytest.mark.parametrize("name", ["llama", "qwen2, upper windows", "phi3, partial longrope"])
def test_logits_are_transformers_own_when_flash_runs_the_sparse_rows(name):
    model = build(name)
    own = own_logits(model)
    decoder = Decoder.from_transformers(model)
    walk = Walk(decoder, SCATTERED, FlashAttention(decoder.device, flash_attn_varlen_func))
    walk.step(IDS, np.arange(TOKENS))
    sparse = np.concatenate((np.arange(3, 60, 4), np.arange(80, TOKENS)))
    assert_logits_equal(walk.step(IDS[sparse], sparse), own[sparse])


@pytest.mark.parametrize("name", FAMILIES)
def test_last_logits_are_the_same_when_the_last_layer_runs_fewer_rows(name):
    model = build(name)
    own = own_logits(model)
    walk = Walk(Decoder.from_transformers(model), SCATTERED)
    assert_logits_equal(walk.step(IDS, np.arange(TOKENS), wanted_rows=3), own[-3:])


def test_long_factors_serve_everything_when_more_than_the_original_context_is_asked_for():
    model = build("phi3, partial longrope")
    ids = torch.randint(3, 384, (300,), generator=torch.Generator().manual_seed(3))
    own = own_logits(model, ids)
    decoder = Decoder.from_transformers(model, context_tokens=2048)
    assert decoder.spec.context_tokens == 2048
    assert Decoder.from_transformers(model).spec.context_tokens == 256
    walk = Walk(decoder, list(range(20)))
    assert_logits_equal(walk.step(ids, np.arange(300)), own)


def test_answers_stay_close_when_the_model_is_bfloat16():
    model = build("qwen3").bfloat16()
    own = own_logits(model).float()
    walk = Walk(Decoder.from_transformers(model), SCATTERED)
    ours = walk.step(IDS, np.arange(TOKENS))
    divergence = (own.softmax(-1) * (own.log_softmax(-1) - ours.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 0.01


def test_spec_tells_the_models_geometry():
    model = build("qwen2, upper windows")
    model.generation_config.eos_token_id = [2, 7]
    spec = Decoder.from_transformers(model).spec
    assert (spec.model_type, spec.num_layers, spec.hidden_size) == ("qwen2", 4, 64)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 2, 16, 384)
    assert spec.context_tokens == 2048
    assert spec.windows == (None, None, 20, 20)
    assert spec.attention_scale == 0.25
    assert spec.stop_token_ids == (2, 7)


def test_context_is_refused_when_it_is_longer_than_the_models():
    with pytest.raises(ConfigError, match="at most 2048"):
        Decoder.from_transformers(build("llama"), context_tokens=4096)
