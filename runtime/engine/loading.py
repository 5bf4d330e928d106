"""What an engine loads: a model's files, its weights on a device, and all that runs once before anything is timed."""

from __future__ import annotations

import os

import torch

from alspec.config import EngineConfig
from alspec.models.checkpoint.checkpoint import Checkpoint, verify_checksums
from alspec.models.checkpoint.files import is_there
from alspec.models.checkpoint.source import model_folder
from alspec.models.llama import Llama, LlamaWeights, load_weights, random_weights
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.prefill import CHUNK_TOKENS, prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport

__all__ = ["WARM_UP_TOKENS", "open_model", "read_weights", "take_device", "warm_up"]

WARM_UP_TOKENS = 2  # of the step in `warm_up`: room that a cache must have, be it for nothing else


def open_model(config: EngineConfig, model: LlamaConfig) -> tuple[Checkpoint | None, Tokenizer | None]:
    """The checkpoint, unless weights are random, and its tokenizer; without one, prompts are token ids.

    Raises:
        UserError: a folder that is not what it should be.
    """
    if config.random_weights is not None:
        return None, None
    folder = model_folder(config)
    if config.verify_checksums:
        verify_checksums(folder)
    checkpoint = Checkpoint.open(folder, model)
    has_tokenizer = is_there(folder / "tokenizer.json")
    return checkpoint, Tokenizer.from_folder(folder, model) if has_tokenizer else None


def take_device(device: torch.device, placement: Placement) -> None:
    """Make this rank's device PyTorch's, or its share of the host's cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif placement.local_world_size > 1:
        # Ranks that share a host share its cores; torchrun's default is one thread for each rank.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // placement.local_world_size))


def read_weights(
    checkpoint: Checkpoint | None, model: LlamaConfig, placement: Placement, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """This rank's shard, on its device; without a checkpoint, random numbers."""
    if checkpoint is None:
        return random_weights(model, placement.shard, dtype, device)
    return load_weights(checkpoint, model, placement.shard, dtype, device)


def warm_up(
    model: Llama, cache: Cache, transport: Transport, operation: OperationHook, program: EagerStep | None
) -> None:
    """Compile kernels and load libraries before anything is timed; the prompt overwrites what this caches.

    Args:
        program: takes a step, too; None: a loop does, when it is prepared for the sampling asked for.
    """
    # For each group up to a whole chunk and another one behind others, which run all that further ones run, if not all
    # of their shapes.
    num_tokens = min(cache.max_context, 2 * CHUNK_TOKENS * transport.placement.num_groups)
    one = model.first_layers(1)
    for tokens in (1, num_tokens):  # kernels for few tokens are others
        logits, _ = prefill(one, cache, transport, 0, [0] * tokens, operation)
    torch.cat([logits.argmax(dim=-1), torch.isfinite(logits).all()[None]]).tolist()  # as an engine chooses
    if program is None:
        return
    program.run(
        DecodeState(
            token_ids=torch.zeros(cache.batch_size, dtype=torch.int64, device=logits.device),
            seq_lens=torch.full((cache.batch_size,), WARM_UP_TOKENS, dtype=torch.int32, device=logits.device),
            live=torch.ones(cache.batch_size, dtype=torch.bool),
        )
    )
