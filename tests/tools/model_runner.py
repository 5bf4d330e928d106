"""One rank that decodes one request on the CPU, ranks as threads, and comparison with transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from alspec.config import SpeculationConfig
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Llama, LlamaWeights, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport

__all__ = ["Runner", "ThreadTransport", "close", "load_model", "load_runner", "on_ranks"]

CPU = torch.device("cpu")


class Runner:
    """One rank decoding one request on the CPU: prefill in chunks, then steps of `off`."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, transport: Transport) -> None:
        self.model = Llama(config, weights, transport)
        self.transport = transport
        self.cache = new_cache("bf16", config, transport.placement.tp_size, 1, 200, torch.float32, CPU)
        self._program = EagerStep(self.model, self.cache, transport, "off", SpeculationConfig(), no_hook)

    def prefill(self, ids: list[int], chunk_tokens: int) -> Tensor:
        """[V] logits after the last of `ids`."""
        return prefill(self.model, self.cache, self.transport, 0, ids, no_hook, chunk_tokens)[0][0]

    def decode(self, token_id: int, seq_len: int) -> Tensor:
        """[V] logits after one more token, the `seq_len`-th."""
        return self._program.run(
            DecodeState(torch.tensor([token_id]), torch.tensor([seq_len], dtype=torch.int32), torch.tensor([True]))
        ).logits[0]


def load_model(folder: Path, transport: Transport | None = None, head_dim: int | None = None) -> Llama:
    """This rank's part of a model in fp32, by default of a single rank; `head_dim`: pad heads to it."""
    transport = transport or Transport(Placement(), CPU, "gloo", None)
    config = LlamaConfig.from_folder(folder)
    checkpoint, shard = Checkpoint.open(folder, config), transport.placement.shard
    config = config if head_dim is None else config.with_head_dim(head_dim)
    return Llama(config, load_weights(checkpoint, config, shard, torch.float32, CPU), transport)


def load_runner(folder: Path) -> Runner:
    model = load_model(folder)
    return Runner(model.config, model.weights, Transport(Placement(), CPU, "gloo", None))


def close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-4, absolutely and relative to the logits' scale, whichever is stricter."""
    scale = min(1.0, float(expected.abs().max()))
    assert scale > 0.1, "logits too small to tell a difference"
    assert float((found - expected).abs().max()) <= 1e-4 * scale


class ThreadTransport(Transport):
    """Collectives between threads of one process, summed in rank order."""

    def __init__(self, placement: Placement, slots: list[Tensor], barrier: threading.Barrier) -> None:
        super().__init__(Placement(), CPU, "gloo", None)
        self.placement = placement
        self._slots, self._barrier = slots, barrier

    def all_gather_world(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, stacked."""
        self._slots[self.placement.rank] = tensor
        self._barrier.wait(timeout=30)
        gathered = torch.stack(self._slots)
        self._barrier.wait(timeout=30)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor."""
        return self.all_gather_world(tensor).sum(0)


@contextmanager
def on_ranks(tp_size: int, work: Callable[[ThreadTransport], Tensor]) -> Iterator[list[Tensor]]:
    """Run `work` on a thread for each rank; yields what they return, in rank order."""
    barrier, slots = threading.Barrier(tp_size), [torch.empty(0)] * tp_size
    results: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        placement = Placement(rank, tp_size, rank, tp_size)
        with torch.no_grad():
            results[rank] = work(ThreadTransport(placement, slots, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(tp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [results[rank] for rank in range(tp_size)]
