"""Variants of TurboQuant against the formulas of the papers, in fp64: unit vectors, the nearest level by search."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from alspec.kernels.kv_codec.turboquant.codebook import UNITS, code_bytes
from alspec.kernels.kv_codec.turboquant.rotation import signed_hadamard
from alspec.kernels.kv_codec.turboquant.token_codes import compress_tokens, dequantize_tokens
from alspec.kernels.kv_codec.turboquant.variants import codebook_tokens, sketch_matrix, sketched_keys, uniform_values

# Lloyd-Max levels of N(0, 1), positive halves, as published.
PUBLISHED = {
    1: [0.7979],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1519],
    4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
}
HALF = 2.0**-11  # relative rounding of fp16, in which scales are stored


def tokens(head_dim: int, seed: int = 1) -> Tensor:
    """Stage-1 codes [2, 64, D] with a large channel, a token of zeros and a small token."""
    x = torch.randn(2, 64, head_dim, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 4
    q1 = (x * 20).round().clamp(-119, 119).to(torch.int8)
    q1[0, 5] = 0
    q1[1, 7] = torch.arange(head_dim) == 9
    return q1


def levels(bits: int) -> Tensor:
    """Levels of N(0, 1); those of more than one bit are rounded as the cache does."""
    if bits == 1:
        return torch.tensor([-0.7979, 0.7979], dtype=torch.float64)
    return (torch.tensor(code_bytes(bits), dtype=torch.float64) - 63.5) / UNITS[bits]


def reference(q1: Tensor, bits: int, is_key: bool) -> Tensor:
    """`|x| Pi^T c[index of the level nearest to Pi x / |x|]`, c = levels / sqrt(D); without Pi for values."""
    x, head_dim = q1.double(), q1.shape[-1]
    matrix = signed_hadamard(head_dim).double() if is_key else math.sqrt(head_dim) * torch.eye(head_dim).double()
    norm = x.norm(dim=-1, keepdim=True)
    unit = x @ matrix.T / (norm.clamp(min=1e-30) * math.sqrt(head_dim))
    c = levels(bits) / math.sqrt(head_dim)
    return norm * c[(unit[..., None] - c).abs().argmin(-1)] @ matrix / math.sqrt(head_dim)


def same_share(found: Tensor, expected: Tensor) -> float:
    """Share of tokens that agree within the rounding of scales; a coordinate between two levels may get either."""
    error = (found.double() - expected).norm(dim=-1)
    return float((error <= 2 * HALF * expected.norm(dim=-1) + 1e-9).double().mean())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_close_to_those_published(bits: int) -> None:
    assert levels(bits)[2 ** (bits - 1) :].tolist() == pytest.approx(PUBLISHED[bits], abs=0.5 / UNITS[bits])


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("is_key", [True, False])
def test_plain_norm(bits: int, head_dim: int, is_key: bool) -> None:
    q1 = tokens(head_dim)
    found = codebook_tokens(q1, bits, is_key, norm_correction=False)
    assert same_share(found, reference(q1, bits, is_key)) > 0.98
    assert not found[0, 5].any()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("is_key", [True, False])
def test_scales_are_those_of_the_cache(bits: int, is_key: bool) -> None:
    q1 = tokens(64)
    expected = dequantize_tokens(compress_tokens(q1, bits, is_key), bits, is_key, torch.float64)
    found = codebook_tokens(q1, bits, is_key, norm_correction=True)
    assert same_share(found, expected) == 1.0
    norm = expected.square().sum(-1)
    if is_key:  # least squares leave no part of a token's error along its codes
        assert bool((((q1.double() - expected) * expected).sum(-1).abs() <= 2 * HALF * norm + 1e-9).all())
    else:
        assert bool(((q1.double().square().sum(-1) - norm).abs() <= 4 * HALF * norm + 1e-9).all())


@pytest.mark.parametrize("sketch", ["gaussian", "orthogonal"])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("norm_correction", [True, False])
def test_scores_of_sketched_keys(sketch: str, bits: int, head_dim: int, norm_correction: bool) -> None:
    """`<q, m> + |r| corr <S q, sign(S r)>`."""
    q1 = tokens(head_dim)
    q = torch.randn(200, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    m = codebook_tokens(q1, bits - 1, True, norm_correction).double()
    s, r = sketch_matrix(sketch, head_dim).double(), q1.double() - m
    corr = math.sqrt(math.pi / 2) / head_dim if sketch == "gaussian" else math.sqrt(math.pi / (2 * head_dim))
    correction = r.norm(dim=-1)[..., None] * corr * (torch.sign(r @ s.T) @ (q @ s.T).T)
    found = sketched_keys(q1, bits, sketch, norm_correction).double() @ q.T
    rounding = 2 * HALF * r.norm(dim=-1).amax() * corr * (q @ s.T).abs().sum(-1).amax()
    torch.testing.assert_close(found, m @ q.T + correction, rtol=0, atol=float(rounding))
    # The correction estimates <q, r>.
    truth = r @ q.T
    assert float((correction * truth).sum() / truth.square().sum()) == pytest.approx(1, abs=0.1)


def test_sketch_matrices() -> None:
    gaussian, orthogonal = (sketch_matrix(kind, 64) for kind in ("gaussian", "orthogonal"))
    torch.testing.assert_close(orthogonal @ orthogonal.T, torch.eye(64), rtol=0, atol=1e-5)
    assert float(gaussian.std()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_uniform_values(bits: int) -> None:
    q1, last_code = tokens(64), 2**bits - 1
    found = uniform_values(q1, bits)
    for token, restored in zip(q1.flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
        low, step = min(token), float(np.float16((max(token) - min(token)) / last_code))
        expected = [low + step * (step and min(round((x - low) / step), last_code)) for x in token]
        # A value between two codes may get either.
        assert sum(abs(a - b) > 1e-4 for a, b in zip(restored, expected, strict=True)) <= 1
        assert max(abs(a - b) for a, b in zip(restored, token, strict=True)) <= step / 2 + last_code * step * HALF
        assert len(set(restored)) <= 2**bits
