"""Recall: which blocks of 64 tokens the next `A~` reads beside sink and window. The rule: alspec/predictor.py.

Decode attention leaves the weights of each block (`RecallBuffers.block_lse`) while it reads the cache for the verdict.
After the layers of a step one launch chooses the heaviest blocks of all layers: the recall lists of the next token.

Shapes: L layers, B requests, Hq query heads, Hkv KV heads, NB blocks of the cache, M blocks of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.lean_decode import RecallBuffers
from alspec.kernels.attention.decode.tile_schedule import KV_BLOCK, token_ranges
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.predictor import KV_TILE, predictor_ranges, recall_lists

__all__ = [
    "RecallState",
    "choose_recall_lists",
    "launch_list_choice",
    "recall_bytes",
    "recall_lists_ref",
    "take_recall_lists",
]

NO_BLOCK = tl.constexpr(2**31 - 1)  # sorts behind every block


@dataclass(frozen=True)
class RecallState:
    """Recall lists of all layers, and the weights of blocks from which the next ones are chosen."""

    lists: Tensor  # [L, B, Hkv, M] int32, ascending, then -1
    block_lse: Tensor  # [L, B, Hkv, NB, 4, Hq / Hkv] fp32, see `RecallBuffers`
    lse: Tensor  # [L, B, Hq] fp32, base 2, of the full attention
    parts: int  # of `A~` over recalled blocks, see `RecallBuffers`
    windows: Tensor | None = None  # [L] int32, the sliding window of each layer; where it has none, its capacity

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        capacity: int,
        recall_blocks: int,
        parts: int,
        device: torch.device,
        windows: Sequence[int | None] = (),
    ) -> RecallState:
        """Allocate with empty lists.

        Args:
            capacity: tokens of the cache.  recall_blocks: M.  parts: from `attend_recall_parts`.
            windows: sliding window of each layer, None without one; not given: no layer has one.
        """
        shape = (num_layers, batch_size, num_kv_heads)
        weights = (*shape, -(-capacity // KV_TILE), 4, num_qo_heads // num_kv_heads)
        return cls(
            torch.full((*shape, recall_blocks), -1, dtype=torch.int32, device=device),
            torch.full(weights, float("-inf"), device=device),
            torch.zeros(num_layers, batch_size, num_qo_heads, device=device),
            parts,
            torch.tensor([window or capacity for window in windows], dtype=torch.int32, device=device)
            if any(windows)
            else None,
        )

    def buffers(self, layer: int) -> RecallBuffers:
        """What attention over a layer reads and writes."""
        return RecallBuffers(self.lists[layer], self.block_lse[layer], self.parts)


def recall_bytes(num_layers: int, num_qo_heads: int, num_kv_heads: int, capacity: int, recall_blocks: int) -> int:
    """Bytes of `RecallState` for one request: lists, weights of blocks and lse of all layers."""
    weights = -(-capacity // KV_TILE) * 4 * num_qo_heads
    return 4 * num_layers * (num_kv_heads * recall_blocks + weights + num_qo_heads)


def recall_lists_ref(
    block_lse: Tensor, lse: Tensor, seq_lens: Tensor, chunk_size: int, count: int, windows: Tensor | None = None
) -> Tensor:
    """Recall lists of the next token from what the full attention of this one left.

        mass(block) = max over the heads of a KV head of sum 2^(block_lse - lse)

    Args:
        block_lse: [..., B, Hkv, NB, 4, Hq / Hkv] fp32.  lse: [..., B, Hq] fp32.
        seq_lens: [B] integers, tokens up to and with the one that attended.  chunk_size: S.  count: M.
        windows: [...] integers, sliding windows, as `RecallState.windows`; None: no layer has one.
    Returns:
        [..., B, Hkv, M] int32.
    """
    heads = lse.unflatten(-1, (block_lse.shape[-4], -1))[..., None, None, :]
    mass = torch.exp2(block_lse - heads).sum(-2).amax(-1)
    sliding_window = None if windows is None else windows[..., None]
    sink_end, window_start = predictor_ranges(seq_lens, chunk_size, sliding_window)
    return recall_lists(mass, sink_end[..., None], window_start[..., None], count)


@triton.jit(do_not_specialize=["num_blocks", "chunk_size"])
def _choose_recall_lists_kernel(
    block_lse_ptr,  # [L, B bundles, HKV, NB, 4, TOGETHER HEADS] fp32
    lse_ptr,  # [L, B ROWS, HKV, HEADS] fp32
    seq_lens_ptr,  # [B] int32
    lists_ptr,  # [L, B, HKV, RECALL] int32
    peer_lists_ptr,  # the same, of another rank; or None
    senders_ptr,  # [L] int32: layers that this rank has the weights of; or None: all
    chosen_rows_ptr,  # [B] int32: of ROWS rows of each request, the one that counts; or None: there is one
    windows_ptr,  # [L] int32: sliding windows; or None: no layer has one
    half_ptr,  # [1] int32: of lists [2, ...], those that are written; or None: there is one half
    num_blocks,
    chunk_size,
    HKV: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RECALL: tl.constexpr,
    RECALL_PAD: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,  # rows of a bundle
):
    """Choose one list. Grid [HKV, B, L]."""
    head, request, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if senders_ptr is not None:
        if tl.load(senders_ptr + layer) == 0:
            return
    row = (layer * tl.num_programs(1) + request) * HKV + head
    sliding_window = None
    if windows_ptr is not None:
        sliding_window = tl.load(windows_ptr + layer)
    _, sink, window = token_ranges(tl.load(seq_lens_ptr + request), chunk_size, True, sliding_window)
    blocks, heads = tl.arange(0, BLOCKS_PAD), tl.arange(0, HEADS_PAD)
    is_between = (blocks * KV_BLOCK >= sink) & (blocks * KV_BLOCK + KV_BLOCK <= window)
    lse_row, output, first_column = row, row, 0
    STRIDE: tl.constexpr = TOGETHER * HEADS
    if chosen_rows_ptr is not None:
        BUNDLES: tl.constexpr = (ROWS + TOGETHER - 1) // TOGETHER
        chosen_row = tl.load(chosen_rows_ptr + request)
        lse_row = ((layer * tl.num_programs(1) + request) * ROWS + chosen_row) * HKV + head
        output = ((layer * tl.num_programs(1) + request) * BUNDLES + chosen_row // TOGETHER) * HKV + head
        first_column = chosen_row % TOGETHER * HEADS
    lse = tl.load(lse_ptr + lse_row * HEADS + heads, mask=heads < HEADS, other=float("inf"))
    weights = tl.zeros([BLOCKS_PAD, HEADS_PAD], tl.float32)
    first = block_lse_ptr + output.to(tl.int64) * num_blocks * (4 * STRIDE) + first_column
    mask = is_between[:, None] & (heads < HEADS)[None, :]
    for part in tl.static_range(4):
        offsets = (blocks * 4 + part)[:, None] * STRIDE + heads[None, :]
        block_lse = tl.load(first + offsets, mask=mask, other=float("-inf"))
        weights += tl.exp2(block_lse - lse[None, :])
    mass = tl.max(tl.where(mask, weights, 0.0), 1)
    # Masses are not negative, so their bits order as they do. Of equal masses the lower block is the larger key.
    keys = (mass.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (-blocks + NO_BLOCK).to(tl.int64)
    keys = tl.topk(tl.where(is_between, keys, -1), RECALL_PAD)
    order = tl.arange(0, RECALL_PAD)
    chosen = tl.where((keys >= 0) & (order < RECALL), -(keys & 0xFFFFFFFF).to(tl.int32) + NO_BLOCK, NO_BLOCK)
    ascending = tl.sort(chosen)
    listed = tl.where(ascending == NO_BLOCK, -1, ascending)
    if half_ptr is not None:
        row += tl.load(half_ptr) * tl.num_programs(2) * tl.num_programs(1) * HKV
    tl.store(lists_ptr + row * RECALL + order, listed, mask=order < RECALL)
    if peer_lists_ptr is not None:
        tl.store(peer_lists_ptr + row * RECALL + order, listed, mask=order < RECALL)


def choose_recall_lists(
    state: RecallState,
    seq_lens: Tensor,
    chunk_size: int,
    layers: slice = slice(None),
    lists: Tensor | None = None,
    peer_lists: Tensor | None = None,
    senders: Tensor | None = None,
    half: Tensor | None = None,
) -> None:
    """Choose the recall lists of layers from the weights that attention of this token left. Oracle: `recall_lists_ref`.

    Args:
        seq_lens: [B] int32, tokens that this attention read.  chunk_size: S.
        layers: which layers.
        lists: written instead of those of the state.
        peer_lists: the same lists of the paired rank, written as well.
        senders: [L] int32; lists of layers with 0 are left as they are.
        half: [1] int32: `lists` and `peer_lists` are [2, L, B, Hkv, M], and this half is written.
    Capture: graph-safe on CUDA tensors; allocates nothing there.
    """
    lists = state.lists[layers] if lists is None else lists
    block_lse, lse = state.block_lse[layers], state.lse[layers]
    windows = None if state.windows is None else state.windows[layers]
    if lists.is_cuda:
        launch_list_choice(
            block_lse, lse, seq_lens, chunk_size, lists, peer_lists, senders, windows=windows, half=half
        )  # fmt: skip
        return
    chosen = recall_lists_ref(block_lse, lse, seq_lens, chunk_size, lists.shape[-1], windows)
    is_sender = slice(None) if senders is None else senders != 0
    for written in (lists,) if peer_lists is None else (lists, peer_lists):
        target = written if half is None else written[int(half)]
        target[is_sender] = chosen[is_sender]


def launch_list_choice(
    block_lse: Tensor,
    lse: Tensor,
    seq_lens: Tensor,
    chunk_size: int,
    lists: Tensor,
    peer_lists: Tensor | None = None,
    senders: Tensor | None = None,
    chosen_rows: Tensor | None = None,
    rows: int = 1,
    together: int = 1,
    windows: Tensor | None = None,
    half: Tensor | None = None,
) -> None:
    """Launch the kernel of `choose_recall_lists`, with the tensors of the chosen layers.

    Args:
        chosen_rows: [B] int32, the row of each request whose attention chooses; None: there is one row.
        rows: rows of each request.  lse: [L, B rows, Hq].
        together: rows of a bundle.  block_lse: [L, B bundles, Hkv, NB, 4, together Hq / Hkv], see `attend_rows`.
        windows: [L] int32, see `RecallState`.
        half: see `choose_recall_lists`.
    """
    num_layers, batch_size, num_kv_heads, count = lists.shape[-4:]
    num_blocks, heads = block_lse.shape[3], lse.shape[2] // num_kv_heads
    recall_pad = max(2, triton.next_power_of_2(count))  # `tl.topk` takes two or more
    pad = max(triton.next_power_of_2(num_blocks), recall_pad)
    compiled = jit_launch(_choose_recall_lists_kernel, (num_kv_heads, batch_size, num_layers))(
        block_lse, lse, seq_lens, lists, peer_lists, senders, chosen_rows, windows, half, num_blocks, chunk_size,
        HKV=num_kv_heads, HEADS=heads, ROWS=rows, TOGETHER=together,
        HEADS_PAD=triton.next_power_of_2(heads), RECALL=count, RECALL_PAD=recall_pad, BLOCKS_PAD=pad,
        num_warps=num_warps(pad),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(do_not_specialize=["size"])
def _take_recall_lists_kernel(
    halves_ptr,  # [2, size] int32
    epoch_ptr,  # [1] int32
    seq_lens_ptr,  # [B] int32
    lists_ptr,  # [size] int32
    next_half_ptr,  # [1] int32
    kept_lens_ptr,  # [B] int32
    size,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy BLOCK entries. Grid [size / BLOCK]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    half = tl.load(epoch_ptr) & 1
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Volatile: the paired rank writes this memory.
    entries = tl.load(halves_ptr + half * size + offsets, mask=offsets < size, volatile=True)
    tl.store(lists_ptr + offsets, entries, mask=offsets < size)
    if tl.program_id(0) == 0:
        requests = tl.arange(0, B_PAD)
        lengths = tl.load(seq_lens_ptr + requests, mask=requests < B, other=0)
        tl.store(kept_lens_ptr + requests, lengths, mask=requests < B)
        tl.store(next_half_ptr, 1 - half)


def take_recall_lists(
    halves: Tensor, epoch: Tensor, seq_lens: Tensor, lists: Tensor, next_half: Tensor, kept_lens: Tensor
) -> None:
    """Take the lists of this step, and keep what the choice of the next ones reads beside the end of this step.

        lists = halves[epoch % 2];  next_half = (epoch + 1) % 2;  kept_lens = seq_lens

    Args:
        halves: [2, L, B, Hkv, M] int32, see `Mailbox.lists`.
        epoch: [1] int32, the number of the step.  seq_lens: [B] int32. The last launch of a step changes both.
        lists: [L, B, Hkv, M] int32, written.
        next_half: [1] int32, written: where the lists of the next step go.  kept_lens: [B] int32, written.
    Capture: graph-safe; allocates nothing.
    """
    size, block, batch_size = lists.numel(), 1024, seq_lens.shape[0]
    compiled = jit_launch(_take_recall_lists_kernel, (triton.cdiv(size, block),))(
        halves, epoch, seq_lens, lists, next_half, kept_lens, size, B=batch_size,
        B_PAD=triton.next_power_of_2(batch_size), BLOCK=block, num_warps=4, **pdl_options(lists.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


def num_warps(blocks_pad: int) -> int:
    """Warps of a program that chooses among `blocks_pad` blocks, a power of two."""
    return max(1, min(16, blocks_pad // 128))
