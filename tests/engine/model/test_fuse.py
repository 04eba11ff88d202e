from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.model.fuse import FEW_ROWS, fuse, projection
from tests.tiny import FAMILIES, tiny_model

IDS = torch.randint(3, 384, (1, 40), generator=torch.Generator().manual_seed(3))


def storages(model: Any) -> dict[int, int]:
    """Bytes of every distinct storage behind a model's parameters."""
    parts = [parameter.untyped_storage() for parameter in model.parameters()]
    return {part.data_ptr(): part.nbytes() for part in parts}


def decoder_storages(decoder: Decoder) -> set[int]:
    tensors = [decoder._embedding, decoder._norm, decoder._head.weight]
    for layer in decoder._layers:
        tensors += [layer.input_norm, layer.mlp_norm]
        for part in (layer.qkv, layer.out, layer.gate_up, layer.down):
            tensors += [tensor for tensor in part if tensor is not None]
        tensors += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_wrapped_model_answers_as_before_when_fused(family):
    model = tiny_model(family)
    with torch.inference_mode():
        before = model(IDS).logits
        Decoder.from_transformers(model)
        after = model(IDS).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once_when_fused(family, tied):
    model: Any = tiny_model(family, tie_word_embeddings=tied)
    bytes_before = sum(storages(model).values())
    decoder = Decoder.from_transformers(model)
    held = storages(model)
    assert sum(held.values()) == bytes_before
    assert decoder_storages(decoder) == set(held)


def test_projections_are_views_when_fused():
    model: Any = tiny_model("qwen2")
    decoder = Decoder.from_transformers(model)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    layer = decoder._layers[1]
    assert attention.q_proj.weight.data_ptr() == layer.qkv.weight.data_ptr()
    assert attention.k_proj.weight.data_ptr() == layer.qkv.weight[64:].data_ptr()
    assert layer.qkv.bias is not None
    assert attention.v_proj.bias.data_ptr() == layer.qkv.bias[96:].data_ptr()
    assert mlp.up_proj.weight.data_ptr() == layer.gate_up.weight[128:].data_ptr()


def test_memory_is_shared_when_one_model_is_wrapped_twice():
    model = tiny_model("llama")
    first, second = Decoder.from_transformers(model), Decoder.from_transformers(model)
    assert decoder_storages(first) == decoder_storages(second)


def test_weights_survive_when_a_fused_model_is_saved(tmp_path: Path):
    model = tiny_model("llama", attention_bias=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Decoder.from_transformers(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_outputs_are_concatenated_when_layers_are_fused():
    layers = [nn.Linear(6, width) for width in (4, 2, 3)]
    x = torch.randn(5, 6)
    separate = torch.cat([layer(x) for layer in layers], dim=-1)
    fused = fuse(*layers)
    torch.testing.assert_close(nn.functional.linear(x, *fused), separate)
    assert fuse(*layers).weight.data_ptr() == fused.weight.data_ptr()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 8, FEW_ROWS, FEW_ROWS + 1])
def test_product_is_the_linear_layers_whichever_way_round_it_is_made(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(24, 40, bias=bias)
    hidden = torch.randn(rows, 24)
    with torch.inference_mode():
        torch.testing.assert_close(projection(linear)(hidden), linear(hidden), atol=1e-6, rtol=1e-5)
