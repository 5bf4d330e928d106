"""One rank of one group, or of two groups that share prompts; started with torchrun's variables.

Run as `prefill_worker.py FOLDER GROUPS DEVICE LEAST`: reads FOLDER/spec.json, writes FOLDER/rank{RANK}.pt with, for
each case, the logits, the cache, the keys and values that the cache represents, and the tokens of this rank.
One group processes the shares of two groups one after the other; over a quantised cache, two shares of a chunk as one.
Chunks of LEAST tokens or more are spread over the ranks of a group.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from alspec.kernels.kv_codec.codec_reference import kv_dequantize
from alspec.models.llama import Llama, random_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode import prefill as prefill_module
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import PromptPart, prefill, prompt_parts
from alspec.runtime.distributed import transport as transport_module
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport, connect_store

CONFIG = LlamaConfig(
    hidden_size=96, intermediate_size=128, num_layers=3, num_qo_heads=8, num_kv_heads=4, head_dim=64, vocab_size=301
)
CHUNK = 128
MIN_SHARED_TOKENS = 80
LEAST_SPREAD = 100  # default, in tokens: some chunks are spread


def one_by_one(
    num_tokens: int, chunk_tokens: int, num_groups: int, start: int, cached_together: bool
) -> list[PromptPart]:
    shared = prompt_parts(num_tokens, chunk_tokens, 2, start)
    parts = [part for part in shared for part in part[0 if cached_together else 1]]
    return [PromptPart([part], [part]) for part in parts]


@torch.no_grad()
def run_case(transport: Transport, kv_cache: str, lengths: list[int], least_spread: int) -> dict[str, Any]:
    """Process a batch of prompts."""
    shard, tp_size = transport.placement.shard, transport.placement.tp_size
    device = transport.device
    weights, (codec, _, softmax) = random_weights(CONFIG, shard, torch.float32, device), kv_cache.partition(" ")
    for layer in weights.layers if softmax else ():
        layer.qkv.mul_(3)  # sharp enough that SAS drops weights
    model = Llama(CONFIG, weights, transport)
    cache = new_cache(codec, CONFIG, tp_size, len(lengths), max(lengths), torch.float32, device, softmax or "exact")
    processed: list[list[int]] = []
    embed = model.embed

    def noting_embed(ids: Tensor) -> Tensor:
        processed.append(ids.tolist())
        return embed(ids)

    done: list[int] = []
    found: dict[str, Any] = {"logits": [], "sums": [], "done": done, "processed": processed}
    parts = prompt_parts
    if transport.placement.num_groups == 1:
        parts = partial(one_by_one, cached_together=codec != "bf16")
    with (
        mock.patch.object(model, "embed", noting_embed),
        mock.patch.object(prefill_module, "MIN_SHARED_TOKENS", MIN_SHARED_TOKENS),
        mock.patch.object(prefill_module, "prompt_parts", parts),
        mock.patch.multiple(transport_module, LEAST_SPREAD=least_spread, FEWEST_SPREADING=2),
    ):
        for request, length in enumerate(lengths):
            ids = torch.randint(CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            logits, sums = prefill(model, cache, transport, request, ids, no_hook, CHUNK, done.append)
            found["logits"].append(logits.cpu())
            found["sums"].append(sums.cpu())
    if isinstance(cache, KVCache):
        tensors, read = {"k": cache.k, "v": cache.v}, [torch.stack([cache.k, cache.v])]
    else:
        tensors, with_newest = cache.layers.tensors, torch.tensor(lengths) + 1
        read = [torch.stack(kv_dequantize(cache.layer(n), with_newest)) for n in range(cache.num_layers)]
    return found | {"cache": {name: tensor.cpu() for name, tensor in tensors.items()}, "read": torch.stack(read).cpu()}


def main(folder: Path, num_groups: int, kind: str, least_spread: int) -> None:
    torch.set_num_threads(1)
    spec = json.loads((folder / "spec.json").read_text())
    placement = replace(Placement.from_environment(), num_groups=num_groups)
    device = torch.device(kind, placement.local_rank if kind == "cuda" else None)
    store = connect_store(placement) if placement.world_size > 1 else None
    transport = Transport(placement, device, "nccl" if kind == "cuda" else "gloo", store)
    found = {
        f"{kv_cache} {lengths}": run_case(transport, kv_cache, lengths, least_spread) for kv_cache, lengths in spec
    }
    torch.save(found, folder / f"rank{placement.rank}.pt")
    transport.barrier()
    transport.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
