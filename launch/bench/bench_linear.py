"""The products of a decode step alone, by format of their weights, against the library's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.attention.oracles import gate_up_silu_ref, push_partial_ref, qkv_rope_append_ref
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.linear.decode_weight import DecodeWeight, WeightFormat, pack_weight
from alspec.kernels.linear.projections import gate_up_silu, qkv_rope_append
from alspec.kernels.linear.push import push_partial
from alspec.kernels.norm.residual import num_square_sums
from alspec.launch.bench.bench_common import check_close
from alspec.launch.bench.decode_case import COLD_BYTES
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import matrices_of

__all__ = ["LINEAR_ROWS", "LINEAR_SHAPES", "LINEAR_WEIGHTS", "LinearCase", "Product", "baselines", "products_of"]

LINEAR_SHAPES = ("llama-3.1-8b", "llama-3.1-70b")
LINEAR_ROWS = (1, 2, 4, 8, 16)
LINEAR_WEIGHTS = ("bf16", "fp8", "int4")
GROUP, KV_HEADS, HEAD_DIM, EPS = 128, 8, 128, 1e-5
TOLERANCE = 1e-2  # relative RMS of a bf16 output against fp64

Weight = Tensor | DecodeWeight


class Product(NamedTuple):
    """One product of a layer: its name and matrix."""

    name: str
    rows: int  # outputs
    columns: int  # inputs
    stride: int  # of `Matrix`


def products_of(shape: str) -> list[Product]:
    """The products of a layer of a model shape on one rank."""
    matrices = matrices_of(LlamaConfig.from_shape(shape), 1)
    return [Product(name, matrix.rows, matrix.columns, matrix.stride) for name, matrix in matrices.items()]


def draw_weight(product: Product, weights: str) -> Weight:
    """A random weight of a product, N(0, 1 / in) for bf16, else random codes with scales of about that size."""
    _, rows, columns, stride = product
    if weights == "bf16":
        dense: Tensor = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") / columns**0.5
        return dense
    weight_format: WeightFormat = "fp8" if weights == "fp8" else "int4"
    if weight_format == "fp8":
        codes = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        scales = (torch.rand(rows, 1, device="cuda") + 0.5) / columns**0.5
        return pack_weight(codes, scales, None, weight_format, columns, stride)
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(rows, columns // GROUP, device="cuda") + 0.5) / 5 / columns**0.5
    zeros = torch.randint(6, 10, scales.shape, dtype=torch.uint8, device="cuda")
    return pack_weight(codes, scales.bfloat16(), zeros, weight_format, GROUP, stride)


@dataclass
class LinearCase:
    """One product, with enough copies of its weight to keep the L2 cold."""

    name: str
    weights: list[Weight]
    x: Tensor  # [B, in] bf16
    squares: Tensor  # [B, S] fp32
    outputs: tuple[Tensor, ...]  # what the kernel writes

    @classmethod
    def draw(cls, product: Product, weights: str, batch: int) -> LinearCase:
        """Fresh random inputs."""
        name, rows, columns, _ = product
        first = draw_weight(product, weights)
        others = [draw_weight(product, weights) for _ in range(max(3, min(63, COLD_BYTES // first.nbytes)))]
        x = torch.randn(batch, columns, dtype=torch.bfloat16, device="cuda")
        squares = torch.rand(batch, num_square_sums(columns), device="cuda") * columns

        def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.full((batch, *shape), torch.nan, dtype=dtype, device="cuda")

        if name == "qkv":
            caches = [new(KV_HEADS, 1, HEAD_DIM) for _ in range(2)]
            outputs: tuple[Tensor, ...] = (new(rows // HEAD_DIM - 2 * KV_HEADS, HEAD_DIM), *caches)
        else:
            outputs = (new(rows // 2),) if name == "gate_up" else (new(rows, dtype=torch.float32),)
        return cls(name, [first, *others], x, squares, outputs)

    def of(self, batch: int) -> LinearCase:
        """The same product of the first requests."""
        return replace(
            self, x=self.x[:batch], squares=self.squares[:batch], outputs=tuple(each[:batch] for each in self.outputs)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one weight."""
        return self.weights[0].nbytes

    def runs(self) -> Callable[[int], object]:
        """The kernel of the step on the weight with an index."""
        x, squares, batch = self.x, self.squares, len(self.x)
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        if self.name == "qkv":
            q, k, v = self.outputs
            rope, lengths = _rotation(batch), zero.expand(batch) + 1
            return lambda i: qkv_rope_append(x, squares, self.weights[i], rope, lengths, q, k, v, EPS)
        if self.name == "gate_up":
            return lambda i: gate_up_silu(x, squares, self.weights[i], self.outputs[0], EPS)
        exchange = Exchange(self.outputs[0], zero + 1, zero)
        return lambda i: push_partial(x, self.weights[i], exchange, 0)

    def check(self) -> None:
        """Compare the kernel with the oracle on the dequantised weight.

        Raises:
            BadNumbersError: the error is larger than that of a bf16 output.
        """
        weight = self.weights[-1]
        values = weight.dequantise(torch.float64) if isinstance(weight, DecodeWeight) else weight.double()
        for output in self.outputs:
            output.fill_(torch.nan)
        self.runs()(len(self.weights) - 1)
        found, expected = self.outputs, self._expected(values)
        for each, reference in zip(found, expected, strict=True):
            check_close(f"{self.name} product", each, reference, TOLERANCE)

    def _expected(self, values: Tensor) -> tuple[Tensor, ...]:
        """What the kernel must write, for a weight of these values, fp64."""
        if self.name == "qkv":
            q, *new = qkv_rope_append_ref(self.x, self.squares, values, _rotation(len(self.x)), KV_HEADS, EPS)
            return (q, *(each[:, :, None] for each in new))
        if self.name == "gate_up":
            return (gate_up_silu_ref(self.x, self.squares, values, EPS),)
        return (push_partial_ref(self.x, values),)


def _rotation(batch: int) -> Tensor:
    """Cosines and sines of an eighth of a turn."""
    return torch.full((batch, 2, HEAD_DIM // 2), 0.5**0.5, device="cuda")


Baseline = tuple[str, str, list[Tensor], Callable[[int], Callable[[int], object]]]


def baselines(product: Product) -> Iterator[Baseline]:
    """The library's products without norm and epilogue: implementation, weights, their copies, and runs of a batch.

    The first one has weights of 16 bits.

    `torch._scaled_mm` takes inputs in FP8 and at least 16 rows; `_weight_int4pack_mm` has bf16 scales and zeros.
    GemLite is measured if it is installed.
    """
    _, rows, columns, _ = product
    x = torch.randn(16, columns, dtype=torch.bfloat16, device="cuda")
    dense = [torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")]
    dense += [dense[0].clone() for _ in range(max(3, min(63, COLD_BYTES // dense[0].nbytes)))]
    yield "torch.linear", "bf16", dense, lambda batch: lambda i: F.linear(x[:batch], dense[i])
    eights = [weight.to(torch.float8_e4m3fn) for weight in dense]
    inputs, ones = x.to(torch.float8_e4m3fn), torch.ones(16, 1, device="cuda")
    scales = torch.ones(1, rows, device="cuda")

    def scaled(i: int) -> object:
        return torch._scaled_mm(inputs, eights[i].T, ones, scales, out_dtype=torch.bfloat16)

    yield "torch._scaled_mm", "fp8", eights, lambda _: scaled
    packed = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    fours = [torch.ops.aten._convert_weight_to_int4pack(packed, 8)]
    fours += [fours[0].clone() for _ in range(max(3, min(63, COLD_BYTES // packed.nbytes)))]
    points = torch.ones(columns // GROUP, rows, 2, dtype=torch.bfloat16, device="cuda")
    multiply = torch.ops.aten._weight_int4pack_mm
    yield (
        "torch._weight_int4pack_mm",
        "int4",
        fours,
        lambda batch: lambda i: multiply(x[:batch], fours[i], GROUP, points),
    )
    if find_spec("gemlite") is not None:
        yield "GemLite", "int4", *_gemlite(rows, columns, x)


def _gemlite(rows: int, columns: int, x: Tensor) -> tuple[list[Tensor], Callable[[int], Callable[[int], object]]]:
    """The package's product as it chooses it itself: copies of an asymmetric weight in groups, and runs of a batch."""
    gemlite = import_module("gemlite.core")
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8, device="cuda")
    scales = torch.ones(rows, columns // GROUP, dtype=torch.bfloat16, device="cuda")
    layer = gemlite.GemLiteLinearTriton(4, GROUP, columns, rows, gemlite.DType.BF16, gemlite.DType.BF16)
    layer.pack(codes, scales, torch.full_like(scales, 8.0))
    first, *others = layer.get_tensor_args()
    copies = [first, *(first.clone() for _ in range(max(3, min(63, COLD_BYTES // first.nbytes))))]
    multiply, how = gemlite.forward_functional, layer.get_meta_args()
    return copies, lambda batch: lambda i: multiply(x[:batch], None, [copies[i], *others], how)
