"""Predicted parts of a captured decode step: times of bytes plus measured constants."""

from __future__ import annotations

import functools

import torch

from alspec.kernels.attention.decode_quantised.quantised_decode import programs_of_rows, quantised_rows_together
from alspec.kernels.common.limits import FAST_ROWS
from alspec.kernels.linear.decode_weight import packed_bytes
from alspec.latency_model import LinkCosts, StepCosts, tp_step_us
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import kept_format, matrices_of
from alspec.runtime.cache.codecs import read_bytes
from alspec.runtime.profiling.stats import step_bytes
from alspec.sas import Softmax

__all__ = [
    "DRAFT_LAYER_US",
    "BESIDE_KERNELS",
    "LINK_BYTES",
    "LINK_GB_PER_S",
    "LINK_US",
    "STREAM_BYTES_PER_S",
    "link_costs",
    "message_us",
    "message_values",
    "rows_us",
    "step_costs",
    "step_us",
]

# Measured constants of captured steps: one request on H200s over peer memory (NVLink). Other transports and eager steps
# take longer. Each constant names its source: rows in docs/results, by file or bench. tests/launch/test_plan.py
# compares every predicted step with its row. Unless a comment says otherwise, decode_parts means one run: llama-3.1-8b,
# 131072 tokens, 1 + 1 GPUs, half of the layers accept A~.
STREAM_BYTES_PER_S = 4.26e12  # decode_step: stream_tb_s, 4.22 to 4.28
# Attention reads the cache faster than a copy moves bytes, because it writes nothing back. Two kinds of rows agree:
# "reading alone" (decode_attention, 32/8 heads of 128, 131072 tokens) and attention in decode_parts minus ATTENTION_US.
READ_BYTES_PER_S = 4.5e12
ATTENTION_US = 3.4  # decode_attention, 32/8 heads of 128, 1024 tokens: 4.2 to 4.3 minus the time of its bytes
# For each all-reduce and each rank of the group; a layer has two. Fitted to decode_step, mode off.
ALL_REDUCE_US = 0.65
FIXED_US = 8.0  # outside of the layers; same fit, over shapes of 10 to 80 layers
LAYER_US = 2.1  # in each layer; same fit
# A layer without its attention takes at least this long: decode_rounds (SmolLM2), decode_step (checkpoint).
LEAST_LAYER_US = 5.6
# Products of quantised weights take longer than their bytes. Fitted to weights: decode_step.
PACKED_LAYER_US = 9.3  # in a layer whose four matrices are packed
INT4_BYTES_SHARE = 0.17  # of the time of the bytes of INT4 matrices
# A layer takes this much longer with several requests, with each of them but the first, and with more than FAST_ROWS;
# by the format of its matrices, None: 16 bits. Fitted to weights (linear: 4 and 8 rows; decode_step: 2 to 16 requests)
# and decode_rounds (8).
SEVERAL_LAYER_US = {None: (13.0, 0.4, 0.0), "fp8": (3.0, 1.0, 30.0), "int4": (2.0, 1.4, 27.0)}
# A step with several rows of each request takes this much longer: in each layer; as a share of the time of the weights'
# bytes, at all and with each row but the first; for each all-reduce, rank and row but the first. Fitted to the rows of
# decode_rounds with n-grams: 8B on one, two and four GPUs, SmolLM2.
ROWS_LAYER_US = 4.0
ROWS_SHARE, ROW_SHARE = 0.09, 0.0145
ROW_ALL_REDUCE_US = 0.11
MANY_ROWS_SHARE = 0.08  # of that time, with more than FAST_ROWS rows of all requests
# Attention of several rows, as shares of the time to read a bf16 cache: over such a cache, with more than WIDE_COLUMNS
# rows times query heads of a KV head; over a quantised one, for each bundle of rows on all PROGRAMS, and longer on
# fewer: its values are decoded for each bundle, however few bits they have. Same fit, 131072 tokens.
WIDE_COLUMNS, WIDE_SHARE = 32, 0.95
BUNDLE_SHARE, PROGRAMS = 0.21, 264
DRAFT_LAYER_US = 6.0  # in each layer of a draft, beyond a step of the draft model; same fit (self, model)
PAIR_FIXED_US = 14.4  # decode_parts, fixed: 145.8 minus the time of its bytes and FIXED_US
HANDOVER_US = 5.4  # decode_parts, layer: 109.9 minus the time of its bytes and LAYER_US
VERDICT_US = 2.2  # decode_parts: sender 123.0 minus attention 120.9
# decode_parts, receiver, over turbo4, where it varies least. If the whole attention is shorter, A~ comes no later than
# its end.
PREDICTOR_US = 9.7
# What recall adds; fitted to recall_attention: the weights of blocks, as a share of the time to read a bf16 cache (a
# quantised one hides them); attention and A~ for each recalled block. The choice of lists, 23 us a step at most, is
# left out.
MASSES_SHARE = 0.033
RECALLED_US, RECALLED_SPEC_US = 0.045, 0.23
# The next constants were fitted to all rows of linked_pair, because parts of a pair over TCP were not measured.
BESIDE_KERNELS = 1.17  # a message takes so many times as long as one alone: 90 us for LINK_US
LINK_BYTES = 48 * 1024  # a layer's message of the 8B shape
VERIFIER_US = 21.0  # the verifier's layer takes this much longer than that of a group alone
SPECULATOR_US = 15.0  # the speculator's layer takes this much longer than its post- and pre-attention
# TCP between two H200s of one machine, docs/experiments.md: messages of 0.1 to 48 KB take 60 to 77 us alone. If all of
# the difference is their size, it is this rate; larger messages were not measured.
LINK_US = 77.0  # one message of LINK_BYTES, one way
LINK_GB_PER_S = 2.9


def step_costs(
    config: LlamaConfig,
    world_size: int,
    num_groups: int,
    dtype: torch.dtype,
    context: int,
    kv_cache: str = "bf16",
    kv_protect: int = 0,
    recalled: int = 0,
) -> StepCosts:
    """Predict the parts of one decode step on groups of `world_size / num_groups` ranks.

    Each part is the time of its bytes plus measured constants. recalled: blocks that A~ reads beside sink and window.
    """
    tp_size = world_size // num_groups
    shard = Shard(0, tp_size, 0, world_size)
    cache = read_bytes(kv_cache, config, tp_size, dtype, context, kv_protect)
    head = config.hidden_size * dtype.itemsize * -(-config.vocab_size // world_size)
    layers = step_bytes(config, shard, dtype, [], kv_cache) - head

    def microseconds(num_bytes: float) -> float:
        return num_bytes / STREAM_BYTES_PER_S * 1e6

    attention_us = cache / config.num_layers / READ_BYTES_PER_S * 1e6 + ATTENTION_US
    fixed_us = microseconds(head) + FIXED_US
    layer_us = microseconds(layers / config.num_layers) + LAYER_US + _packed_us(config, tp_size)
    if tp_size > 1:
        layer_us += 2 * tp_size * ALL_REDUCE_US
    if num_groups > 1:
        fixed_us, layer_us = fixed_us + PAIR_FIXED_US, layer_us + HANDOVER_US
    sender_us = attention_us + _recall_us(attention_us - ATTENTION_US, kv_cache, recalled)
    return StepCosts(
        num_layers=config.num_layers,
        fixed_us=fixed_us,
        layer_us=max(layer_us, LEAST_LAYER_US),
        attention_us=attention_us,
        sender_us=sender_us + VERDICT_US,
        receiver_us=min(PREDICTOR_US + RECALLED_SPEC_US * recalled, sender_us),
    )


def _recall_us(read_us: float, kv_cache: str, recalled: int) -> float:
    """How much longer the attention of a layer takes that also computes A~ with recalled blocks."""
    masses_us = MASSES_SHARE * read_us if recalled and kv_cache == "bf16" else 0.0
    return masses_us + RECALLED_US * recalled


@functools.lru_cache(maxsize=256)
def _packed_us(config: LlamaConfig, tp_size: int) -> float:
    """How much longer than the time of its bytes a layer takes because of packed matrices, averaged over the layers."""
    total, matrices = 0.0, matrices_of(config, tp_size)
    for layer in range(config.num_layers):
        for name, matrix in matrices.items():
            if kept := kept_format(config, tp_size, layer, name):
                total += PACKED_LAYER_US / len(matrices)
                if kept.format == "int4":
                    num_bytes = packed_bytes((matrix.rows, matrix.columns), matrix.stride, *kept)
                    total += num_bytes / STREAM_BYTES_PER_S * 1e6 * INT4_BYTES_SHARE
    return total / config.num_layers


def step_us(
    config: LlamaConfig, tp_size: int, dtype: torch.dtype, seq_lens: list[int], kv_cache: str, kv_protect: int
) -> float:
    """Predict one step of a group of `tp_size` ranks over requests of these lengths, without speculation.

    Launches count, too. They decide for small models: SmolLM2-135M reads its bytes in a quarter of a step.
    """
    empty_us = tp_step_us(step_costs(config, tp_size, 1, dtype, 0, kv_cache, kv_protect))
    cache = sum(read_bytes(kv_cache, config, tp_size, dtype, length, kv_protect) for length in seq_lens)
    several_us = 0.0
    if len(seq_lens) > 1:
        kept = kept_format(config, tp_size, 0, "gate_up")
        first_us, each_us, many_us = SEVERAL_LAYER_US[kept.format if kept else None]
        several_us = first_us + each_us * (len(seq_lens) - 1) + (many_us if len(seq_lens) > FAST_ROWS else 0.0)
        several_us *= config.num_layers
    return empty_us + several_us + cache / READ_BYTES_PER_S * 1e6


def rows_us(
    config: LlamaConfig,
    tp_size: int,
    dtype: torch.dtype,
    seq_lens: list[int],
    kv_cache: str,
    kv_protect: int,
    rows: int,
    softmax: Softmax = "exact",
) -> float:
    """Predict how much longer a step takes that verifies `rows` rows of each request instead of one.

    Sliding windows are left out: their layers read less than is counted here.
    """
    weights_us = step_bytes(config, Shard(0, tp_size, 0, tp_size), dtype, [], kv_cache) / STREAM_BYTES_PER_S * 1e6
    layer_us, further = ROWS_LAYER_US, rows - 1
    if tp_size > 1:
        layer_us += 2 * tp_size * ROW_ALL_REDUCE_US * further * len(seq_lens)
    heads, kv_heads = config.local_heads(tp_size)

    def read_us(kind: str) -> float:
        num_bytes = sum(read_bytes(kind, config, tp_size, dtype, length, 0) for length in seq_lens)
        return num_bytes / READ_BYTES_PER_S * 1e6

    plain = 1.0 if kv_cache == "bf16" else min(2 * kv_protect / config.num_layers, 1.0)  # share of bf16 layers
    wide = WIDE_SHARE if rows * heads > WIDE_COLUMNS * kv_heads else 0.0
    together = quantised_rows_together(heads // kv_heads, rows, softmax)
    attention_us = plain * wide * read_us("bf16")
    if plain < 1:
        bundles = -(-rows // together)
        used = programs_of_rows(PROGRAMS, bundles * kv_heads * len(seq_lens)) / PROGRAMS
        bundles_us = BUNDLE_SHARE * bundles / used * read_us("bf16")
        attention_us += (1 - plain) * max(bundles_us - read_us(kv_cache), 0.0)
    weights_share = ROWS_SHARE + ROW_SHARE * further + (MANY_ROWS_SHARE if rows * len(seq_lens) > FAST_ROWS else 0.0)
    return weights_share * weights_us + config.num_layers * layer_us + attention_us


def message_values(config: LlamaConfig, tp_size: int, batch_size: int = 1) -> int:
    """How many packets of 8 bytes a layer's message of a pair over a link holds: x, k and v of each request."""
    _, kv_heads = config.local_heads(tp_size)
    return batch_size * (config.hidden_size + 2 * kv_heads * config.head_dim)


def message_us(config: LlamaConfig, tp_size: int, link_us: float, gb_per_s: float) -> float:
    """Time of a layer's message, from that of a message of LINK_BYTES and the rate of large ones."""
    more_bytes = 8 * message_values(config, tp_size) - LINK_BYTES
    return max(link_us + more_bytes / gb_per_s / 1e3, 0.0)


def link_costs(
    config: LlamaConfig,
    tp_size: int,
    dtype: torch.dtype,
    context: int,
    kv_cache: str = "bf16",
    kv_protect: int = 0,
    link_us: float = LINK_US,
    recalled: int = 0,
) -> LinkCosts:
    """Predict the parts of one decode step of two groups of `tp_size` ranks.

    link_us: a message one way, alone, as `Transport.message_us` measures it.
    """
    alone = step_costs(config, tp_size, 1, dtype, context, kv_cache, kv_protect)
    sizes = {name: matrix.rows * matrix.columns for name, matrix in matrices_of(config, tp_size).items()}
    pre_us = alone.layer_us * sizes["qkv"] / sum(sizes.values())
    recall_us = _recall_us(alone.attention_us - ATTENTION_US, kv_cache, recalled)
    return LinkCosts(
        fixed_us=alone.fixed_us,
        verifier_us=pre_us + alone.attention_us + recall_us + VERIFIER_US,
        post_us=alone.layer_us - pre_us,
        speculator_us=alone.layer_us + RECALLED_US * recalled + SPECULATOR_US,
        link_us=BESIDE_KERNELS * link_us,
    )
