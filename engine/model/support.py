"""Which models are served: everything that could not be exact here is refused with the reason and a remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .families import FAMILIES, Family

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SUPPORTED = f"supported model types are {', '.join(sorted(FAMILIES))}"


def check_config(config: Any) -> Family:
    """The family of a configuration, before any weight is read.

    Args:
        config: A transformers configuration.

    Raises:
        UnsupportedModelError: The architecture cannot be served exactly.
    """
    model_type = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{model_type!r} is an encoder-decoder; only decoder-only models have a KV cache to slide: {_SUPPORTED}"
        )
    family = FAMILIES.get(str(model_type))
    if family is None:
        kind = "looks like an encoder, or is a type" if _looks_like_encoder(config) else "is a model type"
        raise UnsupportedModelError(f"{model_type!r} {kind} that is not served here: {_SUPPORTED}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "alibi"):
        if getattr(config, name, None):
            raise UnsupportedModelError(
                f"{name} = {getattr(config, name)!r} changes attention or logits in a way that is not served: "
                f"use a checkpoint without it; {_SUPPORTED}"
            )
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    if partial not in (None, 1, 1.0) and not family.partial_rotary:
        raise UnsupportedModelError(
            f"partial_rotary_factor = {partial}, but {model_type} has no partial rotary: remove it from config.json"
        )
    return family


def check_model(model: Any) -> Family:
    """The family of a loaded model whose modules are what the family's code expects.

    Args:
        model: A transformers causal language model.

    Raises:
        UnsupportedModelError: Adapters, quantized or replaced modules, several devices or dtypes, hooks, no head.
    """
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} carries adapters that are not merged: call merge_and_unload() and wrap its result"
        )
    if not hasattr(model, "get_output_embeddings"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers model: load one with AutoModelForCausalLM; {_SUPPORTED}"
        )
    family = check_config(model.config)
    if model.get_output_embeddings() is None or not hasattr(model, "model"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head: load it with AutoModelForCausalLM"
        )
    home = f"transformers.models.{family.model_type}."
    for idx, layer in enumerate(model.model.layers):
        if not type(layer).__module__.startswith(home):
            raise UnsupportedModelError(
                f"layer {idx} is {type(layer).__module__}.{type(layer).__name__}, custom code that may differ from "
                f"transformers' own {family.model_type}: load it without trust_remote_code"
            )
        for name, module in family.linears(layer).items():
            _check_linear(f"layers.{idx}.{name}", module, model.config)
    _check_linear("lm_head", model.get_output_embeddings(), model.config)
    _check_tensors(model)
    return family


def _check_linear(name: str, module: nn.Module, config: Any) -> None:
    """Refuses anything but a plain dense linear layer."""
    if hasattr(module, "base_layer"):
        raise UnsupportedModelError(
            f"{name} carries an adapter that is not merged: call merge_and_unload() and wrap its result"
        )
    # Parametrized and quantized layers are subclasses or other classes whose weight alone is not what they compute.
    if type(module) is nn.Linear and module.weight.dtype in DTYPES:
        return
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = getattr(quantization, "quant_method", None) or getattr(quantization, "get", lambda _: None)(
            "quant_method"
        )
        raise UnsupportedModelError(
            f"{name} is quantized ({method or type(module).__name__}): load a dense checkpoint in float32, bfloat16 or "
            "float16; a GGUF file is dequantized on load"
        )
    dtype = getattr(getattr(module, "weight", None), "dtype", "no weight")
    raise UnsupportedModelError(
        f"{name} is a {type(module).__name__} ({dtype}) instead of a dense linear layer: load the model in float32, "
        "bfloat16 or float16 without replacing its modules"
    )


def _check_tensors(model: Any) -> None:
    """Refuses models that are spread over devices, mix dtypes or run hooks that this engine would not run."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise UnsupportedModelError(
            f"the weights lie on {', '.join(sorted(map(str, devices)))}, one device is served: load the model without "
            "device_map offloading"
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise UnsupportedModelError(
            f"the weights mix {', '.join(sorted(map(str, dtypes)))}: load the model in one dtype, model.to(dtype)"
        )
    hooked = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    if hooked:
        raise UnsupportedModelError(
            f"{hooked[0] or type(model).__name__} has forward hooks, which this engine does not run: remove them "
            f"({len(hooked)} modules have some)"
        )


def _looks_like_encoder(config: Any) -> bool:
    """Whether a configuration names masked-language or embedding heads only."""
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    return not any("CausalLM" in name or "LMHead" in name for name in architectures)
