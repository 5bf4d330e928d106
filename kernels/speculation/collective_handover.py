"""Paired decoding over collectives, where ranks cannot write each other's memory: handover by exchanged buffers.

A collective cannot be skipped on one rank. So paired ranks always send each other a handover buffer, although only the
sender's buffer is read. Every rank sends its verdict to all ranks, although only the sender's verdict counts. Each
layer has three gates:

    is_sender, is_receiver  roles; exchanged after each accepted `A~`; layer 0 takes the final roles of the last step
    recompute               on a sender whose `A~` was rejected: it repeats on `A` what the receiver computed on `A~`

One layer has three branches between a fork and a join; [g] = skipped when gate g is 0:

    predictor                        [is_sender]    A~ into its handover buffer
    pack_handover                    [is_sender]    x, k, v into it
    fork
      spec branch:
        exchange of the handover buffers
        unpack_handover              [is_receiver]
        post- and next pre-attention [is_receiver]  on A~
      main branch:
        attention to the rest        [is_sender]    A, dist2, norm2
        gather of the sums in the group
        decide
        post- and next pre-attention [recompute]    on A
      verdict branch, after decide:
        gather of all verdicts
        apply_verdict                               roles of the next layer
    join

A sender has its verdict before the other group does, and continues while the verdict travels. On each rank only one of
the spec branch and the main branch runs post- and pre-attention, so both use the same activation buffers. Each layer
has separate gates: the two branches read this layer's gates while the verdict branch sets the gates of the next layer.

Shapes: B requests, L layers, Hq and Hkv this rank's query and KV heads, D head_dim, N cache capacity, T ranks of a
group, R (dist2, norm2) pairs per request, S partial sums of x^2 per request, M = hidden + 2 Hkv D values of a request's
message: x and the newest k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import RecallBuffers, SpecOutput
from alspec.kernels.attention.dispatch import CacheLayer
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.pair_state import GATE_STRIDE, PairShape
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.kv_codec.quantised_layer import PER_HEAD
from alspec.kernels.norm.residual import BLOCK as RESIDUAL_BLOCK
from alspec.kernels.norm.residual import num_square_sums, write_residual
from alspec.kernels.speculation.handover import cache_args, newest_offset, store_message
from alspec.kernels.speculation.roles import add_sums, request_verdicts, squared_threshold

__all__ = [
    "Gates",
    "CollectiveHandover",
    "PairCollectives",
    "decide",
    "pack_handover",
    "pack_residual",
    "apply_verdict",
    "unpack_handover",
    "unpack_residual",
]

BLOCK = 128  # values of one program


@dataclass(frozen=True)
class PairCollectives:
    """Collectives on the current stream. All ranks must call them in the same order.

    Each branch has its own communicators.
    """

    exchange_spec_branch: Callable[[Tensor], None]  # [2, ...]: each group's row, to the other group
    all_reduce_spec_branch: Callable[[Tensor], Tensor]  # sum over the group
    gather_sums: Callable[[Tensor], None]  # [T, ...]: each rank's row, to its group
    gather_verdicts: Callable[[Tensor], None]  # [world, ...]: each rank's row, to all


@dataclass(frozen=True)
class Gates:
    """Gates of a layer, each [1] int32: this rank's group is the sender, is the receiver, recomputes the layer."""

    is_sender: Tensor
    is_receiver: Tensor
    recompute: Tensor


@dataclass(frozen=True)
class CollectiveHandover:
    """The state of one rank of a pair that communicates by collectives."""

    shape: PairShape
    group: int
    # [2, B Hq D + B M, rounded up to a multiple of 4] fp32: for each group A~, then x, k, v
    handover_buffers: Tensor
    residuals: Tensor  # [2, B, hidden] fp32: each group's x after the last layer
    lists: Tensor  # [2, L, B, Hkv, recall_blocks] int32: each group's recall lists
    sums: Tensor  # [T, B, R, 2] fp32: dist2 and norm2 of parts of heads, from each rank of the group
    verdicts: Tensor  # [2 T, B + 1] int32, a row from each rank of the job: each request's verdict, then the layer's
    # [3, L + 1, GATE_STRIDE] int32: is_sender, is_receiver, recompute; the gate is the first word of each row
    gate_buffer: Tensor
    spec_branch: Exchange  # partial sums of the spec branch
    calls: PairCollectives
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None  # spec and verdict branch, on GPUs

    @classmethod
    def allocate(cls, shape: PairShape, exchange: Exchange, group: int, calls: PairCollectives) -> CollectiveHandover:
        """Allocate the buffers; `exchange` is the group's. Group 0 is the first sender."""
        device, batch = exchange.partial.device, shape.batch_size
        size = batch * (shape.num_qo_heads * shape.head_dim + shape.message_packets)

        def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        gate_buffer = new(3, shape.num_layers + 1, GATE_STRIDE, dtype=torch.int32)
        gate_buffer[group, 0, 0] = gate_buffer[group, -1, 0] = 1  # the state after a step
        return cls(
            shape=shape,
            group=group,
            handover_buffers=new(2, -(-size // 4) * 4),
            residuals=new(2, batch, shape.hidden_size),
            lists=new(2, shape.num_layers, batch, shape.num_kv_heads, shape.recall_blocks, dtype=torch.int32),
            sums=new(shape.tp_size, batch, num_sums(batch, shape.num_qo_heads, shape.head_dim), 2),
            verdicts=new(2 * shape.tp_size, batch + 1, dtype=torch.int32),
            gate_buffer=gate_buffer,
            spec_branch=Exchange(
                new(batch, shape.hidden_size), exchange.epoch, exchange.fault, exchange.tp_rank, exchange.tp_size,
                exchange.rank,
            ),
            calls=calls,
            streams=(torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None,
        )  # fmt: skip

    def gates(self, layer: int) -> Gates:
        """Return the gates of a layer. Layer L stands for the launches after the last layer."""
        return Gates(*(word[:1] for word in self.gate_buffer[:, layer]))

    @property
    def own_sums(self) -> Tensor:
        """[B, R, 2] fp32: this rank's part of `sums`."""
        return self.sums[self.spec_branch.tp_rank]

    def layer_senders(self) -> Tensor:
        """[L] int32: whether this rank's group was the sender of each layer of this step."""
        return self.gate_buffer[0, :-1, 0]

    def spec_output(self, chunk_size: int, recall: RecallBuffers | None = None) -> SpecOutput:
        """Return where attention writes: `A~` into this group's handover buffer, the sums into `own_sums`.

        recall: recalled blocks of the layer.
        """
        spec_out, shape = self.handover_parts(self.group)[0], self.shape
        return SpecOutput(
            chunk_size, spec_out.view(shape.batch_size, shape.num_qo_heads, shape.head_dim), self.own_sums,
            recall=recall,
        )  # fmt: skip

    def handover_parts(self, group: int) -> tuple[Tensor, Tensor]:
        """A group's handover buffer as `A~` [B, Hq D], and x, k and v [B, M]."""
        shape = self.shape
        sizes = [shape.batch_size * shape.num_qo_heads * shape.head_dim, shape.batch_size * shape.message_packets]
        spec_out, message = self.handover_buffers[group, : sum(sizes)].split(sizes)
        return spec_out.view(shape.batch_size, -1), message.view(shape.batch_size, -1)

    @contextmanager
    def fork(self, branch: Literal["spec", "verdict"]) -> Iterator[None]:
        """Run the launches of this block after earlier launches, and concurrently with later launches until `join`."""
        if self.streams is None:
            yield
            return
        stream = self.streams[branch == "verdict"]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Make later launches run after all branches.

        The next launch must not be a programmatic dependent launch, which would wait for one kernel instead of three.
        """
        for stream in self.streams or ():
            torch.cuda.current_stream().wait_stream(stream)

    def next_step(self) -> None:
        """Copy the roles after the last layer to layer 0 of the next step."""
        self.gate_buffer[:, 0].copy_(self.gate_buffer[:, -1])


@triton.jit
def _load_message(
    index, request, x_ptr, k_ptr, v_ptr, seq_lens_ptr, capacity, HIDDEN: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Channels `index` of a request's message (x, then the newest k and v) as fp32, and their mask."""
    mask = index < HIDDEN
    value = tl.load(x_ptr + request * HIDDEN + index, mask=mask, other=0.0)
    if k_ptr is not None:
        j = index - HIDDEN
        is_k, is_v = (j >= 0) & (j < HKV * D), (j >= HKV * D) & (j < 2 * HKV * D)
        mask = index < HIDDEN + 2 * HKV * D
        offsets = newest_offset(tl.maximum(j, 0) % (HKV * D), request, seq_lens_ptr, capacity, HKV, D)
        value = tl.where(is_k, tl.load(k_ptr + offsets, mask=is_k, other=0.0).to(tl.float32), value)
        value = tl.where(is_v, tl.load(v_ptr + offsets, mask=is_v, other=0.0).to(tl.float32), value)
    return value, mask


@triton.jit
def _pack_kernel(
    x_ptr,  # [B, HIDDEN] fp32
    k_ptr,  # [B, HKV, N, D], or None: pack only x
    v_ptr,
    seq_lens_ptr,  # [B] int32, with the new token
    out_ptr,  # [B, num_values] fp32
    gate_ptr,  # [1] int32
    capacity,
    num_values,
    HIDDEN: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK values of one request. Grid [num_values / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(gate_ptr) == 0:
        return
    request = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, mask = _load_message(index, request, x_ptr, k_ptr, v_ptr, seq_lens_ptr, capacity, HIDDEN, HKV, D)
    tl.store(out_ptr + request * num_values + index, value, mask=mask)


def pack_handover(
    handover: CollectiveHandover, layer: int, x: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor
) -> None:
    """Copy the sender's x and the newest token's k and v into its handover buffer, beside `A~`. Gate: `is_sender`.

    Args:
        x: [B, hidden] fp32.  k_cache, v_cache: [B, Hkv, N, D].  seq_lens: [B] int32, with the new token.
    Capture: graph-safe; allocates nothing.
    """
    message = handover.handover_parts(handover.group)[1]
    _pack(handover, layer, x, k_cache, v_cache, seq_lens, k_cache.shape[2], message, pdl_options(x.device)["PDL"])


def pack_residual(handover: CollectiveHandover, x: Tensor) -> None:
    """Copy the sender's x after the last layer into its residual buffer. Gate: `is_sender`. x: [B, hidden] fp32.

    Capture: graph-safe; allocates nothing. Not a dependent launch: it is the first one after a join.
    """
    _pack(handover, handover.shape.num_layers, x, None, None, None, 0, handover.residuals[handover.group], False)


def _pack(
    handover: CollectiveHandover,
    layer: int,
    x: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    seq_lens: Tensor | None,
    capacity: int,
    out: Tensor,
    is_dependent: bool,
) -> None:
    """Launch `_pack_kernel`. out: [B, num_values] fp32."""
    shape, num_values = handover.shape, out.shape[1]
    compiled = jit_launch(_pack_kernel, (triton.cdiv(num_values, BLOCK), shape.batch_size))(
        x, k_cache, v_cache, seq_lens, out, handover.gates(layer).is_sender, capacity, num_values,
        HIDDEN=shape.hidden_size, HKV=shape.num_kv_heads, D=shape.head_dim, BLOCK=BLOCK, num_warps=1,
        **(pdl_options(x.device) if is_dependent else {"PDL": False}),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(do_not_specialize_on_alignment=PER_HEAD)
def _unpack_handover_kernel(
    spec_out_ptr,  # [B, OUT] fp32, OUT = Hq D
    message_ptr,  # [B, M] fp32
    x_ptr,  # [B, HIDDEN] fp32
    k_ptr,  # [B, HKV, N, D], or None: store into the tail
    v_ptr,
    tail_ptr,  # [B, HKV, 2, 64, D] int8, or None
    tail_scale_ptr,  # [B, HKV, 2] fp32
    capacity,
    seq_lens_ptr,  # [B] int32, with the new token
    attn_out_ptr,  # [B, OUT]
    gate_ptr,  # [1] int32
    HIDDEN: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK values of one request, of `A~` or of its message. Grid [OUT / BLOCK + M / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(gate_ptr) == 0:
        return
    request = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) < tl.cdiv(OUT, BLOCK):
        spec_out = tl.load(spec_out_ptr + request * OUT + index, mask=index < OUT, other=0.0)
        tl.store(attn_out_ptr + request * OUT + index, spec_out.to(attn_out_ptr.dtype.element_ty), mask=index < OUT)
    else:
        index -= tl.cdiv(OUT, BLOCK) * BLOCK
        M: tl.constexpr = HIDDEN + 2 * HKV * D
        value = tl.load(message_ptr + request * M + index, mask=index < M, other=0.0)
        store_message(
            value, index, True, request, x_ptr, k_ptr, v_ptr, tail_ptr, tail_scale_ptr, capacity, seq_lens_ptr, HIDDEN,
            HKV, D,
        )  # fmt: skip


def unpack_handover(
    handover: CollectiveHandover,
    layer: int,
    x: Tensor,
    cache: CacheLayer,
    seq_lens: Tensor,
    attn_out: Tensor,
) -> None:
    """Copy x, k, v and `A~` out of the paired rank's handover buffer. Gate: `is_receiver`.

    Args:
        x: [B, hidden] fp32, written.
        cache: of the layer; the newest token is written, as by `receive_handover`.
        seq_lens: [B] int32, with the new token.
        attn_out: [B, Hq, D], written.
    Capture: graph-safe; allocates nothing.
    """
    shape = handover.shape
    spec_out, message = handover.handover_parts(1 - handover.group)
    blocks = triton.cdiv(spec_out.shape[1], BLOCK) + triton.cdiv(message.shape[1], BLOCK)
    compiled = jit_launch(_unpack_handover_kernel, (blocks, shape.batch_size))(
        spec_out, message, x, *cache_args(cache), seq_lens, attn_out, handover.gates(layer).is_receiver,
        HIDDEN=shape.hidden_size, HKV=shape.num_kv_heads, D=shape.head_dim, OUT=spec_out.shape[1], BLOCK=BLOCK,
        num_warps=1, **pdl_options(x.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def _unpack_residual_kernel(
    residual_ptr,  # [B, HIDDEN] fp32
    x_ptr,  # [B, HIDDEN] fp32
    gamma_ptr,  # [HIDDEN]
    x_norm_ptr,  # [B, HIDDEN]
    squares_ptr,  # [B, S] fp32
    gate_ptr,  # [1] int32
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK channels of one request. Grid [HIDDEN / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < HIDDEN
    gamma = tl.load(gamma_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if tl.load(gate_ptr) == 0:
        return
    offsets = request * HIDDEN + channels
    x = tl.load(residual_ptr + offsets, mask=inside, other=0.0)
    write_residual(x, offsets, inside, gamma, x_ptr, x_norm_ptr, squares_ptr, request)


def unpack_residual(
    handover: CollectiveHandover, x: Tensor, gamma: Tensor, x_norm: Tensor, square_sums: Tensor
) -> None:
    """Copy the sender's x after the last layer; compute the inputs of the final norm. Gate: `is_receiver`.

    Args:
        As `reduce_norm`; x is overwritten.
    Capture: graph-safe; allocates nothing.
    """
    shape = handover.shape
    compiled = jit_launch(_unpack_residual_kernel, (num_square_sums(shape.hidden_size), shape.batch_size))(
        handover.residuals[1 - handover.group], x, gamma, x_norm, square_sums,
        handover.gates(shape.num_layers).is_receiver, HIDDEN=shape.hidden_size, BLOCK=RESIDUAL_BLOCK,
        num_warps=1, **pdl_options(x.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(do_not_specialize=["rank", "layer"])
def _decide_kernel(
    sums_ptr,  # [T, B, SUMS, 2] fp32
    live_ptr,  # [B] int32
    forced_ptr,  # [L] int32, or None
    verdicts_ptr,  # [2 T, B + 1] int32
    is_sender_ptr,  # [1] int32: gate of this layer
    recompute_ptr,  # [1] int32: gate of this layer
    rank,
    layer,
    threshold2,
    ACCEPT_ALL: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    SUMS: tl.constexpr,
    SUMS_PAD: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the verdict from the sums of the group's ranks. Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([2 * B_PAD], tl.float32)
    # Add in rank order: all ranks of the group get the same bits, so the same verdict.
    for tp_rank in tl.static_range(T):
        total += add_sums(sums_ptr + tp_rank * (B * SUMS * 2), B, B_PAD, SUMS, SUMS_PAD)
    accepted, verdict = request_verdicts(total, live_ptr, forced_ptr, layer, threshold2, ACCEPT_ALL, B, B_PAD)
    requests = tl.arange(0, B_PAD)
    tl.store(recompute_ptr, tl.where(verdict, 0, tl.load(is_sender_ptr)))
    verdict_ptr = verdicts_ptr + rank * (B + 1)
    tl.store(verdict_ptr + requests, accepted.to(tl.int32), mask=requests < B)
    tl.store(verdict_ptr + B, verdict.to(tl.int32))


def decide(
    handover: CollectiveHandover, layer: int, live: Tensor, threshold: float, forced: Tensor | None = None
) -> None:
    """Compute the group's verdict on a layer's `A~` from `handover.sums`. No gate.

    Writes this rank's row of `handover.verdicts`, and this layer's gate `recompute`. On a receiver the row is
    meaningless and `recompute` is 0. Rules: `alspec.verdict`, `alspec.priority`. Oracle: `decide_ref`.

    Args:
        live: [B] int32, the same on every rank of the job.
        threshold: lambda >= 0, fixed at capture.
        forced: [L] int32, as in `roles.decide`.
    Raises:
        ValueError: `threshold` is negative or NaN.
    Capture: graph-safe; allocates nothing.
    """
    threshold2, accept_all = squared_threshold(threshold)
    shape, gates = handover.shape, handover.gates(layer)
    compiled = jit_launch(_decide_kernel, (1,))(
        handover.sums, live, forced, handover.verdicts, gates.is_sender, gates.recompute, handover.spec_branch.rank,
        layer, threshold2, ACCEPT_ALL=accept_all, B=shape.batch_size, B_PAD=triton.next_power_of_2(shape.batch_size),
        SUMS=handover.sums.shape[2], SUMS_PAD=triton.next_power_of_2(handover.sums.shape[2]), T=shape.tp_size,
        num_warps=1, **pdl_options(live.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(do_not_specialize=["layer", "group"])
def _apply_verdict_kernel(
    verdicts_ptr,  # [2 T, B + 1] int32
    hits_ptr,  # [L, B] int32
    is_sender_ptr,  # [1] int32: gate of this layer
    next_is_sender_ptr,  # [1] int32: gate of the next layer
    next_is_receiver_ptr,  # [1] int32
    layer,
    group,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read the verdict of the sending group's first rank. Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    is_sender = tl.load(is_sender_ptr)
    verdict_ptr = verdicts_ptr + tl.where(is_sender == 1, group, 1 - group) * T * (B + 1)
    requests = tl.arange(0, B_PAD)
    accepted = tl.load(verdict_ptr + requests, mask=requests < B, other=0)
    tl.store(hits_ptr + layer * B + requests, accepted, mask=requests < B)
    next_is_sender = tl.where(tl.load(verdict_ptr + B) == 1, 1 - is_sender, is_sender)
    tl.store(next_is_sender_ptr, next_is_sender)
    tl.store(next_is_receiver_ptr, 1 - next_is_sender)


def apply_verdict(handover: CollectiveHandover, layer: int, hits: Tensor) -> None:
    """Set the roles of the next layer from the sending group's verdict in `handover.verdicts`. No gate.

    Args:
        hits: [L, B] int32; the row of this layer is written, 0 for a request that is not live.
    Capture: graph-safe; allocates nothing.
    """
    shape, next_gates = handover.shape, handover.gates(layer + 1)
    compiled = jit_launch(_apply_verdict_kernel, (1,))(
        handover.verdicts, hits, handover.gates(layer).is_sender, next_gates.is_sender, next_gates.is_receiver, layer,
        handover.group, B=shape.batch_size, B_PAD=triton.next_power_of_2(shape.batch_size), T=shape.tp_size,
        num_warps=1, **pdl_options(hits.device),
    )  # fmt: skip
    set_l1_carveout(compiled)
