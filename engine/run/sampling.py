"""Logits become the next token: penalties, temperature, top-k, top-p, one draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..config import SamplingParams
from ..errors import ModelError

MIN_TEMPERATURE = 1e-5
"""Temperatures below it are greedy: dividing by them overflows."""

_FIRST_CANDIDATES = (256, 4096)
"""Numbers of tokens that top-p looks at before it sorts the whole vocabulary (CPU)."""


class Sampler:
    """Draws one request's tokens.

    The order is repetition penalty, frequency and presence penalties, temperature, top-k, top-p (over what top-k
    left), draw. The draw gives each id of the vocabulary noise of its own, whatever the filters keep (the Gumbel-max
    trick): under one seed, logits that differ slightly nearly always give the same token. Penalties that are
    off cost nothing, and their state is kept from token to token. Everything stays on the device of the logits; a
    token costs one host synchronisation.

    Attributes:
        seed: What the noise was seeded with, drawn if the parameters have none.
    """

    def __init__(self, params: SamplingParams, prompt_ids: np.ndarray, device: torch.device) -> None:
        """Starts an answer.

        Args:
            params: How to sample.
            prompt_ids: (tokens,) int64; used by the repetition penalty alone.
            device: Where the logits will be.
        """
        self._params = params
        self._prompt_ids = prompt_ids
        self._device = device
        self._generator = torch.Generator(device)
        self.seed = self._generator.seed() >> 1 if params.seed is None else params.seed  # what settings allow
        self._generator.manual_seed(self.seed)
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._num_counted = 0

    def sample(self, logits: torch.Tensor, generated_ids: Sequence[int]) -> int:
        """Draws the next token.

        Args:
            logits: (vocab,) float32; left as they are.
            generated_ids: The answer so far. It grows from call to call.

        Raises:
            ModelError: The logits hold NaN or infinity, or allow no token.
        """
        assert logits.dim() == 1, logits.shape
        logits = self._penalized(logits.float(), generated_ids)
        top = logits.max()  # NaN if any logit is
        if self._params.temperature < MIN_TEMPERATURE:
            choice = logits.argmax()  # the lowest id among equals
        else:
            choice = self._draw((logits - top) / self._params.temperature)
        token_id, is_finite = torch.stack((choice, top.isfinite().to(choice.dtype))).tolist()
        if not is_finite:
            raise ModelError(
                f"the highest logit is {top.item()}, not a finite number, so no token can be chosen: the weights are "
                'damaged or overflow in their dtype; load the model with dtype="float32"'
            )
        return int(token_id)

    def _penalized(self, logits: torch.Tensor, generated_ids: Sequence[int]) -> torch.Tensor:
        params = self._params
        if params.repetition_penalty != 1.0 and self._seen is None:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.from_numpy(np.array(self._prompt_ids)).to(self._device)] = True
        if (params.presence_penalty or params.frequency_penalty) and self._counts is None:
            self._counts = torch.zeros_like(logits)
        for token_id in (
            generated_ids[self._num_counted :] if self._seen is not None or self._counts is not None else ()
        ):
            if self._seen is not None:
                self._seen[token_id] = True
            if self._counts is not None:
                self._counts[token_id] += 1.0
        self._num_counted = len(generated_ids)
        if self._seen is not None:
            penalty = params.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self._counts is not None:
            logits = logits - params.frequency_penalty * self._counts
            logits = logits - params.presence_penalty * (self._counts > 0)
        return logits

    def _draw(self, scaled: torch.Tensor) -> torch.Tensor:
        """Draws from scaled logits (vocab,), whose highest is 0; the id is a scalar int64 on the device."""
        params = self._params
        # In float64: float32 has too few values near 0 and 1 to give rare tokens of a large vocabulary their due.
        uniform = torch.rand(len(scaled), dtype=torch.float64, device=self._device, generator=self._generator)
        num_kept = min(params.top_k or len(scaled), len(scaled))
        if num_kept == len(scaled) and params.top_p == 1.0:
            return _race(scaled, uniform)
        values, ids = self._candidates(scaled, num_kept)
        return ids[_race(values, uniform[ids])]

    def _candidates(self, scaled: torch.Tensor, num_kept: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What top-k and top-p keep: values (candidates,), highest first, −inf for those left out, and ids."""
        top_p = self._params.top_p
        if num_kept < len(scaled):
            values, ids = scaled.topk(num_kept)
            return (values if top_p == 1.0 else _nucleus(values, values.softmax(0), top_p)), ids
        total = scaled.logsumexp(0)
        if scaled.device.type == "cpu":  # elsewhere sorting is quick and the comparison would wait for the device
            for num_first in _FIRST_CANDIDATES:
                values, ids = scaled.topk(min(num_first, len(scaled)))
                probabilities = (values - total).exp()
                if probabilities.sum() >= top_p:
                    return _nucleus(values, probabilities, top_p), ids
        values, ids = scaled.sort(descending=True)
        return _nucleus(values, (values - total).exp(), top_p), ids


def _race(scaled: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index of one token drawn by weight exp(scaled): argmax of weight / exponential noise, as Gumbel's."""
    noise = uniform.clamp_(min=torch.finfo(uniform.dtype).tiny).log_().neg_()
    noise = noise.clamp_(min=torch.finfo(uniform.dtype).tiny)
    return scaled.exp().div(noise).argmax()


def _nucleus(values: torch.Tensor, probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the smallest head of a descending list that reaches `top_p`; the first one always stays."""
    before = probabilities.cumsum(0) - probabilities
    return values.masked_fill(before >= top_p, float("-inf"))
