"""Projections of so many rows that the library multiplies faster than the fused kernels; a small kernel does the rest.

The library reads each weight once for all rows, and divides tiles of both among the tensor cores; the fused
projections would read all rows for each 16 rows of the weight. A packed weight is unpacked before.

The functions are those of projections.py and push.py, without gates and inboxes.

Shapes: B rows, K inputs, N outputs (rows of a weight), S sums of squares of each row, SP their next power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.comm.ll_packets import BAD_NUMBERS
from alspec.kernels.common.jit_launch import jit_launch
from alspec.kernels.kv_codec.quantised_layer import QuantisedLayer
from alspec.kernels.linear.decode_weight import TILE_ROWS, DecodeWeight
from alspec.kernels.linear.gemv_tile import rstd_of
from alspec.kernels.linear.head_norm import norm_rope_append
from alspec.kernels.linear.push import add_row_bias, push_sums
from alspec.kernels.linear.unpack_weight import unpack_weight

__all__ = ["GemmProducts"]

BLOCK = 1024  # sums of a program


@triton.jit(do_not_specialize=["reduce_index", "rank", "code"])
def _push_products_kernel(
    raw_ptr,  # [B, N] fp32: products; may be `out_ptr`
    squares_ptr,  # [B, S] fp32, or None: the input is not normalised
    bias_ptr,  # [N], or None
    out_ptr,  # [B, out_width] fp32: written if there are no peers
    peers_ptr,  # [PEERS] int64: addresses of all packets [num_reduces, B, SOURCES, out_width] to write
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    reduce_index,
    rank,
    code,
    num_outputs,
    out_width,
    eps,
    K: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    B: tl.constexpr,
    PEERS: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK products of one row: scale, bias, then to every peer as `_push_partial_kernel`. Grid [N / BLOCK, B]."""
    row, out = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = out < num_outputs
    y = tl.load(raw_ptr + row.to(tl.int64) * num_outputs + out, mask=mask, other=0.0)
    if squares_ptr is not None:
        y *= rstd_of(squares_ptr, row, eps, K, S, SP)
    y = add_row_bias(y, bias_ptr, out, num_outputs)
    bases = ()
    for peer in tl.static_range(PEERS):
        bases = bases + (tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64)),)  # noqa: RUF005 (Triton has no *)
    push_sums(
        y, out, row, mask, out_ptr, bases, tl.load(epoch_ptr), tl.load(fault_ptr), fault_ptr, reduce_index, rank,
        code, out_width, B, PEERS, SOURCES, PEERS > 0,
    )  # fmt: skip


@triton.jit
def _scale_kernel(
    raw_ptr,  # [B, N] fp32, in place
    squares_ptr,  # [B, S] fp32
    bias_ptr,  # [N], or None
    num_outputs,
    eps,
    K: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale and bias of BLOCK products of one row. Grid [N / BLOCK, B]."""
    row, out = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ptrs, mask = raw_ptr + row.to(tl.int64) * num_outputs + out, out < num_outputs
    y = tl.load(ptrs, mask=mask, other=0.0) * rstd_of(squares_ptr, row, eps, K, S, SP)
    tl.store(ptrs, add_row_bias(y, bias_ptr, out, num_outputs), mask=mask)


@triton.jit
def _silu_kernel(
    raw_ptr,  # [B, 2 I] fp32, gate first
    squares_ptr,  # [B, S] fp32
    bias_ptr,  # [2 I], or None
    out_ptr,  # [B, I]
    eps,
    K: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
):
    """BLOCK channels of one row. Grid [I / BLOCK, B]."""
    row, out = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, rstd = out < I, rstd_of(squares_ptr, row, eps, K, S, SP)
    ptrs = raw_ptr + row.to(tl.int64) * (2 * I) + out
    gate = tl.load(ptrs, mask=mask, other=0.0) * rstd
    up = tl.load(ptrs + I, mask=mask, other=0.0) * rstd
    if bias_ptr is not None:
        gate = add_row_bias(gate, bias_ptr, out, I)
        up = add_row_bias(up, bias_ptr + I, out, I)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * I + out, y.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class GemmProducts:
    """The four projections of a step over up to R rows, with room for what the library writes."""

    room: Tensor  # [R x the largest N] fp32: products
    # Numbers of the largest packed matrix, or of a piece of the LM head; None if none is packed.
    unpacked: Tensor | None

    def qkv_rope_append(
        self,
        x_norm: Tensor,
        square_sums: Tensor,
        weight: Tensor | DecodeWeight,
        rope: Tensor,
        seq_lens: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        eps: float,
        gate: Tensor | None = None,
        layer: QuantisedLayer | None = None,
        inbox: Tensor | None = None,
        epoch: Tensor | None = None,
        is_ring: bool = False,
        bias: Tensor | None = None,
        raw: Tensor | None = None,
    ) -> None:
        """QKV projection, RoPE and append. See `projections.qkv_rope_append`."""
        assert gate is None
        assert inbox is None
        products = self._room(len(x_norm), weight) if raw is None else raw
        self._multiply(x_norm, weight, products)
        num_squares = square_sums.shape[1]
        jit_launch(_scale_kernel, (triton.cdiv(weight.shape[0], BLOCK), len(x_norm)))(
            products, square_sums, bias, weight.shape[0], eps, K=x_norm.shape[1], S=num_squares,
            SP=triton.next_power_of_2(num_squares), BLOCK=BLOCK,
        )  # fmt: skip
        if raw is None:
            norm_rope_append(
                products, None, None, rope, seq_lens, q, k_cache, v_cache, x_norm.shape[1], eps, None, layer, None,
                None, is_ring,
            )  # fmt: skip

    def gate_up_silu(
        self,
        x_norm: Tensor,
        square_sums: Tensor,
        weight: Tensor | DecodeWeight,
        out: Tensor,
        eps: float,
        gate: Tensor | None = None,
        bias: Tensor | None = None,
        like_gated: bool = False,
    ) -> None:
        """`silu(gate) * up`. See `projections.gate_up_silu`."""
        assert gate is None
        raw = self._room(len(x_norm), weight)
        self._multiply(x_norm, weight, raw)
        num_squares = square_sums.shape[1]
        jit_launch(_silu_kernel, (triton.cdiv(out.shape[1], BLOCK), len(out)))(
            raw, square_sums, bias, out, eps, K=x_norm.shape[1], S=num_squares, SP=triton.next_power_of_2(num_squares),
            I=out.shape[1], BLOCK=BLOCK,
        )  # fmt: skip

    def push_partial(
        self,
        x: Tensor,
        weight: Tensor | DecodeWeight,
        exchange: Exchange,
        reduce_index: int,
        gate: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Row-parallel projection and push. See `push.push_partial`."""
        assert gate is None
        raw = exchange.partial if exchange.peers is None else self._room(len(x), weight)
        self._multiply(x, weight, raw)
        _push_products(
            raw, None, bias, exchange.partial, exchange.peers, exchange.epoch, exchange.fault, reduce_index,
            exchange.tp_rank, exchange.fault_code(BAD_NUMBERS, reduce_index, exchange.rank), exchange.tp_size, 0.0,
            x.shape[1],
        )  # fmt: skip

    def lm_head(
        self,
        x_norm: Tensor,
        square_sums: Tensor,
        weight: Tensor | DecodeWeight,
        exchange: LogitExchange,
        eps: float,
        reduce_index: int,
    ) -> None:
        """Logits of this rank's vocabulary shard. See `push.lm_head`."""
        if weight.shape[0] == 0:
            return
        raw = self._room(len(x_norm), weight)
        self._multiply(x_norm, weight, raw)
        code = exchange.fault_code(BAD_NUMBERS, reduce_index, exchange.first_rank + exchange.rank)
        _push_products(
            raw, square_sums, None, exchange.shard, exchange.peers, exchange.epoch, exchange.fault, 0, exchange.rank,
            code, exchange.world_size, eps, x_norm.shape[1],
        )  # fmt: skip

    def _room(self, num_rows: int, weight: Tensor | DecodeWeight) -> Tensor:
        """Room for the products of so many rows, [B, N] fp32."""
        return self.room[: num_rows * weight.shape[0]].view(num_rows, weight.shape[0])

    def _multiply(self, x: Tensor, weight: Tensor | DecodeWeight, out: Tensor) -> None:
        """`out = x W^T` in fp32, of a packed weight in pieces that fit the room."""
        if isinstance(weight, Tensor):
            _matmul(x, weight, out)
            return
        assert self.unpacked is not None
        num_outputs, num_inputs = weight.shape
        at_once = len(self.unpacked) // num_inputs
        if at_once < num_outputs:
            at_once = at_once // TILE_ROWS * TILE_ROWS
        for start in range(0, num_outputs, at_once):
            stop = min(start + at_once, num_outputs)
            piece = weight if stop - start == num_outputs else weight.row_slice(start, stop)
            values = self.unpacked[: (stop - start) * num_inputs].view(stop - start, num_inputs)
            unpack_weight(piece, values)
            _matmul(x, values, out[:, start:stop])


def _push_products(
    raw: Tensor,
    square_sums: Tensor | None,
    bias: Tensor | None,
    local: Tensor,
    peers: Tensor | None,
    epoch: Tensor,
    fault: Tensor,
    reduce_index: int,
    rank: int,
    code: int,
    num_sources: int,
    eps: float,
    num_inputs: int,
) -> None:
    """Launch `_push_products_kernel` for `push_partial` and `lm_head`."""
    num_squares = 1 if square_sums is None else square_sums.shape[1]
    jit_launch(_push_products_kernel, (triton.cdiv(raw.shape[1], BLOCK), len(raw)))(
        raw, square_sums, bias, local, peers, epoch, fault, reduce_index, rank, code, raw.shape[1],
        local.shape[1], eps, K=num_inputs, S=num_squares, SP=triton.next_power_of_2(num_squares), B=len(raw),
        PEERS=0 if peers is None else peers.shape[0], SOURCES=num_sources, BLOCK=BLOCK,
    )  # fmt: skip


def _matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out = x W^T`, accumulated and kept in fp32. x: [B, K].  weight: [N, K].  out: [B, N] fp32, rows may be apart."""
    if x.dtype == torch.float32 or not x.is_cuda:  # on CPUs the library has no fp32 output for 16-bit inputs
        out.copy_(x.float() @ weight.float().T)
    elif out.is_contiguous():
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(x, weight.T, out_dtype=torch.float32))
