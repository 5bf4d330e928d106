"""Store, append, compact and restore of the quantised cache against their oracles, bit for bit."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from flashq_layers import assert_same, noisy_layer, on_cpu
from tiers import covering
from torch import Tensor

from alspec.kernels.attention.oracles import qkv_rope_append_ref
from alspec.kernels.comm.ll_packets import unpack_packets
from alspec.kernels.kv_codec import codec_kernels
from alspec.kernels.kv_codec.codec_kernels import kv_append, kv_compact, kv_restore, kv_store
from alspec.kernels.kv_codec.codec_reference import (
    kv_append_ref,
    kv_compact_ref,
    kv_dequantize,
    kv_restore_ref,
    kv_store_ref,
)
from alspec.kernels.kv_codec.flashq.quantize import MIN_SCALE, fake_quantize
from alspec.kernels.kv_codec.formats import record_words
from alspec.kernels.kv_codec.quantised_layer import BLOCK, QuantisedLayer
from alspec.kernels.linear.projections import qkv_rope_append

HAS_CUDA = torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_head_dim = pytest.mark.parametrize("head_dim", [64, 128])


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The kernels run in the interpreter, or compiled on a GPU."""
    return torch.device(request.param)


def draw(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """k and v. k is a view with other strides than v; the channels have different sizes, and one is constant."""
    sizes = torch.rand(heads, head_dim) * 4 + 0.1
    x = torch.randn(num_tokens, 3 * heads, head_dim) * sizes.repeat(3, 1) + torch.randn(3 * heads, head_dim)
    x[:, :, 3] = 0.5
    x = x.to(dtype).to(device)
    return x[:, heads : 2 * heads], x[:, 2 * heads :].clone()


def buffers(heads: int, num_tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """k8, v8, k_scale, v_scale, as views of longer tensors."""
    blocks = -(-num_tokens // BLOCK)
    q8 = torch.full((2, heads, num_tokens + 64, head_dim), 77, dtype=torch.int8, device=device)
    scale = torch.full((2, heads, blocks + 1), torch.nan, device=device)
    return *q8[:, :, 64:].unbind(0), *scale[:, :, 1:].unbind(0)


def store_and_compare(
    k: Tensor, v: Tensor, layer: QuantisedLayer, expected: QuantisedLayer, request: int, start: int
) -> tuple[Tensor, ...]:
    num_tokens, heads, head_dim = k.shape
    found_out = buffers(heads, num_tokens, head_dim, k.device)
    expected_out = buffers(heads, num_tokens, head_dim, torch.device("cpu"))
    kv_store(k, v, layer, request, start, *found_out)
    kv_store_ref(k.cpu(), v.cpu(), expected, request, start, *expected_out)
    assert_same(layer, expected)
    for a, b in zip(found_out, expected_out, strict=True):
        assert torch.equal(a.cpu(), b)
    return found_out


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "dtype"), covering([1, 63, 64, 65, 130], [64, 128], DTYPES), ids=str
)
def test_store_writes_records_tail_and_scales(
    num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    layer = noisy_layer(2, [4, 2], head_dim, 3, device)
    before = on_cpu(layer)
    expected = on_cpu(layer)
    k, v = draw(num_tokens, 2, head_dim, dtype, device)
    store_and_compare(k, v, layer, expected, 1, 0)
    # Nothing outside the request has changed.
    assert torch.equal(layer.tail[0].cpu(), before.tail[0])
    unused = slice((num_tokens - 1) % BLOCK + 1, None)
    assert torch.equal(layer.tail[1, :, :, unused].cpu(), before.tail[1, :, :, unused])
    assert bool(layer.scales[0].isnan().all())
    end = int(layer.offset[1, 0])
    assert torch.equal(layer.words[:end].cpu(), before.words[:end])
    # Dequantised records equal `fake_quantize`; the tail has another scale.
    whole = num_tokens // BLOCK * BLOCK
    read = kv_dequantize(on_cpu(layer), torch.tensor([1, num_tokens + 1]))
    for x, stored in zip((k, v), read, strict=True):
        for head, bits in enumerate([2, 4]):
            exact = fake_quantize(x[:whole, head].float().cpu(), bits)
            assert torch.equal(stored[1, head, :whole], exact)


@pytest.mark.parametrize("is_v", [0, 1])
def test_store_keeps_nan_in_the_scales(is_v: int, device: torch.device) -> None:
    """The scales of its block and of the tail become NaN, and so does all that they scale."""
    layer = noisy_layer(1, [4, 4], 64, 3, device)
    sides = draw(130, 2, 64, torch.bfloat16, device)
    sides[is_v][70, 1, 5] = torch.nan
    q8, scale = torch.empty(2, 2, 130, 64, dtype=torch.int8, device=device), torch.empty(2, 2, 3, device=device)
    kv_store(*sides, layer, 0, 0, *q8.unbind(0), *scale.unbind(0))
    expected = torch.zeros_like(scale, dtype=torch.bool)
    expected[is_v, 1, 1] = True
    assert torch.equal(scale.isnan(), expected)
    assert torch.equal(layer.scales[0, :, :2].isnan(), expected[:, :, :2].permute(1, 2, 0))
    assert torch.equal(layer.tail_scale[0].isnan(), expected.any(2).T)


@by_head_dim
def test_store_in_chunks_then_append_past_two_blocks(head_dim: int, device: torch.device) -> None:
    """Records and tail match after every token and through two compactions, for requests of different lengths."""
    batch_size, heads, prompts = 2, 2, (64, 130)
    layer = noisy_layer(batch_size, [2, 4], head_dim, 4, device)
    expected = on_cpu(layer)
    for request, length in enumerate(prompts):
        k, v = draw(length, heads, head_dim, torch.bfloat16, device)
        for start in range(0, length, 64):
            chunk = slice(start, start + 64)
            store_and_compare(k[chunk], v[chunk], layer, expected, request, start)
        highest = torch.stack([x.float().abs().amax((0, 2)) for x in (k, v)], dim=-1)
        assert torch.equal(layer.tail_scale[request].cpu(), highest.cpu() / 119)
    steps = range(1, 128) if device.type == "cuda" else [1, *range(60, 66), 124, 125, 126, 127]
    for step in steps:
        new = torch.randn(batch_size, 3 * heads, head_dim).bfloat16().to(device) * 8
        seq_lens = torch.tensor(prompts, dtype=torch.int32) + step
        k, v = new[:, :heads], new[:, heads : 2 * heads]
        kv_append(k, v, layer, seq_lens.to(device))
        kv_append_ref(k.cpu(), v.cpu(), expected, seq_lens)
        assert_same(layer, expected)
        kv_compact(layer, seq_lens.to(device))
        kv_compact_ref(expected, seq_lens)
        assert_same(layer, expected)
    assert int(layer.tail.int().abs().max()) == 119, "no outlier was clamped"


def stack(layers: list[QuantisedLayer]) -> QuantisedLayer:
    return QuantisedLayer(
        **{name: torch.stack([layer.tensors[name] for layer in layers]) for name in layers[0].tensors}
    )


@pytest.mark.parametrize(("rows", "head_dim"), covering([codec_kernels.COMPACT_ROWS, 20, 1], [64, 128]))
def test_compact_makes_a_record_of_each_full_tail(
    rows: int, head_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three layers the bits of heads differ. Two requests of four have a full tail, at different blocks."""
    monkeypatch.setattr(codec_kernels, "COMPACT_ROWS", rows)
    orders = [[4, 2, 2], [2, 2, 4], [4, 2, 2]]
    layers = stack([noisy_layer(4, bits, head_dim, 3, device) for bits in orders])
    before, expected = on_cpu(layers), on_cpu(layers)
    seq_lens = torch.tensor([191, 64, 192, 65], dtype=torch.int32)
    kv_compact_ref(expected, seq_lens)
    for _ in range(2):  # a second launch changes nothing
        kv_compact(layers, seq_lens.to(device))
        assert_same(layers, expected)
    # A record gives back its tail, within a step of each channel. All else is unchanged.
    for index, bits in enumerate(orders):
        layer, old = on_cpu(layers.select(index)), before.select(index)
        untouched = torch.ones_like(layer.words, dtype=torch.bool)
        for request, block in ((1, 0), (2, 2)):
            assert torch.equal(layer.scales[request, :, block], layer.tail_scale[request])
            q8, scales = (
                torch.empty(2, 3, (block + 1) * BLOCK, head_dim, dtype=torch.int8),
                torch.empty(2, 3, block + 1),
            )
            kv_restore_ref(layer, request, block + 1, *q8, *scales)
            for head, b in enumerate(bits if request % 2 == 0 else bits[::-1]):
                error = (q8[:, head, block * BLOCK :].int() - layer.tail[request, head].int()).abs().max()
                assert int(error) <= (238 // (2**b - 1) + 1) // 2 + 1
                size = record_words("flashq", b, head_dim)
                start = int(layer.offset[request, head]) + block * size
                untouched[start : start + size] = False
        assert torch.equal(layer.words[untouched], old.words[untouched])
        assert int((~untouched).sum()) == sum(2 * record_words("flashq", b, head_dim) for b in bits)
        assert int(layer.scales.isnan().sum()) == layer.scales.numel() - 2 * 3 * 2


def test_outliers_in_a_full_tail_are_clamped(device: torch.device) -> None:
    layer = noisy_layer(1, [4, 2], 64, 1, device)
    layer.tail.zero_()
    expected = on_cpu(layer)
    k, v = (torch.tensor([-1.0, 1.0], device=device)[:, None].expand(1, 2, 64) * size for size in (1e4, 1e30))
    seq_lens = torch.tensor([64], dtype=torch.int32)
    kv_append(k, v, layer, seq_lens.to(device))
    kv_append_ref(k.cpu(), v.cpu(), expected, seq_lens)
    kv_compact(layer, seq_lens.to(device))
    kv_compact_ref(expected, seq_lens)
    assert_same(layer, expected)
    read = kv_dequantize(on_cpu(layer), torch.tensor([65]))
    for index, x in enumerate(read):
        ends = torch.tensor([-119.0, 119.0])[:, None] * layer.tail_scale[0, :, index, None].cpu()
        # The bound is half a step of 2 bits.
        assert (x[0, :, 63] - ends).abs().max() <= 20 * layer.tail_scale[0, :, index].max()


class Projection:
    """Inputs of `qkv_rope_append`, and its outputs with and without a quantised layer."""

    def __init__(
        self, batch: int, hidden: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.shape = (batch, num_qo_heads, num_kv_heads, head_dim)
        self.weight = torch.randn((num_qo_heads + 2 * num_kv_heads) * head_dim, hidden).to(dtype).to(device)
        self.x_norm = torch.randn(batch, hidden).to(dtype).to(device)
        self.squares = (torch.rand(batch, 5) * hidden / 2).to(device)
        angle = torch.rand(batch, head_dim // 2) * 6
        self.rope = torch.stack([angle.cos(), angle.sin()], dim=1).to(device)

    def run(
        self, seq_lens: Tensor, layer: QuantisedLayer | None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, Hq, D], k and v [B, Hkv, D]. They are NaN if the kernel did not write them."""
        batch, num_qo_heads, num_kv_heads, head_dim = self.shape
        q = torch.full((batch, num_qo_heads, head_dim), torch.nan).to(self.x_norm)
        k, v = (torch.full((batch, num_kv_heads, 1, head_dim), torch.nan).to(self.x_norm) for _ in range(2))
        inputs = (self.x_norm, self.squares, self.weight, self.rope, seq_lens.to(self.x_norm.device))
        hidden, epoch = self.x_norm.shape[1], torch.tensor([9], dtype=torch.int32, device=q.device)
        inbox = torch.full((batch, hidden + 2 * num_kv_heads * head_dim), -1, device=q.device)
        qkv_rope_append(*inputs, q, k, v, 1e-5, gate, layer, inbox, epoch)
        self.handed_over = unpack_packets(inbox[:, hidden:], 9).view(batch, 2, num_kv_heads, head_dim)
        return q, k[:, :, 0], v[:, :, 0]


QKV_SHAPES = [(1, 200, 7, 1, 64), (3, 96, 6, 2, 64), (2, 72, 2, 2, 128)]


@pytest.mark.parametrize(
    ("gate", "shape", "dtype"), covering([None, 0, 2], QKV_SHAPES, [torch.float32, torch.bfloat16]), ids=str
)
def test_a_projection_quantises_the_k_and_v_that_it_hands_over(
    gate: int | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """The tail has the bits that `kv_append` makes of the same k and v."""
    batch, _, _, num_kv_heads, head_dim = shape
    projection = Projection(*shape, dtype, device)
    layer = noisy_layer(batch, [4] * num_kv_heads, head_dim, 2, device)
    layer.tail_scale[..., 0] = 0.1  # so that many keys are clamped
    expected = on_cpu(layer)
    seq_lens = torch.tensor([64, 65, 130][:batch], dtype=torch.int32)
    gate_tensor = None if gate is None else torch.tensor([gate], dtype=torch.int32, device=device)
    q, k, v = projection.run(seq_lens, layer, gate_tensor)
    if gate == 0:
        assert all(bool(x.isnan().all()) for x in (q, k, v, projection.handed_over))
        assert_same(layer, expected)
        return
    assert torch.equal(projection.handed_over, torch.stack([k, v], dim=1).float())
    kv_append_ref(k.cpu(), v.cpu(), expected, seq_lens)
    assert_same(layer, expected)
    for found, plain in zip((q, k, v), projection.run(torch.ones_like(seq_lens), None, gate_tensor), strict=True):
        assert torch.equal(found, plain)
    # The fp64 oracle differs by half a step, and by the rounding of x.
    inputs = (projection.x_norm, projection.squares, projection.weight, projection.rope)
    _, *exact = qkv_rope_append_ref(*(x.cpu() for x in inputs), num_kv_heads, 1e-5)
    newest = layer.tail.cpu()[torch.arange(batch), :, :, (seq_lens - 1) % BLOCK].double()
    ratio = torch.stack(exact, dim=2) / layer.tail_scale.cpu().double()[..., None]
    far = (newest - ratio.clamp(-119, 119)).abs().max()
    assert float(far) < 0.5 + 119 * 2 * torch.finfo(dtype).eps
    assert 0 < int((ratio.abs() > 120).sum()) < ratio.numel()


def test_projections_fill_a_tail(device: torch.device) -> None:
    """They write every position of the tail once, in random order, with requests of different lengths."""
    batch = 8
    layer = noisy_layer(batch, [2, 4], 64, 9, device)
    layer.tail.fill_(-128)  # is no code
    order = torch.randperm(BLOCK)
    positions = torch.stack([order.roll(-request) for request in range(batch)])
    steps = range(BLOCK) if device.type == "cuda" else range(0, BLOCK, 8)
    expected = on_cpu(layer)
    for step in steps:
        projection = Projection(batch, 32, 2, 2, 64, torch.bfloat16, device)
        seq_lens = (positions[:, step] + 1 + BLOCK * torch.arange(batch)).int()
        _, k, v = projection.run(seq_lens, layer)
        kv_append_ref(k.cpu(), v.cpu(), expected, seq_lens)
    assert_same(layer, expected)
    written = torch.zeros(batch, BLOCK, dtype=torch.bool).scatter_(1, positions[:, list(steps)], True)
    assert torch.equal((layer.tail != -128).all(-1).all(2).all(1).cpu(), written)
    assert written.any(0).all(), "no request wrote one of the positions"


@by_head_dim
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_restore_gives_the_int8_blocks_of_stage_1(num_blocks: int, head_dim: int, device: torch.device) -> None:
    layer = noisy_layer(2, [4, 2], head_dim, 4, device)
    k, v = draw(200, 2, head_dim, torch.float32, device)
    for request in range(2):
        kv_store(k, v, layer, request, 0, *buffers(2, 200, head_dim, device))
    for request in range(2):
        found = buffers(2, num_blocks * BLOCK, head_dim, device)
        expected = buffers(2, num_blocks * BLOCK, head_dim, torch.device("cpu"))
        kv_restore(layer, request, num_blocks, *found)
        kv_restore_ref(on_cpu(layer), request, num_blocks, *expected)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("value", [0.0, 3e38, 1e-44])
def test_extreme_values_give_finite_scales(value: float, device: torch.device) -> None:
    layer = noisy_layer(1, [4, 2], 64, 2, device)
    expected = on_cpu(layer)
    k, v = draw(70, 2, 64, torch.float32, device)
    k = k * min(value, 1.0)
    k[::3, :, ::5] = value
    store_and_compare(k, v, layer, expected, 0, 0)
    assert bool(layer.scales[0, :, 0].isfinite().all())
    assert bool((layer.tail_scale >= MIN_SCALE).all())
    seq_lens = torch.tensor([71], dtype=torch.int32)
    kv_append(k[0, None] * 2 + 1, v[0, None], layer, seq_lens.to(device))
    kv_append_ref(k[0, None].cpu() * 2 + 1, v[0, None].cpu(), expected, seq_lens)
    assert_same(layer, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@by_head_dim
def test_real_sizes_and_a_captured_append(head_dim: int) -> None:
    """8 heads store 8192 + 1000 tokens in two prompt chunks; then one graph replays 130 appends."""
    device, heads, length = torch.device("cuda"), 8, 9192
    layer = noisy_layer(1, [4, 2] * 4, head_dim, 150, device)
    expected = on_cpu(layer)
    k, v = draw(length, heads, head_dim, torch.bfloat16, device)
    for start in (0, 8192):
        chunk = slice(start, start + 8192)
        store_and_compare(k[chunk], v[chunk], layer, expected, 0, start)
    seq_lens = torch.tensor([length], dtype=torch.int32, device=device)
    new = torch.randn(2, 1, heads, head_dim, device=device).bfloat16()
    kv_append(new[0], new[1], deepcopy(layer), seq_lens)
    kv_compact(deepcopy(layer), seq_lens)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kv_append(new[0], new[1], layer, seq_lens)
        kv_compact(layer, seq_lens)
    for step in range(1, 131):
        new.copy_(torch.randn(2, 1, heads, head_dim))
        seq_lens.fill_(length + step)
        graph.replay()
        kv_append_ref(new[0].cpu(), new[1].cpu(), expected, seq_lens.cpu())
        kv_compact_ref(expected, seq_lens.cpu())
    assert_same(layer, expected)


def test_launchers_refuse_wrong_arguments(device: torch.device) -> None:
    layer = noisy_layer(1, [4, 2], 64, 2, device)
    k, v = draw(64, 2, 64, torch.float32, device)
    out = buffers(2, 64, 64, device)
    with pytest.raises(ValueError, match=r"start: .* found 32"):
        kv_store(k, v, layer, 0, 32, *out)
    with pytest.raises(ValueError, match=r"start: .* found 128"):
        kv_store(k, v, layer, 0, 128, *out)
    with pytest.raises(ValueError, match=r"k, v: expected two \[n, 2, 64\]"):
        kv_store(k[:, :1], v[:, :1], layer, 0, 0, *out)
    with pytest.raises(ValueError, match="k8: expected"):
        kv_store(k, v, layer, 0, 0, out[0][:, :32], *out[1:])
    with pytest.raises(ValueError, match="contiguous channels"):
        kv_append(k[:1].transpose(1, 2), v[:1], layer, torch.tensor([1], dtype=torch.int32, device=device))
    # Three rows are no multiple of two requests.
    three, layer = Projection(3, 32, 2, 2, 64, torch.float32, device), noisy_layer(2, [4, 2], 64, 2, device)
    with pytest.raises(
        ValueError, match=r"layer: expected a tail for k_cache \[3, 2, 1, 64\], found \[2, 2, 2, 64, 64\]"
    ):
        three.run(torch.tensor([1, 1, 1], dtype=torch.int32), layer)
