from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from cacheslide_agents.engine.errors import UnsupportedModelError
from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.model.support import check_config, check_model
from tests.tiny import FAMILIES, tiny_model

SUPPORTED = "llama, mistral, phi3, qwen2, qwen3"


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_found_when_supported(family):
    assert check_model(tiny_model(family)).model_type == family


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(architectures=["GPT2LMHeadModel"]), "'gpt2' is a model type that is not served here"),
        (T5Config(is_encoder_decoder=True), "'t5' is an encoder-decoder"),
        (BertConfig(), "'bert' looks like an encoder"),
    ],
)
def test_architecture_is_refused_when_unknown_and_the_supported_are_named(config, reason):
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*{SUPPORTED}"):
        check_config(config)


def test_softcapping_is_refused_when_a_config_asks_for_it():
    config = LlamaConfig()
    config.attn_logit_softcapping = 50.0
    with pytest.raises(UnsupportedModelError, match=r"attn_logit_softcapping = 50\.0"):
        check_config(config)


def test_partial_rotary_is_refused_when_the_family_has_none():
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5"):
        check_config(config)


def test_dynamic_rotary_is_refused_when_wrapped():
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match=r"dynamic.*yarn"):
        Decoder.from_transformers(model)


def test_adapters_are_refused_when_not_merged():
    model: Any = tiny_model("llama")
    model.peft_config = {}
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        check_model(model)
    injected: Any = tiny_model("llama")
    injected.model.layers[1].self_attn.q_proj.base_layer = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.q_proj carries an adapter"):
        check_model(injected)


def test_quantized_layers_are_refused_when_they_have_no_dense_form():
    class Linear4bit(nn.Linear):
        pass

    model: Any = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert check_model(model).model_type == "llama"
    model.model.layers[0].mlp.up_proj = Linear4bit(64, 128)
    with pytest.raises(UnsupportedModelError, match=r"mlp\.up_proj is quantized \(bitsandbytes\).*dense"):
        check_model(model)
    del model.config.quantization_config
    with pytest.raises(UnsupportedModelError, match="is a Linear4bit"):
        check_model(model)


def test_parametrized_layers_are_refused_when_their_weight_is_computed():
    model: Any = tiny_model("llama")
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.o_proj"):
        check_model(model)


def test_model_is_refused_when_it_has_no_head():
    model: Any = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
        check_model(model.model)


def test_object_is_refused_when_it_is_no_transformers_model():
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        check_model(nn.Linear(2, 2))


def test_custom_code_is_refused_when_it_uses_a_known_type():
    class OtherLayer(LlamaDecoderLayer):
        pass

    model: Any = tiny_model("llama")
    model.model.layers[2] = OtherLayer(model.config, 2)
    with pytest.raises(UnsupportedModelError, match=r"layer 2 is .*OtherLayer, custom code"):
        check_model(model)


def test_model_is_refused_when_weights_are_mixed_or_away():
    mixed: Any = tiny_model("llama")
    mixed.model.norm.to(torch.float64)
    with pytest.raises(UnsupportedModelError, match=r"mix torch\.float32, torch\.float64"):
        check_model(mixed)
    away: Any = tiny_model("llama")
    away.model.layers[3].to("meta")
    with pytest.raises(UnsupportedModelError, match="cpu, meta"):
        check_model(away)


def test_hooks_are_refused_when_they_would_not_run():
    model: Any = tiny_model("llama")
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 has forward hooks"):
        check_model(model)
    handle.remove()
    check_model(model)
