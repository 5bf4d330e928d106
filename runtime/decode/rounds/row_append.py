"""A prompt's tokens behind a kept prefix, several in each pass over the fused kernels, replayed from a graph.

An eager prompt pass over a few tokens takes as long as its launches do. One of these passes takes little longer than a
decode step. It computes no logits: the prompt's last token is left to a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alspec.kernels.common.jit_launch import compiling
from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.runtime.decode.captured_step import capture_graph
from alspec.runtime.decode.hooks import OperationHook, no_hook
from alspec.runtime.decode.rounds.row_decoder import RowDecoder

__all__ = ["RowAppend", "pass_sizes"]

# With more passes than this, an eager prompt pass may be as fast.
MAX_PASSES = 4


class RowAppend:
    """Passes that append up to W tokens of one request each, on one rank of one group.

    Args:
        decoder: of one request with W rows. It has the epoch and the fault word of the decode steps of its cache.
    """

    def __init__(self, decoder: RowDecoder, uses_graph: bool, operation: OperationHook) -> None:
        """Create the passes; `prepare` captures one."""
        assert len(decoder.round_rows.token_ids) == 1
        self._decoder, self._uses_graph, self._operation = decoder, uses_graph, operation
        self._device = decoder.buffers.token_ids.device
        self._has_blocks = any(decoder.cache.quantised(layer) for layer in range(decoder.config.num_layers))
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def max_tokens(self) -> int:
        """Most tokens to append this way: for more, use an eager prompt pass."""
        return MAX_PASSES * self._decoder.rows

    def prepare(self) -> int:
        """Compile and capture a pass. Overwrites the start of the cache; returns the fault word of its trial runs."""
        self._set([0], 0)
        if self._device.type == "cuda":
            with compiling():
                self._launch_kernels(no_hook)
        for _ in range(2):
            self._launch_kernels(no_hook)
        fault = int(self._decoder.exchange.fault)
        if self._uses_graph and not fault:
            self._graph = capture_graph(self._device, lambda: self._launch_kernels(no_hook))
        return fault

    def run(self, token_ids: Sequence[int], start: int) -> int:
        """Append tokens behind the first `start` ones that the cache holds; returns the fault word.

        Over a quantised cache, `start` need not be a multiple of 64: appended tokens go through the tail, as those of
        decode steps do.
        """
        self._decoder.exchange.fault.zero_()
        for size in pass_sizes(len(token_ids), start, self._decoder.rows, self._has_blocks):
            self._set(token_ids[:size], start)
            if self._graph is None:
                self._launch_kernels(self._operation)
            else:
                self._graph.replay()
            token_ids, start = token_ids[size:], start + size
        return int(self._decoder.exchange.fault)

    def release(self) -> None:
        """Wait for the device, then destroy the graph."""
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph.reset()
            self._graph = None

    def _set(self, token_ids: Sequence[int], start: int) -> None:
        """Set the rows of the next pass. Rows behind its last token repeat it, which changes nothing."""
        rows, last = self._decoder.round_rows, len(token_ids) - 1
        places = [min(row, last) for row in range(self._decoder.rows)]
        rows.token_ids.copy_(torch.tensor([[token_ids[place] for place in places]]))
        rows.row_lens.copy_(torch.tensor([[start + place + 1 for place in places]], dtype=torch.int32))
        rows.last_lens.fill_(start + last + 1)

    def _launch_kernels(self, operation: OperationHook) -> None:
        """Launch every operation of one pass, in order."""
        decoder = self._decoder
        with operation("embed", 0):
            decoder.embed()
        decoder.run_layers(operation)
        decoder.kv_cache.compact(decoder.round_rows.last_lens)
        decoder.exchange.epoch.add_(1)


def pass_sizes(num_tokens: int, start: int, rows: int, has_blocks: bool) -> list[int]:
    """Tokens of each pass. With blocks, those of a pass lie in one: the tail of a quantised cache holds one."""
    sizes = []
    while num_tokens:
        room = BLOCK - start % BLOCK if has_blocks else rows
        sizes.append(min(rows, room, num_tokens))
        num_tokens, start = num_tokens - sizes[-1], start + sizes[-1]
    return sizes
