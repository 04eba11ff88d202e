"""GGUF conversion: the same model and tokenizer as before, or a refusal with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cacheslide_agents.engine.errors import ModelError, UnsupportedModelError
from cacheslide_agents.engine.model.gguf import dense_copy, load_in_memory
from tests.engine.model.tiny_gguf import tiny_gguf
from tests.tiny import FAMILIES, tiny_tokenizer

PROMPT = torch.arange(40)[None] * 7 % 300


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(PROMPT).logits
    return logits


def _converted(source: Path, cache: Path) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(dense_copy(source, cache), dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_the_same_when_a_family_is_converted(family: str, tmp_path: Path) -> None:
    original = tiny_gguf(tmp_path / "tiny.gguf", family)
    converted = _converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert converted.config.model_type == family
    torch.testing.assert_close(_logits(converted), _logits(original), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_stay_the_same_when_embeddings_are_tied_or_not(tied: bool, tmp_path: Path) -> None:
    original = tiny_gguf(tmp_path / "tiny.gguf", tie_word_embeddings=tied)
    converted = _converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert converted.config.tie_word_embeddings is tied
    torch.testing.assert_close(_logits(converted), _logits(original), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 512,
            },
        ),
        ({"head_dim": 32}, {}),
        ({"num_key_value_heads": 1}, {}),
        ({"attention_bias": True}, {}),
    ],
    ids=["linear", "yarn", "wide-heads", "one-kv-head", "biases"],
)
def test_logits_stay_the_same_when_positions_or_heads_differ(
    overrides: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    original = tiny_gguf(tmp_path / "tiny.gguf", keys=keys, **overrides)
    converted = _converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    torch.testing.assert_close(_logits(converted), _logits(original), atol=1e-5, rtol=0)


def test_logits_stay_the_same_when_llama3_factors_are_given_as_a_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    factors = []  # as llama.cpp's converter computes them
    for wavelength in wavelengths:
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    original = tiny_gguf(
        tmp_path / "tiny.gguf",
        rope_parameters=rope,
        extra_tensors={"rope_freqs.weight": np.array(factors, dtype=np.float32)},
    )
    converted = _converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert converted.config.rope_parameters == rope
    torch.testing.assert_close(_logits(converted), _logits(original), atol=1e-5, rtol=0)


def test_sliding_window_survives_when_mistral_has_one(tmp_path: Path) -> None:
    original = tiny_gguf(tmp_path / "tiny.gguf", "mistral", sliding_window=8)
    converted = _converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert converted.config.sliding_window == 8
    torch.testing.assert_close(_logits(converted), _logits(original), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "stored", "bound"),
    [
        ("F32", torch.float32, 0.0),
        ("F16", torch.float16, 2**-11),
        ("BF16", torch.bfloat16, 2**-8),
        ("Q8_0", torch.float16, 0.02),
        ("Q4_1", torch.float16, 0.15),
    ],
)
def test_weights_keep_their_precision_when_stored(kind: str, stored: torch.dtype, bound: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    original = tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    weights = load_file(dense_copy(tmp_path / "tiny.gguf", tmp_path / "cache") / "model.safetensors")
    for name, expected in original.state_dict().items():
        found = weights[name]
        assert found.dtype == (stored if expected.ndim == 2 else torch.float32), name
        error = torch.linalg.vector_norm(found.float() - expected) / torch.linalg.vector_norm(expected)
        assert float(error) <= bound, name


def test_in_memory_model_equals_the_stored_one_when_dequantized(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    memory = load_in_memory(tmp_path / "tiny.gguf", torch.float32)
    stored = _converted(tmp_path / "tiny.gguf", tmp_path / "cache").state_dict()
    for name, weight in memory.weights.items():
        assert torch.equal(weight, stored[name]), name
    assert memory.generation.eos_token_id == 2


def test_tokenizer_and_stop_tokens_survive_when_converted(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", keys={})
    folder = dense_copy(tmp_path / "tiny.gguf", tmp_path / "cache")
    load: Any = AutoTokenizer.from_pretrained
    found, expected = load(folder), tiny_tokenizer()
    texts = ["I have 12345 apples", "List:\n\n1. tea\n 2. é😀 naïve", "<|im_start|>user\nhi<|im_end|>\n", " lead", ""]
    for text in texts:
        assert found(text).input_ids == expected(text).input_ids, text
        assert found.decode(found(text).input_ids) == text
    messages = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(messages, tokenize=False) == expected.apply_chat_template(messages, tokenize=False)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 0)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"architecture": "gemma2"}, "gemma2"),
        ({"pre": "unheard-of"}, "unheard-of"),
        ({"keys": {"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}}, "spiral"),
        ({"extra_tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}}, "ffn_gate_exps"),
        ({"extra_tensors": {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}}, "attn_q_norm"),
        ({"extra_tensors": {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}}, "rotary factors"),
    ],
    ids=["architecture", "tokenizer", "rope", "experts", "surplus-norm", "rope-factors"],
)
def test_file_is_refused_when_it_cannot_be_served_exactly(
    arguments: dict[str, Any], named: str, tmp_path: Path
) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", **arguments)
    with pytest.raises(UnsupportedModelError, match=named):
        dense_copy(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").glob("[!.]*/")) == []


def test_file_is_refused_when_a_tensor_is_missing(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", without="blk.2.ffn_up.weight")
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj"):
        dense_copy(tmp_path / "tiny.gguf", tmp_path / "cache")


@pytest.mark.parametrize("kept", [0, 3, 100, 0.5, 0.99])
def test_file_is_refused_when_cut_short(kept: float, tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    tiny_gguf(source)
    content = source.read_bytes()
    source.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(ModelError, match=r"tiny\.gguf.*download it again"):
        dense_copy(source, tmp_path / "cache")


def test_file_is_refused_when_values_are_not_finite(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    tiny_gguf(source)
    content = source.read_bytes()
    source.write_bytes(content[:-64] + np.full(16, np.nan, np.float32).tobytes())
    with pytest.raises(ModelError, match="not finite"):
        dense_copy(source, tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").glob("*/")) == []


def test_longrope_factors_survive_when_phi3_has_them(tmp_path: Path) -> None:
    short, long = [1.0 + 0.1 * step for step in range(4)], [2.0 + 0.5 * step for step in range(4)]
    original = tiny_gguf(
        tmp_path / "tiny.gguf",
        "phi3",
        keys={
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 1024,
            "rope.scaling.attn_factor": 1.1902381,
        },
        extra_tensors={
            "rope_factors_short.weight": np.array(short, np.float32),
            "rope_factors_long.weight": np.array(long, np.float32),
        },
        original_max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.1902381,
        },
    )
    converted = _converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert converted.config.rope_parameters["rope_type"] == "longrope"
    assert converted.config.rope_parameters["long_factor"] == pytest.approx(long)
    torch.testing.assert_close(_logits(converted), _logits(original), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q4_1"), ("qwen2", "Q8_0"), ("mistral", "F16")])
def test_weights_equal_transformers_own_reading_when_it_can_read_them(family: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    tiny_gguf(tmp_path / "tiny.gguf", family, kind=kind)
    ours = load_in_memory(tmp_path / "tiny.gguf", torch.float32).weights
    load: Any = AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=2**-11, atol=1e-7)
