"""INT8 prefill attention against the fp64 oracle over the dequantised keys and values: interpreted on CPU, or compiled.

The tolerances follow from the steps of quantisation, with s_Q = max|q| / 127 of a row:
- q rounds by s_Q / 2 in each channel at most, by s_Q / sqrt(12) on average. So a score differs by
  delta = sm_scale |k| s_Q / sqrt(12). A sum of independent values then differs by delta times its size, because the
  weights differ by delta each, with random signs.
- P and V round to fp16: by about 1.4 * 2^-11 / sqrt(12) each on average; both together count as 4e-4.
- The integer score rounds by half a unit, sm_scale s_K s_Q / 2 nats, in each block of 64 tokens.
- o rounds to the dtype of q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from tiers import covering
from torch import Tensor

from alspec.kernels.attention.oracles import int8_prefill_attention_ref
from alspec.kernels.attention.prefill.int8_prefill import int8_prefill_attention
from alspec.sas import DROPPED_MASS, RELATIVE_ERROR, Softmax

HAS_CUDA = torch.cuda.is_available()
P_AND_V = 4e-4
OUT = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
SAS = {"exact": 0.0, "sas": 2 * (RELATIVE_ERROR + DROPPED_MASS)}

by_softmax = pytest.mark.parametrize("softmax", ["exact", "sas"])


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The kernel runs in the interpreter, or compiled on a GPU."""
    return torch.device(request.param)


def quantize_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [H, n, D] -> int8 of the same shape in [-119, 119], scales [H, ceil(n / 64)]."""
    heads, num_tokens, head_dim = x.shape
    blocks = -(-num_tokens // 64)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * 64 - num_tokens)).view(heads, blocks, -1)
    scale = padded.abs().amax(2) / 119
    scale[scale == 0] = 1
    return (padded / scale[..., None]).round().to(torch.int8).view(heads, -1, head_dim)[:, :num_tokens], scale


@dataclass
class Case:
    q: Tensor
    k8: Tensor
    v8: Tensor
    k_scale: Tensor
    v_scale: Tensor
    sm_scale: float

    @classmethod
    def draw(
        cls,
        num_queries: int,
        num_tokens: int,
        heads: tuple[int, int],
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        """Random tokens. The caches hold noise behind the last token."""
        generator = torch.Generator(device).manual_seed(num_tokens * 7 + num_queries)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def cache() -> tuple[Tensor, Tensor]:
            q1, scale = quantize_to_int8(normal(heads[1], num_tokens, head_dim))
            noisy = torch.randint(-127, 128, (heads[1], num_tokens + 70, head_dim), dtype=torch.int8, device=device)
            noisy[:, :num_tokens] = q1
            return noisy[:, :num_tokens], scale

        q = normal(num_queries, heads[0], head_dim).to(dtype)
        (k8, k_scale), (v8, v_scale) = cache(), cache()
        return cls(q, k8, v8, k_scale, v_scale, head_dim**-0.5)

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.q, self.k8, self.v8, self.k_scale, self.v_scale, self.sm_scale

    def score_error(self) -> float:
        """delta of the worst row: how much the rounding of q changes a score, in nats, on average over tokens."""
        s_q = float(self.q.double().abs().amax()) / 127
        norms = (self.k8.double().norm(dim=2).unflatten(0, (-1, 1)) * self._blocks(self.k_scale)).amax()
        return self.sm_scale * float(norms) * s_q / math.sqrt(12)

    def unit(self) -> float:
        """Half a unit of the integer score, in nats."""
        return self.sm_scale * float(self.q.double().abs().amax()) / 127 * float(self.k_scale.max()) / 2

    def _blocks(self, scale: Tensor) -> Tensor:
        return scale.double().repeat_interleave(64, 1)[:, None, : self.k8.shape[1]]

    def check(self, out: Tensor, lse: Tensor, tolerance: float) -> None:
        expected, expected_lse = int8_prefill_attention_ref(*self.args())
        assert out.dtype == self.q.dtype
        assert out.shape == self.q.shape
        assert lse.shape == self.q.shape[:2]
        assert not out.isnan().any()
        error = float((out.double() - expected).norm() / expected.norm())
        assert error < tolerance + OUT[out.dtype], f"relative RMS error {error:.2e}, tolerance {tolerance:.2e}"
        # A weighted mean of errors is less than the largest error, which is a few delta among so many scores.
        worst = float((lse.double() - expected_lse).abs().max()) / math.log2(math.e)
        assert worst < 6 * tolerance, f"lse differs by {worst:.2e} nats"


SHAPES = [(1, 1), (1, 64), (1, 200), (65, 65), (130, 200), (5, 129), (257, 257), (70, 400)]


@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "softmax"),
    covering(SHAPES, [(2, 2), (4, 1), (8, 2)], [64, 128], ["exact", "sas"]),
    ids=str,
)
def test_output_and_lse_match_the_oracle(
    lengths: tuple[int, int], heads: tuple[int, int], head_dim: int, softmax: Softmax, device: torch.device
) -> None:
    num_queries, num_tokens = lengths
    case = Case.draw(num_queries, num_tokens, heads, head_dim, device)
    out, lse = int8_prefill_attention(*case.args(), softmax)
    case.check(out, lse, case.score_error() + P_AND_V + SAS[softmax])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_queries_of_16_bits_give_outputs_of_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    case = Case.draw(70, 140, (4, 2), 128, device, dtype)
    case.check(*int8_prefill_attention(*case.args()), case.score_error() + P_AND_V)


def make_queries_representable(case: Case) -> None:
    """Queries of integers up to 127, times a power of two per row, lose nothing as INT8."""
    generator = torch.Generator(case.q.device).manual_seed(1)
    integers = torch.randint(-127, 128, case.q.shape, generator=generator, device=case.q.device).float()
    integers[..., 5] = 127
    exponent = torch.randint(-7, -4, (*case.q.shape[:2], 1), generator=generator, device=case.q.device)
    case.q = integers * 2.0**exponent


@by_softmax
def test_only_p_and_v_round_if_queries_are_representable(softmax: Softmax, device: torch.device) -> None:
    case = Case.draw(129, 321, (4, 2), 64, device)
    make_queries_representable(case)
    tolerance = P_AND_V + 2 * case.unit()
    assert tolerance < case.score_error() / 10, "the tolerance must be tighter than with rounded queries"
    case.check(*int8_prefill_attention(*case.args(), softmax), tolerance + SAS[softmax])


@pytest.mark.parametrize(("head_dim", "growth", "softmax"), covering([64, 128], [1.05, 1.3], ["exact", "sas"]))
def test_the_maximum_may_grow_from_tile_to_tile(
    head_dim: int, growth: float, softmax: Softmax, device: torch.device
) -> None:
    """It grows by less than a power of two in some rows and tiles, by ten or twenty powers of two in others."""
    case = Case.draw(150, 1100, (4, 2), head_dim, device)
    make_queries_representable(case)
    blocks = torch.arange(case.k_scale.shape[1], device=device)
    case.k_scale *= growth ** (blocks - blocks[-1])
    case.sm_scale *= 4
    case.check(*int8_prefill_attention(*case.args(), softmax), P_AND_V + 2 * case.unit() + SAS[softmax])


@by_softmax
def test_queries_keys_and_values_may_be_zero(softmax: Softmax, device: torch.device) -> None:
    """A query of zeros gives the mean of V."""
    case = Case.draw(70, 150, (4, 2), 64, device)
    case.q[::2] = 0
    case.k8[:, 64:128] = 0
    case.v8[0] = 0
    out, lse = int8_prefill_attention(*case.args(), softmax)
    case.check(out, lse, case.score_error() + P_AND_V + SAS[softmax])
    assert (out[:, :2] == 0).all()
    lengths = torch.arange(81, 151, device=device)[::2]
    torch.testing.assert_close(lse[::2], torch.log2(lengths)[:, None].expand(-1, 4), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_tokens", "block"), [(260, 1), (1100, 7)])
def test_outliers_keep_the_output_finite(num_tokens: int, block: int, device: torch.device) -> None:
    """One block and one channel of q have a hundred times the scale of the others. Scores reach thousands."""
    case = Case.draw(100, num_tokens, (4, 2), 64, device)
    case.k_scale[:, block] *= 100
    case.v_scale[:, 2] *= 100
    case.q[..., 3] *= 100
    out, lse = int8_prefill_attention(*case.args())
    _, expected_lse = int8_prefill_attention_ref(*case.args())
    assert out.isfinite().all()
    # The error of a score is half of s_Q in every channel at most.
    s_q = case.q.abs().amax(2) / 127
    norm1 = float((case.k8.double().abs().sum(2) * case._blocks(case.k_scale)[:, 0]).amax())
    bound = case.sm_scale * s_q.double() / 2 * norm1 + 1e-3
    assert ((lse.double() - expected_lse).abs() / math.log2(math.e) < bound).all()
    largest_value = (case.v8.double().abs().amax(2) * case._blocks(case.v_scale)[:, 0]).max()
    assert float(out.abs().max()) <= 1.001 * float(largest_value)


@by_softmax
def test_sharp_queries_find_their_token(softmax: Softmax, device: torch.device) -> None:
    """The score of one earlier token is far above the others, so a wrong mask or order shows at once."""
    n, dim = 200, 128
    generator = torch.Generator(device).manual_seed(4)
    keys = torch.randn(1, n, dim, generator=generator, device=device)
    values = torch.randn(1, n, dim, generator=generator, device=device)
    (k8, k_scale), (v8, v_scale) = quantize_to_int8(keys), quantize_to_int8(values)
    target = (torch.rand(n, generator=generator, device=device) * torch.arange(1, n + 1, device=device)).long()
    q = 8 * keys[0, target][:, None]
    out, _ = int8_prefill_attention(q, k8, v8, k_scale, v_scale, dim**-0.5, softmax)
    expected = (v8.float() * v_scale.repeat_interleave(64, 1)[:, :n, None])[0, target]
    torch.testing.assert_close(out[:, 0], expected, rtol=2e-3, atol=2e-3)


def test_early_tokens_keep_their_weight(device: torch.device) -> None:
    """8K tokens have equal weights and values +1, then -1. Their mean is 0; a factor of 0.9996 per tile gives -0.01."""
    n, dim = 8192, 64
    q = torch.zeros(1, 1, dim, device=device)
    k8 = torch.ones(1, n, dim, dtype=torch.int8, device=device)
    v8 = torch.full((1, n, dim), 119, dtype=torch.int8, device=device)
    v8[:, n // 2 :] = -119
    scale = torch.full((1, n // 64), 1 / 119, device=device)
    out, lse = int8_prefill_attention(q, k8, v8, scale, scale, 1.0, "sas")
    assert out.abs().max() < 1e-5
    assert (lse - 13).abs().max() < 1e-5


def test_prompt_chunks_give_the_whole(device: torch.device) -> None:
    """Each row has the same numbers, except for the order of sums."""
    case = Case.draw(200, 200, (4, 2), 64, device)
    out, lse = int8_prefill_attention(*case.args())
    for begin, end in ((0, 70), (70, 71), (71, 200)):
        k8, v8 = case.k8[:, :end], case.v8[:, :end]
        blocks = -(-end // 64)
        k_scale, v_scale = case.k_scale[:, :blocks].contiguous(), case.v_scale[:, :blocks].contiguous()
        part = int8_prefill_attention(case.q[begin:end].contiguous(), k8, v8, k_scale, v_scale, case.sm_scale)
        torch.testing.assert_close(part[0], out[begin:end], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(part[1], lse[begin:end], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": torch.zeros(4, 3, 64)}, "q"),
        ({"q": torch.zeros(9, 4, 64)}, "q"),
        ({"q": torch.zeros(4, 4, 80)}, "head_dim"),
        ({"k8": torch.zeros(2, 8, 64)}, "k8"),
        ({"v8": torch.zeros(2, 7, 64, dtype=torch.int8)}, "v8"),
        ({"k_scale": torch.ones(2, 2)}, "k_scale"),
        ({"v_scale": torch.ones(2, 1, dtype=torch.float64)}, "v_scale"),
        ({"sm_scale": 0.0}, "sm_scale"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Tensor], name: str) -> None:
    cache = torch.zeros(2, 8, 64, dtype=torch.int8)
    scale = torch.ones(2, 1)
    good = {"q": torch.zeros(4, 4, 64), "k8": cache, "v8": cache, "k_scale": scale, "v_scale": scale, "sm_scale": 1.0}
    with pytest.raises(ValueError, match=name):
        int8_prefill_attention(**{**good, **change})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("lengths", "head_dim", "softmax"),
    covering([(8192, 8192), (4096, 32768), (1000, 5555)], [64, 128], ["exact", "sas"]),
    ids=str,
)
def test_real_shapes_match_the_oracle(lengths: tuple[int, int], head_dim: int, softmax: Softmax) -> None:
    num_queries, num_tokens = lengths
    case = Case.draw(num_queries, num_tokens, (32, 8), head_dim, torch.device("cuda"), torch.bfloat16)
    out, lse = int8_prefill_attention(*case.args(), softmax)
    for begin in (0, num_queries // 2 - 17, num_queries - 60):
        end = begin + 60
        seen = num_tokens - num_queries + end
        k8, v8 = case.k8[:, :seen], case.v8[:, :seen]
        rows = Case(case.q[begin:end], k8, v8, case.k_scale, case.v_scale, case.sm_scale)
        rows.check(out[begin:end], lse[begin:end], rows.score_error() + P_AND_V + SAS[softmax])


@pytest.mark.parametrize(
    ("lengths", "operand", "softmax"),
    covering([(200, 200), (70, 400)], ["q", "k", "v"], ["exact", "sas"]),
    ids=str,
)
def test_nan_reaches_the_rows_that_read_it(
    lengths: tuple[int, int], operand: str, softmax: Softmax, device: torch.device
) -> None:
    """NaN in q reaches its row alone. NaN in a block of K or V reaches every row that attends to it, in its heads.

    It may reach earlier rows of the same tile, because their weight of 0 times NaN is NaN.
    """
    num_queries, num_tokens = lengths
    case = Case.draw(num_queries, num_tokens, (4, 2), 64, device)
    whole, _ = int8_prefill_attention(*case.args(), softmax)
    expected, allowed = torch.zeros(2, num_queries, 4, dtype=torch.bool, device=device)
    if operand == "q":
        case.q[65, 1, 7] = torch.nan
        expected[65, 1] = allowed[65, 1] = True
    else:
        block, before = num_tokens // 64 // 2, num_tokens - num_queries
        (case.k_scale if operand == "k" else case.v_scale)[1, block] = torch.nan
        expected[max(64 * block - before, 0) :, 2:] = True
        allowed[max(64 * block // 128 * 128 - before, 0) :, 2:] = True
    out, lse = int8_prefill_attention(*case.args(), softmax)
    assert bool(out.isnan().all(2)[expected].all())
    assert not bool(out.isnan().any(2)[~allowed].any())
    assert torch.equal(out[~allowed], whole[~allowed])
    if operand != "v":
        assert bool(lse.isnan()[expected].all())
