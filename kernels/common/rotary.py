"""Rotary frequencies of a model, which may depend on the length of a text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RotaryFrequencies"]


class RotaryFrequencies(NamedTuple):
    """Frequencies of the channels of a head, in radians per token. D head_dim, C context before scaling.

        longrope: long_freq_c for texts of more than C tokens
        dynamic:  inv_freq_c s^(exponent_c),   s = 1 + factor max(n - C, 0) / C for a text of n tokens

    `rope_inv_freq` (models/rope.py) has the equations that they come from.
    """

    inv_freq: Tensor  # [D/2] fp32, for texts of up to C tokens; 0 for channels that are not rotated
    context: int = 0  # C; 0: one set for all lengths
    long_freq: Tensor | None = None  # [D/2] fp32: longrope
    factor: float = 0.0  # dynamic
    exponents: Tensor | None = None  # [D/2] fp64: dynamic

    def at(self, positions: Tensor, text_length: int | None = None) -> Tensor:
        """Frequencies of the tokens at these positions.

        Args:
            positions: [n] integers.
            text_length: tokens of the prompt that they belong to; None: each is the newest token of its text.
        Returns:
            [n, D/2] fp32; [D/2] or [1, D/2] if all are the same.
        """
        if not self.context:
            return self.inv_freq
        lengths = positions + 1 if text_length is None else positions.new_full((1,), text_length)
        beyond = (lengths[:, None] - self.context).clamp(min=0)
        if self.long_freq is not None:
            return torch.where(beyond > 0, self.long_freq, self.inv_freq)
        assert self.exponents is not None
        stretch = 1 + self.factor * (beyond.double() / self.context)
        return (self.inv_freq * stretch**self.exponents).float()
