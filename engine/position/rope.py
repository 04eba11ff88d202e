"""Rotary position embedding: a model's fixed frequencies, rotating projections, and moving cached keys.

The frequencies come from plain attributes of a transformers configuration and equal transformers' own. Kinds whose
frequencies follow the prompt (`dynamic`) are refused: a key cached under one set could not be read under another.
Nothing here knows pages or modules.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedModelError
from ..model.spec import RopeSpec

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
"""Rotary kinds whose frequencies do not depend on the prompt."""


class Rotary(NamedTuple):
    """The rotation of some rows.

    Attributes:
        cos: (rows, 1, rotary_dim), the rows' cosines, both halves alike.
        sin: (rows, 1, rotary_dim), the rows' sines, negated in the first half, so that
            `x * cos + roll(x, rotary_dim / 2) * sin` is the rotated row.
    """

    cos: Tensor
    sin: Tensor

    def rows(self, index: slice | Tensor) -> Rotary:
        """The rotation of some of the rows."""
        return Rotary(self.cos[index], self.sin[index])


def served_context(config: Any, context_tokens: int | None = None) -> int:
    """The longest sequence that a model is served with.

    A longrope model has one set of frequencies up to its original context and another beyond it. They are fixed
    here, so by default its context ends where the short set does; who asks for more gets the long set for everything.

    Args:
        config: A transformers configuration.
        context_tokens: What the user asks for; None is the model's own.

    Raises:
        ConfigError: The model's positions do not reach that far.
    """
    limit = int(config.max_position_embeddings)
    default = limit
    parameters = _parameters(config)
    original = parameters.get("original_max_position_embeddings")
    if parameters["rope_type"] == "yarn" and original and parameters.get("factor"):
        limit = max(limit, int(original * parameters["factor"]))
    if parameters["rope_type"] == "longrope":
        default = min(limit, int(original or limit))
    if context_tokens is None:
        return default
    if context_tokens > limit:
        raise ConfigError(
            f"max_context_tokens = {context_tokens}, but this {config.model_type} model's positions end at {limit}: "
            f"ask for at most {limit} tokens"
        )
    return context_tokens


def rope_spec(config: Any, context_tokens: int | None = None) -> RopeSpec:
    """A model's inverse frequencies, equal to those that transformers computes.

    Args:
        config: A transformers configuration; only plain attributes are read.
        context_tokens: Longest sequence to be served; only longrope depends on it (see `served_context`).

    Raises:
        ConfigError: `context_tokens` is more than the model's positions reach.
        UnsupportedModelError: The frequencies depend on the prompt or the layer, or the kind is unknown.
    """
    parameters = _parameters(config)
    context = served_context(config, context_tokens)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    wavelengths = parameters["rope_theta"] ** exponents
    inv_freq, scaling = 1.0 / wavelengths, 1.0
    match parameters["rope_type"]:
        case "linear":
            inv_freq = inv_freq / parameters["factor"]
        case "llama3":
            inv_freq = _llama3(inv_freq, parameters)
        case "yarn":
            inv_freq, scaling = _yarn(wavelengths, rotary_dim, config.max_position_embeddings, parameters)
        case "longrope":
            inv_freq, scaling = _longrope(wavelengths, context, config.max_position_embeddings, parameters)
    return RopeSpec(inv_freq=inv_freq, rotary_dim=rotary_dim, attention_scaling=scaling)


def rotary_at(positions: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype) -> Rotary:
    """The rotation of rows at given positions, rounded where transformers rounds.

    Args:
        positions: (rows,) int64.
        inv_freq: (rotary_dim / 2,) float32, on the positions' device.
        attention_scaling: Factor on cos and sin.
        dtype: The model's; angles, cosines and scaling are computed in float32 and cast last.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    if attention_scaling != 1.0:
        cos, sin = cos * attention_scaling, sin * attention_scaling
    return _both_halves(cos, sin, dtype)


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates the leading `rotary_dim` dimensions of every head in place.

    Args:
        x: (rows, heads, head_dim), any strides; changed in place.
        rotary: The rows' rotation, same dtype.

    Returns:
        `x`.
    """
    cos, sin = rotary
    rotary_dim = cos.shape[-1]
    rotated = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    swapped = rotated.roll(rotary_dim // 2, -1)
    rotated.mul_(cos).addcmul_(swapped, sin)
    return x


def turn_by(deltas: int | Tensor, rope: RopeSpec, device: torch.device | str = "cpu") -> Rotary:
    """The rotation that moves keys by some positions; compute it once, use it for all layers.

    Angles are computed in float64 (positions may be large), cosines rounded to float32. The attention scaling is
    left out: cached keys carry it already.

    Args:
        deltas: Positions to move by, one int for all keys or (tokens,) int64; may be negative.
        rope: The model's rotary embedding.
        device: Where the keys lie.

    Returns:
        float32, of one row for an int, else of as many rows as `deltas`.
    """
    steps = torch.as_tensor(deltas, dtype=torch.float64).to(device).reshape(-1, 1)
    angles = steps * rope.inv_freq.to(device, torch.float64)
    return _both_halves(angles.cos(), angles.sin(), torch.float32)


def rotate_keys(keys: Tensor, deltas: int | Tensor | Rotary, rope: RopeSpec, out: Tensor | None = None) -> Tensor:
    """Moves cached keys from positions p to p + delta by one more rotation, in float32.

    Args:
        keys: (..., tokens, kv_heads, head_dim), model dtype, rotated at their old positions.
        deltas: One int for all, (tokens,) int64, or what `turn_by` made of either.
        rope: The model's rotary embedding.
        out: Same shape and dtype, receives the result; may be `keys` itself. None makes a new tensor.

    Returns:
        The keys, rotated at their new positions: `out` if given.
    """
    cos, sin = deltas if isinstance(deltas, Rotary) else turn_by(deltas, rope, keys.device)
    if out is None:
        out = torch.empty_like(keys)
    head = keys[..., : rope.rotary_dim].float()
    out[..., : rope.rotary_dim] = (head * cos).addcmul_(head.roll(rope.rotary_dim // 2, -1), sin)
    if rope.rotary_dim < keys.shape[-1] and out is not keys:
        out[..., rope.rotary_dim :] = keys[..., rope.rotary_dim :]
    return out


def _both_halves(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotary:
    """(rows, rotary_dim / 2) cosines and sines as a `Rotary`."""
    return Rotary(
        torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
    )


def _parameters(config: Any) -> dict[str, Any]:
    """The configuration's rotary parameters, with a kind that is supported.

    Raises:
        UnsupportedModelError: There are none, they differ between layers, or the kind is not supported.
    """
    supported = f"supported are {', '.join(ROPE_KINDS)}"
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError(
            f"this {config.model_type} model has another rotary embedding for each kind of layer "
            f"({', '.join(parameters)}), which cannot be re-rotated as one: {supported}, the same in all layers"
        )
    if parameters.get("rope_theta") is None:
        raise UnsupportedModelError(f"this {config.model_type} model has no rotary frequencies: {supported}")
    kind = parameters.get("rope_type", "default")
    if kind == "dynamic":
        raise UnsupportedModelError(
            "rotary kind 'dynamic' changes its frequencies with the length of the prompt, so cached keys could not be "
            f"reused exactly: {supported} (yarn extends a context with fixed frequencies)"
        )
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rotary kind {kind!r} is not known here: {supported}")
    return {**parameters, "rope_type": kind}


def _llama3(inv_freq: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    stretched = torch.where(wavelengths > original / low, inv_freq / factor, inv_freq)
    share = (original / wavelengths - low) / (high - low)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, (1 - share) * stretched / factor + share * stretched, stretched)


def _yarn(wavelengths: Tensor, rotary_dim: int, max_positions: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): frequencies and attention scaling."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original
    scaling = parameters.get("attention_factor")
    if scaling is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scaling = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor)

    def dimension(rotations: float) -> float:
        """The dimension that turns this often over the original context."""
        base = parameters["rope_theta"]
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept, float(scaling)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention scaling for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    wavelengths: Tensor, context: int, max_positions: int, parameters: dict[str, Any]
) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): short factors up to the original context, long ones if more is served."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original
    scaling = parameters.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    stretch = parameters["long_factor" if context > original else "short_factor"]
    return 1.0 / (torch.tensor(stretch, dtype=torch.float32) * wavelengths), float(scaling)
