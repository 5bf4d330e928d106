"""Decode attention of one rank over a cache of any codec, without speculation or with `A~` and its verification.

CPU tensors: PyTorch, on dequantised K and V if the cache is quantised. CUDA tensors: the kernel of the codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import (
    LeanWorkspace,
    Phase,
    SpecOutput,
    lean_decode_attention,
    lean_recall_parts,
    spec_parts,
)
from alspec.kernels.attention.decode_quantised.quantised_decode import (
    programs_of_rows,
    quantised_decode_attention,
    quantised_recall_parts,
    quantised_rows_together,
    quantised_settings,
    quantised_spec_parts,
)
from alspec.kernels.attention.recall import RecallState, choose_recall_lists
from alspec.kernels.attention.torch_attention import (
    combine_partials,
    decode_attention,
    predictor_attention,
    verify_attention,
)
from alspec.kernels.attention.torch_recall import recalled_attention, rest_block_lse
from alspec.kernels.common.jit_launch import num_sms
from alspec.kernels.kv_codec.codec_reference import kv_dequantize
from alspec.kernels.kv_codec.quantised_layer import QuantisedLayer
from alspec.sas import Softmax
from alspec.verdict import distance_sums

__all__ = [
    "CacheLayer",
    "DecodeAttention",
    "KVLayer",
    "attend",
    "attend_recall_parts",
    "attend_rows",
    "attend_spec_parts",
    "attend_workspace",
    "attend_workspaces",
    "layer_kind",
    "rows_together",
]


class KVLayer(NamedTuple):
    """The uncompressed KV cache of one layer, or of a stack of layers with a leading dimension L.

    A ring holds the newest N tokens of a sliding window: position p lies at p mod N. Attention does not depend on the
    order of its tokens, so it reads the first min(n, N) of a ring as it reads any cache.
    """

    k: Tensor  # [B, Hkv, N, D]
    v: Tensor  # [B, Hkv, N, D]
    is_ring: bool = False
    sliding_window: int | None = None  # of a layer that holds more tokens than a token attends to; None: it reads all

    @property
    def batch_size(self) -> int:
        """B, the number of requests."""
        return self.k.shape[-4]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.k.shape[-3]

    @property
    def head_dim(self) -> int:
        """D, the channels of a head."""
        return self.k.shape[-1]

    @property
    def softmax(self) -> Softmax:
        """The softmax that attention over this cache uses."""
        return "exact"

    def select(self, layer: int) -> KVLayer:
        """Return one layer of a stack."""
        return KVLayer(self.k[layer], self.v[layer], self.is_ring, self.sliding_window)

    def lengths(self, seq_lens: Tensor) -> Tensor:
        """Tokens that attention reads, [B], of requests of `seq_lens` tokens."""
        return seq_lens.clamp(max=self.k.shape[-2]) if self.is_ring else seq_lens


CacheLayer = KVLayer | QuantisedLayer


def layer_kind(layer: CacheLayer) -> tuple[type, bool]:
    """Return what decides over workspace and bundles of rows in a cache whose layers share softmax and head size."""
    return type(layer), layer.sliding_window is None


def rows_together(layer: CacheLayer, num_qo_heads: int, rows: int) -> int:
    """Return how many rows of a request `attend_rows` computes together, in one bundle."""
    if isinstance(layer, KVLayer):
        return rows
    return quantised_rows_together(num_qo_heads // layer.num_kv_heads, rows, layer.softmax, layer.sliding_window)


def attend_workspace(
    layer: CacheLayer, num_qo_heads: int, device: torch.device, spare_sms: int = 0, rows: int = 1
) -> LeanWorkspace:
    """Allocate the scratch memory of `attend` for all SMs but `spare_sms`; for 4 programs in the interpreter.

    rows: of each request, for `attend_rows`.
    """
    sms = num_sms(device) - spare_sms if device.type == "cuda" else 4
    is_quantised = isinstance(layer, QuantisedLayer)
    programs = quantised_settings(device).per_sm * sms if is_quantised else sms
    together = rows_together(layer, num_qo_heads, rows)
    bundles = layer.batch_size * -(-rows // together)
    if is_quantised and rows > 1:
        programs = programs_of_rows(programs, bundles * layer.num_kv_heads)
    return LeanWorkspace.allocate(
        bundles, together * num_qo_heads, layer.num_kv_heads, layer.head_dim, device, programs
    )


def attend(
    q: Tensor,
    layer: CacheLayer,
    seq_lens: Tensor,
    sm_scale: float,
    workspace: LeanWorkspace,
    out: Tensor,
    lse: Tensor,
    speculation: SpecOutput | None = None,
    phase: Phase = "all",
    gate: Tensor | None = None,
    *,
    prefetch_before_wait: bool = False,
    after_join: bool = False,
) -> None:
    """Launch the decode attention kernel of the layer's codec.

    Args, Raises and Capture as for `lean_decode_attention`; `layer` replaces `k_cache` and `v_cache`.
    """
    args = (seq_lens, sm_scale, workspace, out, lse, speculation, phase, gate)
    launch: dict[str, Any] = {"prefetch_before_wait": prefetch_before_wait, "after_join": after_join}
    if isinstance(layer, QuantisedLayer):
        quantised_decode_attention(q, layer, *args, **launch)
    else:
        lean_decode_attention(q, layer.k, layer.v, *args, sliding_window=layer.sliding_window, **launch)


def attend_rows(
    q: Tensor,
    layer: CacheLayer,
    row_lens: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    workspace: LeanWorkspace,
    out: Tensor,
    lse: Tensor,
    block_lse: Tensor | None = None,
    prefetch_before_wait: bool = False,
) -> None:
    """Launch decode attention of R rows of each request, each over the tokens up to its own.

    Args:
        q: [B R, Hq, D], rows of a request side by side.  row_lens: [B, R] int32, ascending; in a layer with a sliding
            window, from each row to the next by at most 1; over a quantised cache, in one block of 64 tokens.
        seq_lens: [B] int32, the last of each request's `row_lens`.
        workspace: of `attend_workspace` with R rows.  out: [B R, Hq, D].  lse: [B R, Hq] fp32.
        block_lse: written with the weights of blocks, [B N, Hkv, NB, 4, T Hq / Hkv]: of N bundles of T rows, see
            `rows_together`. Rows behind the last one of a request repeat it.
        prefetch_before_wait: as for `attend`.
    Raises, Capture: as for `lean_decode_attention`.
    """
    options: dict[str, Any] = {"prefetch_before_wait": prefetch_before_wait, "block_lse": block_lse}
    if isinstance(layer, QuantisedLayer):
        quantised_decode_attention(
            q, layer, row_lens.flatten(), sm_scale, workspace, out, lse, rows=row_lens.shape[1], **options
        )
    else:
        lean_decode_attention(
            q, layer.k, layer.v, seq_lens, sm_scale, workspace, out, lse,
            row_lens=row_lens if row_lens.shape[1] > 1 else None, sliding_window=layer.sliding_window, **options,
        )  # fmt: skip


def attend_spec_parts(layer: CacheLayer, num_qo_heads: int, chunk_size: int, device: torch.device) -> int:
    """Return the number of parts in which `attend` sends `A~`, if the receiver is on another GPU."""
    batch_size, num_kv_heads = layer.batch_size, layer.num_kv_heads
    if isinstance(layer, QuantisedLayer):
        return quantised_spec_parts(batch_size, num_qo_heads // num_kv_heads, device)
    return spec_parts(chunk_size, batch_size, num_qo_heads, num_kv_heads, layer.head_dim, layer.k.dtype, device)


def attend_recall_parts(layers: Sequence[CacheLayer], recall_blocks: int) -> int:
    """Return the number of parts of `A~` over so many recalled blocks; the same for all layers."""
    kinds = {isinstance(layer, QuantisedLayer) for layer in layers}
    return min((quantised_recall_parts if kind else lean_recall_parts)(recall_blocks) for kind in kinds)


def attend_workspaces(
    layers: Sequence[CacheLayer], num_qo_heads: int, device: torch.device, spare_sms: int = 0, rows: int = 1
) -> dict[tuple[type, bool], LeanWorkspace]:
    """Allocate `attend_workspace` once for each `layer_kind`."""
    kinds = {layer_kind(layer): layer for layer in layers}
    return {kind: attend_workspace(layer, num_qo_heads, device, spare_sms, rows) for kind, layer in kinds.items()}


class DecodeAttention:
    """Attention of one new token per request. Owns the scratch memory that its launches share.

    A speculative layer calls `predict`, may send the result, and then calls `verify` with the same arguments. With
    recalled blocks it then calls `recall`, which chooses the layer's blocks for the next token.

    Args:
        layers: all layers of the cache; they give the shapes and the codecs.
        recall: lists of all layers; None: `A~` reads sink and window.

    Shapes: B requests, Hq and Hkv this rank's query and KV heads, D head_dim, N cache capacity.
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        num_qo_heads: int,
        chunk_size: int,
        sm_scale: float,
        device: torch.device,
        recall: RecallState | None = None,
    ) -> None:
        self._chunk_size = chunk_size
        self._layers, self._recall = layers, recall
        self._sm_scale = sm_scale
        self._is_cuda = device.type == "cuda"
        if not self._is_cuda:
            return
        layer = layers[0]
        shape = (layer.batch_size, num_qo_heads, layer.head_dim)
        self._workspaces = attend_workspaces(layers, num_qo_heads, device)
        self._out, self._spec_out = (torch.empty(shape, device=device) for _ in range(2))
        self._lse = torch.empty(shape[:2], device=device)
        self._speculation = SpecOutput(
            chunk_size,
            self._spec_out,
            torch.empty(layer.batch_size, num_sums(layer.batch_size, num_qo_heads, layer.head_dim), 2, device=device),
        )

    def full(self, q: Tensor, layer: CacheLayer, seq_lens: Tensor) -> Tensor:
        """Compute `A` without speculation.

        Args:
            q: [B, Hq, D].  layer: the cache of one layer.  seq_lens: [B] int32. All on the device.
        Returns:
            [B, Hq, D] fp32; on CUDA the same buffer in every call.
        """
        if not self._is_cuda:
            return self._decode(q, layer, *_dense_kv(layer, seq_lens), seq_lens)
        self._launch(q, layer, seq_lens, None)
        return self._out

    def full_rows(self, q: Tensor, layer: CacheLayer, seq_lens: Tensor) -> Tensor:
        """Compute `A` for several rows of each request, each over the tokens up to its own: the bits of `full`.

        Args:
            q: [R, B, Hq, D].  layer: the cache of one layer, with the tokens of all rows.
            seq_lens: [R, B] int32; over a quantised cache, the last tokens of a request's rows lie in one block of 64.
        Returns:
            [R, B, Hq, D] fp32.
        """
        if self._is_cuda:
            return torch.stack([self.full(row, layer, n).clone() for row, n in zip(q, seq_lens, strict=True)])
        # Rows of one block read the same records: the layer is dequantised once.
        kv = _dense_kv(layer, seq_lens.amax(0))
        rows = zip(q, seq_lens, strict=True)
        return torch.stack([self._decode(row, layer, *kv, n) for row, n in rows])

    def predict(self, q: Tensor, layer: CacheLayer, seq_lens: Tensor, index: int = 0) -> Tensor:
        """Compute `A~` over sink, window and recalled blocks.

        Args:
            q, layer, seq_lens: as for `full`.  index: of the layer, whose list is read with recalled blocks.
        Returns:
            As for `full`.
        """
        if self._is_cuda:
            self._launch(q, layer, seq_lens, self._spec_output(index), "predictor", index)
            return self._spec_out
        self._kv = _dense_kv(layer, seq_lens)
        softmax, window = layer.softmax, layer.sliding_window
        self._near = predictor_attention(  # over sink and window
            q, *self._kv, seq_lens, self._chunk_size, self._sm_scale, softmax, window
        )
        self._spec_out = self._near[0]
        if self._recall is not None:
            lists = self._recall.lists[index]
            recalled = recalled_attention(q, *self._kv, seq_lens, lists, self._sm_scale, softmax, window)
            parts = zip(self._near, recalled, strict=True)
            self._spec_out, _ = combine_partials(*(torch.stack(part) for part in parts))
        return self._spec_out

    def verify(self, q: Tensor, layer: CacheLayer, seq_lens: Tensor, index: int = 0) -> tuple[Tensor, Tensor]:
        """Complete the last `A~` to `A`; arguments as for `predict`.

        Returns:
            full_out: as for `full`.  sums: [B, 2] fp32, (dist2, norm2).
        """
        if self._is_cuda:
            speculation = self._spec_output(index)
            self._launch(q, layer, seq_lens, speculation, "rest", index)
            return self._out, speculation.sums.sum(1)
        softmax, window = layer.softmax, layer.sliding_window
        full_out, lse = verify_attention(
            q, *self._kv, seq_lens, *self._near, self._chunk_size, self._sm_scale, softmax, window
        )
        if self._recall is not None:
            self._recall.lse[index] = lse
            block_lse = self._recall.block_lse[index]
            rest_block_lse(q, self._kv[0], seq_lens, self._chunk_size, self._sm_scale, softmax, block_lse, window)
        del self._kv  # a whole dequantised layer: do not hold two at a time
        return full_out, distance_sums(self._spec_out, full_out)

    def recall(self, seq_lens: Tensor, index: int) -> None:
        """Choose the blocks of layer `index` for the next token, after `verify` at lengths `seq_lens`."""
        if self._recall is not None:
            choose_recall_lists(self._recall, seq_lens, self._chunk_size, slice(index, index + 1))

    def recall_prompts(self, queries: Tensor, seq_lens: Tensor, continued: Sequence[int] = ()) -> None:
        """Choose the blocks of all layers for the token after prompts of `seq_lens` tokens.

        Args:
            queries: [L, B, Hq, D], of the last token of each prompt.
            continued: requests that keep their lists.
        """
        assert self._recall is not None
        rows = list(continued)
        kept = self._recall.lists[:, rows].clone()
        for index, (q, layer) in enumerate(zip(queries, self._layers, strict=True)):
            self.predict(q, layer, seq_lens, index)
            self.verify(q, layer, seq_lens, index)
            self.recall(seq_lens, index)
        self._recall.lists[:, rows] = kept

    def _decode(self, q: Tensor, layer: CacheLayer, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        return decode_attention(q, k, v, seq_lens, self._sm_scale, layer.softmax, layer.sliding_window)[0]

    def _spec_output(self, index: int) -> SpecOutput:
        if self._recall is None:
            return self._speculation
        return replace(self._speculation, recall=self._recall.buffers(index))

    def _launch(
        self,
        q: Tensor,
        layer: CacheLayer,
        seq_lens: Tensor,
        speculation: SpecOutput | None,
        phase: Phase = "all",
        index: int = 0,
    ) -> None:
        workspace, lse = self._workspaces[layer_kind(layer)], self._lse
        if speculation is not None and self._recall is not None:
            lse = self._recall.lse[index]
        attend(
            q, layer, seq_lens, self._sm_scale, workspace, self._out, lse, speculation, phase,
            after_join=phase == "predictor",  # a collective of an eager step runs on a stream of its own
        )  # fmt: skip


def _dense_kv(layer: CacheLayer, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [B, Hkv, N, D], dequantised if the cache is quantised; indexed by position."""
    return (layer.k, layer.v) if isinstance(layer, KVLayer) else kv_dequantize(layer, seq_lens)
