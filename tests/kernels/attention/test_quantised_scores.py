"""Scores over records of every format, against the dequantised keys in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from flashq_launch import TOLERANCE, draw
from tiers import covering

from alspec.config import QUANTISED_CODECS
from alspec.kernels.attention.decode_quantised.quantised_scores import quantised_scores


@pytest.mark.parametrize(
    ("codec", "heads", "dtype"),
    covering(QUANTISED_CODECS, [(64, 3), (64, 8), (128, 1), (128, 5)], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_scores_are_those_of_the_dequantised_keys(
    codec: str, heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    head_dim, ratio = heads
    if dtype == torch.bfloat16 and device.type == "cpu":
        dtype = torch.float16  # the interpreter loads no bf16
    launch = draw((64 * 3 + 5, 64 * 3 + 64), ratio, 2, head_dim, device, 1, 0, codec, dtype=dtype)
    found = quantised_scores(launch.q, launch.layer, 3, 0.125).double().cpu()
    keys = launch.k[:, :, :192].double().repeat_interleave(ratio, 1)
    expected = 0.125 * math.log2(math.e) * (keys @ launch.q.double().cpu()[..., None])[..., 0]
    # q and its products with s_int are rounded to 16 bits of the largest.
    bound = TOLERANCE * launch.q.double().cpu().norm(dim=-1)[..., None] * keys.norm(dim=-1) * 0.125
    assert bool(((found - expected).abs() <= bound).all())
