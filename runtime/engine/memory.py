"""How many bytes a rank needs, and what fits."""

from __future__ import annotations

import bisect
import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from alspec.config import Weights
from alspec.errors import DoesNotFitError, UserError
from alspec.kernels.attention.decode_quantised.quantised_decode import quantised_rows_together
from alspec.kernels.attention.recall import recall_bytes
from alspec.kernels.attention.torch_attention import QUERIES_AT_ONCE, SCORE_BYTES, SCORES_AT_ONCE
from alspec.kernels.common.limits import FAST_ROWS, MAX_FUSED_ROWS, MAX_ROWS
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import head_bytes, largest_product, unpacked_numbers, weights_bytes
from alspec.runtime.cache.codecs import cache_bytes
from alspec.runtime.decode.eager_sampling import DRAW_BYTES, DRAWN_AT_ONCE
from alspec.runtime.decode.prefill import CHUNK_TOKENS

__all__ = [
    "DTYPES",
    "GIB",
    "MemoryPlan",
    "RoundSize",
    "available_bytes",
    "check_fits",
    "check_max_context",
    "plan_memory",
]

GIB = 2**30
# Control groups, versions 2 and 1, as a container sees its own: folder, limit, usage.
CONTROL_GROUPS = [
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# For each token of a request: its id, and what looking up drafts holds for the windows of 5 tokens that end there.
HISTORY_BYTES = 8 + 4 * 5 * 8


@dataclass(frozen=True)
class RoundSize:
    """What rounds need beside a plain step."""

    rows: int  # of each request: the newest token and the drafts
    draft_model: LlamaConfig | None = None  # has weights and a cache of its own
    draft_weights: Weights = "auto"  # of a copy of the model that drafts; auto: there is none


def with_append_rows(rounds: RoundSize | None, appends: bool) -> RoundSize | None:
    """What rounds need, or passes that append a prompt's rows: at least the buffers of these."""
    if not appends:
        return rounds
    rows = MAX_FUSED_ROWS if rounds is None else max(rounds.rows, MAX_FUSED_ROWS)
    return RoundSize(rows) if rounds is None else replace(rounds, rows=rows)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank needs."""

    weights_bytes: int
    cache_bytes: int
    buffer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Weights, cache and buffers together."""
        return self.weights_bytes + self.cache_bytes + self.buffer_bytes


def plan_memory(
    config: LlamaConfig,
    shard: Shard,
    dtype: torch.dtype,
    batch_size: int,
    max_context: int,
    kv_cache: str = "bf16",
    device_type: str = "cpu",
    kv_protect: int = 0,
    recall_blocks: int = 0,
    rounds: RoundSize | None = None,
    keeps_context: bool = False,
) -> MemoryPlan:
    """Bytes of weights, cache and buffers on one rank, on a CPU or a GPU (`cuda`), those of a draft model included.

    keeps_context: as for `new_cache`.
    """
    tp_size, num_rows = shard.tp_size, batch_size * (rounds.rows if rounds is not None else 1)
    weights = _model_bytes(config, shard, dtype)
    cache = cache_bytes(kv_cache, config, tp_size, batch_size, max_context, dtype, kv_protect, keeps_context)
    activations = _activation_bytes(config, tp_size, dtype, batch_size, max_context, kv_cache, device_type)
    # The first token, and the tokens of eager steps, may be sampled by sorting.
    activations = max(activations, DRAW_BYTES * min(num_rows, DRAWN_AT_ONCE) * config.vocab_size)
    # Logits, and what penalties may need for each: the adjusted logit, and how often its token occurred.
    logits = (3 + 2) * 4 * num_rows * config.vocab_size
    # Rounds have their own packets for all rows beside those of plain steps.
    packets = _packet_bytes(config, shard) * (batch_size + (num_rows if rounds is not None else 0))
    buffers = activations + logits + packets
    # Prompts, and eager steps, unpack one matrix at a time.
    unpacked = dtype.itemsize * unpacked_numbers(config, tp_size)
    buffers += unpacked if config.packs_weights else 0
    if device_type == "cuda" and FAST_ROWS < num_rows <= MAX_ROWS:
        # The library writes products of captured steps in fp32.
        start, stop = shard.vocab_range(config.vocab_size)
        buffers += 4 * num_rows * largest_product(config, tp_size, stop - start)
    if recall_blocks:
        is_quantised, fused_rounds = kv_cache != "bf16", rounds if device_type == "cuda" else None
        buffers += batch_size * _recall_bytes(config, tp_size, max_context, recall_blocks, is_quantised, fused_rounds)
    if rounds is None:
        return MemoryPlan(weights, cache, buffers)
    buffers += HISTORY_BYTES * batch_size * (max_context + rounds.rows)
    if rounds.draft_weights != "auto":
        is_packed = device_type == "cuda" and dtype.itemsize == 2
        copy = config.model_copy(update={"weights": rounds.draft_weights, "packs_weights": is_packed})
        weights, buffers = weights + weights_bytes(copy, tp_size, dtype), buffers + (unpacked if is_packed else 0)
    if rounds.draft_model is not None:
        # The two models do not run at the same time.
        own = plan_memory(
            rounds.draft_model, shard, dtype, batch_size, max_context, "bf16", device_type, keeps_context=True
        )
        weights, cache, buffers = weights + own.weights_bytes, cache + own.cache_bytes, max(buffers, own.buffer_bytes)
    return MemoryPlan(weights, cache, buffers)


def _model_bytes(config: LlamaConfig, shard: Shard, dtype: torch.dtype) -> int:
    """Weights: embedding, head, matrices, norms and biases."""
    hidden, (q_heads, kv_heads) = config.hidden_size, config.local_heads(shard.tp_size)
    start, stop = shard.vocab_range(config.vocab_size)
    per_layer = 2 * hidden + config.qkv_bias * (q_heads + 2 * kv_heads) * config.head_dim
    per_layer += config.qk_norm * 2 * config.head_dim
    if shard.tp_rank == 0:  # adds the biases of row-parallel products
        per_layer += hidden * (config.o_bias + config.mlp_bias)
    per_layer += config.mlp_bias * 2 * (config.intermediate_size // shard.tp_size)
    in_dtype = dtype.itemsize * (hidden * (config.vocab_size + 1) + config.num_layers * per_layer)
    return in_dtype + head_bytes(config, stop - start, dtype) + weights_bytes(config, shard.tp_size, dtype)


def _activation_bytes(
    config: LlamaConfig,
    tp_size: int,
    dtype: torch.dtype,
    batch_size: int,
    max_context: int,
    kv_cache: str,
    device_type: str,
) -> int:
    """The fp32 residual and QKV of one prompt chunk, and beside them the largest of what follows.

    One chunk in the MLP; one in attention; one layer of a quantised cache for the longest prompt, at INT8 and
    dequantised, beside attention or what is in fp32 on the way; the same layer in fp32 for all requests, which decode
    on a CPU.
    """
    q_heads, kv_heads = config.local_heads(tp_size)
    tokens = min(CHUNK_TOKENS, max_context)
    attention = _attention_bytes(config, tp_size, dtype, max_context, device_type)
    widest = max(tokens * dtype.itemsize * 4 * (config.intermediate_size // tp_size), attention)
    if kv_cache != "bf16":
        channels = kv_heads * config.head_dim
        prompt = max_context * channels * 2 * (1 + dtype.itemsize) + max(max_context * channels * 8, attention)
        widest = max(widest, prompt, max_context * channels * 8 * batch_size)
    qkv = dtype.itemsize * 2 * (q_heads + 2 * kv_heads) * config.head_dim
    return tokens * (4 * 4 * config.hidden_size + qkv) + widest


def _attention_bytes(config: LlamaConfig, tp_size: int, dtype: torch.dtype, max_context: int, device_type: str) -> int:
    """Attention of one prompt chunk over the longest context."""
    q_heads, kv_heads = config.local_heads(tp_size)
    width, tokens = q_heads * config.head_dim, min(CHUNK_TOKENS, max_context)
    # On the CPU a prompt of several chunks also needs a mask.
    mask = min(tokens * max_context, max(SCORES_AT_ONCE["cpu"], QUERIES_AT_ONCE * max_context))
    found = tokens * dtype.itemsize * 2 * width + (dtype.itemsize * mask if max_context > CHUNK_TOKENS else 0)
    if device_type == "cuda" and not (dtype.itemsize == 2 and config.head_dim % 8 == 0 and config.head_dim <= 256):
        # No library fuses this: scores of all heads, and K and V repeated for each query head.
        row = max_context * config.num_qo_heads // tp_size
        scores = min(tokens * row, max(SCORES_AT_ONCE["cuda"], QUERIES_AT_ONCE * row))
        found += SCORE_BYTES * scores + 2 * dtype.itemsize * max_context * width
    if window := config.window_below(max_context):
        # A copy of the ring, or what is dequantised, and the prompt chunk; then, for each few queries, K and V of each
        # head, and all scores.
        span = window + QUERIES_AT_ONCE
        found += 2 * dtype.itemsize * kv_heads * config.head_dim * (window + tokens)
        found += 2 * dtype.itemsize * width * span + SCORE_BYTES * QUERIES_AT_ONCE * span * q_heads
    return found


def _packet_bytes(config: LlamaConfig, shard: Shard) -> int:
    """Packets of one row, 8 bytes each: every rank's partial sums of every all-reduce, and all logits.

    `symm` keeps them on the GPU; `host` needs as many for a rank's own. Which transport works is known only when ranks
    are connected.
    """
    packets = 2 * config.num_layers * shard.tp_size * config.hidden_size if shard.tp_size > 1 else 0
    return 8 * (packets + (config.vocab_size if shard.vocab_shards > 1 else 0))


def _recall_bytes(
    config: LlamaConfig,
    tp_size: int,
    max_context: int,
    recall_blocks: int,
    is_quantised: bool,
    fused_rounds: RoundSize | None,
) -> int:
    """Lists and weights of blocks of one request. Captured rounds keep those of a plain step and of each row."""
    q_heads, kv_heads = config.local_heads(tp_size)
    kept = 1
    if fused_rounds is not None:
        together = quantised_rows_together(q_heads // kv_heads, fused_rounds.rows) if is_quantised else 1
        kept = 2 + -(-fused_rounds.rows // together) * together
    return kept * recall_bytes(config.num_layers, q_heads, kv_heads, max_context, recall_blocks)


def available_bytes(device: torch.device, local_world_size: int) -> int:
    """Free memory for one rank: of its GPU, or its share of the available memory of this host."""
    if device.type == "cuda":
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # blocks cached by PyTorch count as free
        return int(torch.cuda.mem_get_info(device)[0])
    return _host_bytes(Path("/")) // local_world_size


def _host_bytes(root: Path) -> int:
    """Available memory of this host or container; `root` is where the files that say so lie."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        (available,) = (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):  # not Linux, or not stated: take all memory
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder, limit, used in CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
            group = root / folder
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # The kernel drops cached files first when memory is needed.
            taken = int((group / used).read_text()) - int(statistics.get("inactive_file", 0))
            available = min(available, max(int((group / limit).read_text()) - taken, 0))
    return available


def check_max_context(max_context: int | None, config: LlamaConfig) -> None:
    """Refuse a cache for more tokens than the model has positions.

    Raises:
        UserError: it is larger.
    """
    if max_context is not None and max_context > config.longest_context:
        raise UserError(
            f"max_context: expected up to {config.longest_context_name}, {config.longest_context}, found {max_context}"
        )


def check_fits(
    config: LlamaConfig,
    shard: Shard,
    dtype: torch.dtype,
    batch_size: int,
    max_context: int,
    available: int,
    kv_cache: str = "bf16",
    device_type: str = "cpu",
    kv_protect: int = 0,
    recall_blocks: int = 0,
    rounds: RoundSize | None = None,
    keeps_context: bool = False,
) -> MemoryPlan:
    """Return the plan if it fits into `available` bytes.

    Raises:
        DoesNotFitError: says how much is needed, what there is, and the largest context that fits.
    """

    def at(context: int) -> MemoryPlan:
        args = kv_cache, device_type, kv_protect, recall_blocks, rounds, keeps_context
        return plan_memory(config, shard, dtype, batch_size, context, *args)

    plan = at(max_context)
    if plan.total_bytes <= available:
        return plan
    contexts = range(64, max_context, 64)
    fitting = bisect.bisect_right(contexts, available, key=lambda context: at(context).total_bytes)
    advice = f"the largest context that fits is {64 * fitting} tokens" if fitting else "no context fits; use more ranks"
    if batch_size > 1:
        advice += ", or fewer prompts"
    error = DoesNotFitError(
        f"does not fit: a rank needs {plan.total_bytes / GIB:.2f} GiB (weights {plan.weights_bytes / GIB:.2f}, cache "
        f"{plan.cache_bytes / GIB:.2f} for {batch_size} x {max_context} tokens, buffers {plan.buffer_bytes / GIB:.2f}) "
        f"and has {available / GIB:.2f} GiB; {advice}"
    )
    error.largest_context = 64 * fitting or None
    raise error
