"""Variants of all kernels of decoding and prompts, as a GPU of some compute capability launches them.

Those of attention are in attention_variants.py. kernel_report.py reads all of them.
"""

import itertools
from typing import Any

import triton
from attention_variants import (
    choose_lists,
    descriptor,
    flashq,
    flashq_combine,
    lean,
    lean_combine,
    prefill,
    prefill_elsewhere,
    take_lists,
)
from triton.experimental.gluon import language as gl
from variant import Variant, variant

from alspec.kernels.attention.decode import combine
from alspec.kernels.bench import measuring
from alspec.kernels.kv_codec import codec_kernels
from alspec.kernels.kv_codec.formats import FORMATS
from alspec.kernels.linear import (
    gemm_products,
    gemv_tile,
    head_norm,
    mma_tile,
    packed_tile,
    projections,
    push,
    unpack_weight,
)
from alspec.kernels.linear.decode_weight import block_lines
from alspec.kernels.norm import residual
from alspec.kernels.prompt import prompt_kernels
from alspec.kernels.rounds import ngram, round_kernels
from alspec.kernels.sampling import adjustment, logprobs, next_token, sampler
from alspec.kernels.speculation import handover, linked_pair, roles
from alspec.launch.bench import bench_reading

GATED = (
    *("qkv", "qkv, quantised", "qkv, quantised, head 64", "o", "gate_up", "down"),
    *("reduce_norm", "reduce_norm, no inbox", "qkv, no inbox"),
)  # fmt: skip
# The fast tier compiles each kernel, attention of both codecs with and without `A~`, projections of 1 and 8 requests.
FAST = {
    *("lean, batch 1", "lean, batch 8, spec", "lean, gated, spec, all", "lean, 4 x 128, spec in 5 parts"),
    *("lean, head 64, batch 8", "lean, 20 x 128, batch 8", "lean combine, batch 1", "lean combine, batch 8, spec"),
    *("flashq, 7 x 64, spec", "flashq combine, batch 1", "flashq combine, spec in 2 parts"),
    *("lean, spec, recall", "lean combine, spec, recall", "recall lists", "recall lists, taken"),
    *("lean, 5 rows, batch 1", "lean, spec, recall, window", "flashq, spec, recall, window"),
    *("prefill, head 64", "reading alone", "add_rms_norm", "rotate_heads", "silu_mul", "qkv, long rows"),
    *("weights, gate_up, int4", "weights, down, fp8", "weights, unpacked, int4"),
    *("qkv, gated, tp 4, batch 8", "gate_up, gated, tp 4, batch 8", "o, tp 4, batch 8"),
}
NO_LOGPROBS = dict.fromkeys(["logits_ptr", "log_sums_ptr", "top_ptr", "logprobs_ring_ptr"])
NO_LOGPROBS |= {"V": 0, "TOP": 0, "TOP_PAD": 0}


def reading_alone() -> Any:
    """The kernel of `bench_kernels` that reads memory without attention."""
    types = {"desc": descriptor("i8", gl.int8, [bench_reading.ROWS, bench_reading.ROW_BYTES])}
    return variant(90, measuring._read_tiles_kernel, 1, {"STAGES": bench_reading.STAGES}, **types)


def decode_step(capability: int, tp_size: int, batch_size: int, gate: bool = False) -> dict[str, Variant]:
    """The other kernels of a step, for the 8B shape on one rank of `tp_size`."""
    # Kernels of paired ranks have a gate, and push what the other group needs.
    gates: dict[str, Any] = {} if gate else {"gate_ptr": None}
    inbox: dict[str, Any] = {} if gate else {"inbox_ptr": None}
    both = gates if gate else gates | inbox | {"next_gate_ptr": None, "verdict_ptr": None}
    hidden, heads, kv_heads, mlp, vocab = 4096, 32 // tp_size, 8 // tp_size, 14336 // tp_size, 128256
    pdl = {"PDL": capability >= 90}
    squares = {"S": 128, "SP": 128}
    # A model without biases, whose weights are not quantised.
    plain: dict[str, Any] = {"bias_ptr": None, "scale_ptr": None, "FORMAT": None, "GROUP": 0}
    stream = {"K": hidden, "KP": hidden, "B": batch_size} | plain | gates | squares | pdl

    def tile(num_rows: int, inputs: int, matrices: int) -> tuple[int, dict[str, int]]:
        """Rows of a tile in each of `matrices`; steps and warps of a program."""
        rows, steps, warps = mma_tile.tile_of(batch_size, inputs, 2, num_rows, matrices)
        return rows, {"STEPS": steps, "WARPS": warps}

    def loops(num_tiles: int, per_sm: int) -> dict[str, bool]:
        """Whether a program computes several tiles on an H200."""
        return {"LOOP": gemv_tile.programs_for(num_tiles, per_sm * 132) < num_tiles}

    def project(kernel: Any, constants: dict[str, Any], **types: str) -> Any:
        return variant(capability, kernel, constants["WARPS"], constants, **types)

    def pushed(inputs: int, num_rows: int, per_sm: int, **more: Any) -> Any:
        rows, how = tile(num_rows, inputs, 1)
        constants = {
            "K": inputs, "KP": triton.next_power_of_2(inputs), "B": batch_size, "ROWS": rows, "MASKED": False,
            "PEERS": tp_size, "SOURCES": tp_size, "PUSH": True,
        } | plain | how | loops(num_rows // rows, per_sm) | gates | squares | pdl | more  # fmt: skip
        return project(push._push_partial_kernel, constants)

    def qkv(num_heads: int, num_kv_heads: int, head_dim: int, **more: Any) -> Any:
        pairs, how = tile(head_dim // 2, hidden, 2)
        shape = {"HQ": num_heads, "HKV": num_kv_heads, "D": head_dim, "PAIRS": pairs}
        num_tiles = (num_heads + 2 * num_kv_heads) * head_dim // (2 * pairs)
        constants = (
            stream | {"raw_ptr": None, "RING": False, "ROWS": 1} | inbox | shape | how | loops(num_tiles, per_sm) | more
        )
        return project(projections._qkv_rope_append_kernel, constants, tail_ptr="*i8")

    def reduced(**more: Any) -> Any:
        shape = {"HIDDEN": hidden, "T": tp_size, "T_PAD": tp_size, "PACKETS": True, "BLOCK": 32} | both | pdl
        return variant(capability, residual._reduce_norm_kernel, tp_size, shape | more, x_ptr="*fp32")

    def collected(**more: Any) -> Any:
        shape = {"WORLD": tp_size, "PACKETS": True, "BLOCK": 1024} | pdl
        return variant(capability, next_token._collect_logits_kernel, 8, shape | more)

    per_sm = gemv_tile.PROGRAMS_PER_SM if gate else 0
    no_tail = dict.fromkeys(["tail_ptr", "tail_scale_ptr"])
    rows, how = tile(mlp, hidden, 2)
    gate_up = stream | {"I": mlp, "ROWS": rows} | how | loops(mlp // rows, 4 * per_sm)
    finish = {"C": 128, "B": batch_size, "RING_STEPS": 16, "RING_HEADER": 2, "HITS": 1} | NO_LOGPROBS | pdl
    finish |= dict.fromkeys(["sampled_ptr", "hits_ptr", "hits_ring_ptr"])
    # Paired ranks over collectives have gates, but push nothing and read no verdict.
    no_packets = {
        "inbox_ptr": None,
        "next_gate_ptr": None,
        "verdict_ptr": None,
        "own_packets_ptr": None,
        "PACKETS": False,
    }
    over_collectives = {
        "qkv, no inbox": qkv(heads, kv_heads, 128, **no_tail, inbox_ptr=None, epoch_ptr=None),
        "reduce_norm, no inbox": reduced(**no_packets),
    }
    if not gate:
        plain_rope = {"long_freq_ptr": None, "exponents_ptr": None, "CONTEXT": 0, "STRETCH": 0.0}
        over_collectives = {"embed_norm": embed_norm(capability, hidden, plain_rope)}
    return over_collectives | {
        "qkv": qkv(heads, kv_heads, 128, **no_tail),
        "qkv, quantised": qkv(heads, kv_heads, 128),
        "qkv, quantised, head 64": qkv(2 * heads, 2 * kv_heads, 64),
        "o": pushed(hidden // tp_size, hidden, gemv_tile.PROGRAMS_PER_SM, squares_ptr=None),
        "gate_up": project(projections._gate_up_silu_kernel, gate_up, out_ptr="*bf16"),
        "down": pushed(mlp, hidden, gemv_tile.PROGRAMS_PER_SM if gate or tp_size > 1 else 0, squares_ptr=None),
        "lm_head": pushed(hidden, vocab // tp_size, 0),
        "reduce_norm": reduced(own_packets_ptr=None),
        "reduce_norm, own packets": reduced(),
        "collect_logits": collected(own_packets_ptr=None),
        "collect_logits, own packets": collected(),
        "finish_step": variant(capability, next_token._finish_step_kernel, 1, finish),
    }


def embed_norm(capability: int, hidden: int, rope: dict[str, Any]) -> Variant:
    """The first kernel of a step; `rope`: constants of its frequencies."""
    constants = {"HIDDEN": hidden, "HALF": 64, "HALF_PAD": 64, "BLOCK": residual.BLOCK, "ROPE_FACTOR": 1.0}
    constants |= {"PDL": capability >= 90} | rope
    types = {"x_ptr": "*fp32", "long_freq_ptr": "*fp32", "exponents_ptr": "*fp64"}
    return variant(capability, residual._embed_norm_kernel, 1, constants, **types)


def rope_by_length(capability: int) -> dict[str, Variant]:
    """The first kernel of models whose rotary frequencies depend on the length of a text."""
    longrope = {"exponents_ptr": None, "CONTEXT": 4096, "STRETCH": 0.0}
    dynamic = {"long_freq_ptr": None, "CONTEXT": 4096, "STRETCH": 1e-3}
    return {
        "embed_norm, longrope": embed_norm(capability, 4096, longrope),
        "embed_norm, dynamic": embed_norm(capability, 4096, dynamic),
    }


def family_options(capability: int, tp_size: int, batch_size: int, gate: bool) -> dict[str, Variant]:
    """Kernels of models with biases or norms of heads, for the 8B shape on one rank of `tp_size`."""
    step = decode_step(capability, tp_size, batch_size, gate)
    heads, kv_heads = 32 // tp_size, 8 // tp_size

    def changed(name: str, without: tuple[str, ...]) -> Variant:
        """A kernel of the step with arguments that its variant has as None."""
        plain = step[name]
        names = plain.kernel.arg_names
        constants = {names[at]: value for (at,), value in plain.src.constants.items() if names[at] not in without}
        types = {"out_ptr": "*bf16"} if name == "gate_up" else {}
        return variant(capability, plain.kernel, constants["WARPS"], constants, tail_ptr="*i8", **types)

    normed = {
        "K": 4096,
        "HQ": heads,
        "HKV": kv_heads,
        "D": 128,
        "HALF_PAD": 64,
        "RING": False,
        "ROWS": 1,
        "PDL": capability >= 90,
    }
    if not gate:
        normed |= {"gate_ptr": None, "inbox_ptr": None}
    no_tail = dict.fromkeys(["tail_ptr", "tail_scale_ptr"])
    kernel = head_norm._norm_rope_append_kernel
    return {
        "qkv, bias": changed("qkv", ("bias_ptr",)),
        "qkv, raw": changed("qkv", ("raw_ptr",)),
        "norm_rope_append": variant(capability, kernel, 1, normed | no_tail),
        "norm_rope_append, quantised": variant(capability, kernel, 1, normed, tail_ptr="*i8"),
        "gate_up, bias": changed("gate_up", ("bias_ptr",)),
        "o, bias": changed("o", ("bias_ptr",)),
    }


def many_rows(capability: int) -> dict[str, Variant]:
    """What follows the library's products of 40 rows, for the 8B shape on one rank and on one of two."""
    shape = {"K": 4096, "S": 128, "SP": 128, "BLOCK": gemm_products.BLOCK, "bias_ptr": None}
    push_kernel = gemm_products._push_products_kernel

    def pushed(peers: int, **more: Any) -> Variant:
        constants = shape | {"B": 40, "PEERS": peers, "SOURCES": max(1, peers)} | more
        return variant(capability, push_kernel, 4, constants)

    heads = {"K": 4096, "HQ": 32, "HKV": 8, "D": 128, "HALF_PAD": 64, "RING": False, "ROWS": 5, "PDL": capability >= 90}
    none = dict.fromkeys(["q_norm_ptr", "k_norm_ptr", "gate_ptr", "inbox_ptr", "tail_ptr", "tail_scale_ptr"])
    return {
        "many rows, o": pushed(0, squares_ptr=None),
        "many rows, o, tp 2": pushed(2, squares_ptr=None),
        "many rows, logits": pushed(0),
        "many rows, scale": variant(capability, gemm_products._scale_kernel, 4, shape),
        "many rows, silu": variant(capability, gemm_products._silu_kernel, 4, shape | {"I": 14336}, out_ptr="*bf16"),
        "many rows, rope and append": variant(capability, head_norm._norm_rope_append_kernel, 1, heads | none),
    }


def long_rows(capability: int) -> dict[str, Any]:
    """Gated projections of one of two ranks of the 70B shape, which read rows in pieces."""
    hidden, heads, kv_heads, mlp = 8192, 32, 4, 14336
    constants = {
        "K": hidden, "KP": gemv_tile.inputs_at_once(1, hidden, 2, True), "B": 1, "S": 128, "SP": 128, "LOOP": True,
        "PDL": capability >= 90,
    }  # fmt: skip
    pairs, _, _ = mma_tile.tile_of(1, hidden, 2, 64, 2, True)
    rows, steps, warps = mma_tile.tile_of(1, hidden, 2, mlp, 2, True)
    constants |= {"STEPS": steps, "WARPS": warps, "bias_ptr": None, "scale_ptr": None, "FORMAT": None, "GROUP": 0}
    qkv = {"HQ": heads, "HKV": kv_heads, "D": 128, "PAIRS": pairs}
    qkv |= dict.fromkeys(["tail_ptr", "tail_scale_ptr", "raw_ptr"]) | {"RING": False, "ROWS": 1}
    return {
        "qkv, long rows": variant(capability, projections._qkv_rope_append_kernel, warps, constants | qkv),
        "gate_up, long rows": variant(
            capability, projections._gate_up_silu_kernel, warps, constants | {"I": mlp, "ROWS": rows}, out_ptr="*bf16"
        ),
    }  # fmt: skip


def quantised_weights(capability: int) -> dict[str, Variant]:
    """Projections of the 8B shape on one rank with quantised weights, and their unpacking."""
    pdl, squares = {"PDL": capability >= 90}, {"S": 128, "SP": 128}
    types = dict.fromkeys(["w_ptr"], "*i32")

    def how(kind: str, group: int, inputs: int, tiles: int) -> dict[str, Any]:
        warps = packed_tile.num_warps(kind, tiles)
        steps = packed_tile._chunk_k_blocks(inputs, kind, group, warps)
        found: dict[str, Any] = {"K": inputs, "KP": inputs, "STEPS": steps, "WARPS": warps}
        found |= {"FORMAT": kind, "GROUP": group, "bias_ptr": None} | squares | pdl
        return found | ({"scale_ptr": None} if group else {})

    def pushed(kind: str, group: int, inputs: int, batch: int, gate: bool = False) -> Variant:
        constants = how(kind, group, inputs, 256)
        constants |= {"B": batch, "ROWS": 16, "MASKED": False, "PEERS": 1, "SOURCES": 1, "PUSH": True, "LOOP": gate}
        constants |= {"squares_ptr": None} | ({} if gate else {"gate_ptr": None})
        return variant(capability, push._push_partial_kernel, constants["WARPS"], constants, **types)

    def gate_up(kind: str, group: int, batch: int, gate: bool = False) -> Variant:
        constants = how(kind, group, 4096, 1792) | {"B": batch, "I": 14336, "ROWS": 8, "LOOP": gate}
        constants |= {} if gate else {"gate_ptr": None}
        return variant(
            capability, projections._gate_up_silu_kernel, constants["WARPS"], constants, **types, out_ptr="*bf16"
        )

    def qkv(kind: str, group: int, batch: int) -> Variant:
        none = ("raw_ptr", "inbox_ptr", "epoch_ptr", "gate_ptr", "tail_ptr", "tail_scale_ptr")
        shape = {"HQ": 32, "HKV": 8, "D": 128, "PAIRS": 8, "RING": False, "ROWS": 1, "B": batch, "LOOP": False}
        constants = how(kind, group, 4096, 384) | shape | dict.fromkeys(none)
        names = projections._qkv_rope_append_kernel.arg_names
        constants = {name: value for name, value in constants.items() if name in names}
        return variant(capability, projections._qkv_rope_append_kernel, constants["WARPS"], constants, **types)

    def unpacked(kind: str, group: int) -> Variant:
        constants = {"K": 4096, "FORMAT": kind, "GROUP": group, "LINES": int(block_lines(kind, group)), "ROWS": 16}
        constants |= {"BLOCK": unpack_weight.INPUTS} | ({"scale_ptr": None} if group else {})
        return variant(capability, unpack_weight._unpack_kernel, 4, constants, **types, out_ptr="*bf16")

    return {
        "weights, qkv, fp8": qkv("fp8", 0, 1),
        "weights, qkv, int4, batch 8": qkv("int4", 4, 8),
        "weights, gate_up, int4": gate_up("int4", 4, 1),
        "weights, gate_up, fp8, gated, 16 rows": gate_up("fp8", 0, 16, True),
        "weights, down, fp8": pushed("fp8", 0, 14336, 1),
        "weights, down, int4, gated, batch 8": pushed("int4", 4, 14336, 8, True),
        "weights, o, fp8 in blocks": pushed("fp8", 2, 4096, 1),
        "weights, o, int4 in groups of 32, 16 rows": pushed("int4", 1, 4096, 16),
        "weights, unpacked, fp8": unpacked("fp8", 0),
        "weights, unpacked, int4": unpacked("int4", 4),
    }


def sampled(capability: int, vocab_size: int = 128256) -> dict[str, Any]:
    """The kernels that choose a token: every cut, with and without min_p, biases, penalties and log probabilities."""
    blocks = -(-vocab_size // 1024)
    scale = 2.0 ** (62 - (vocab_size - 1).bit_length())
    shape = {"TABLES": 5, "SCALE": scale, "C": blocks, "C_PAD": triton.next_power_of_2(blocks), "BLOCK": 1024}
    shape |= {"PDL": capability >= 90, "MIN_P": False, "ROWS": 1, "FIRST_ROW": 0, "WIDTH": 1, "row_lens_ptr": None}
    types = {"shares_ptr": "*fp64", "numbers_ptr": "*i64", "counts_ptr": "*i32", "weights_ptr": "*i64"}
    types |= {"state_ptr": "*i64", "tokens_ptr": "*i64", "penalties_ptr": "*fp64", "bias_ptr": "*fp64"}
    types |= {"seen_ptr": "*i32", "num_top_ptr": "*i32", "block_keys_ptr": "*i64", "top_ptr": "*i64"}
    types |= {"sampled_ptr": "*i64", "logprobs_ring_ptr": "*i64", "scores_ptr": "*fp64", "candidates_ptr": "*i64"}

    def compiled(kernel: Any, num_warps: int = 8, fuses: bool = True, **constants: Any) -> Any:
        constants = {name: value for name, value in (shape | constants).items() if name in kernel.arg_names}
        return variant(capability, kernel, num_warps, constants, fuses, **types)

    top_k, top_p = int(sampler.TOP_K.value), int(sampler.TOP_P.value)
    finish = {"C": 128, "B": 8, "RING_STEPS": 16, "RING_HEADER": 2, "HITS": 1, "hits_ptr": None, "hits_ring_ptr": None}
    finish |= {"V": vocab_size, "TOP": 20, "TOP_PAD": 32}
    min_p = {"MIN_P": True}
    return {
        "sampling, first digit": compiled(sampler._first_digit_kernel, BY_COUNT=True),
        "sampling, second of top_k": compiled(sampler._next_digit_kernel, TABLE=1, CUT=top_k, CUT_BEFORE=None),
        "sampling, second of top_p alone": compiled(sampler._next_digit_kernel, TABLE=1, CUT=top_p, CUT_BEFORE=None),
        "sampling, second of top_p": compiled(sampler._next_digit_kernel, TABLE=3, CUT=top_p, CUT_BEFORE=top_k),
        "sampling, third of top_k": compiled(sampler._next_digit_kernel, TABLE=2, CUT=top_k, CUT_BEFORE=None),
        "sampling, third of top_p": compiled(sampler._next_digit_kernel, TABLE=4, CUT=top_p, CUT_BEFORE=top_k),
        "sampling, score": compiled(sampler._score_kernel, CUT=None),
        "sampling, score behind top_k": compiled(sampler._score_kernel, CUT=top_k),
        "sampling, score behind top_p": compiled(sampler._score_kernel, CUT=top_p),
        "sampling, score, min_p, 5 rows": compiled(sampler._score_kernel, CUT=None, ROWS=5, MIN_P=True),
        "sampling, choose": compiled(sampler._choose_kernel, num_warps=1),
        "sampling, first digit, min_p": compiled(sampler._first_digit_kernel, BY_COUNT=True, **min_p),
        "sampling, second of top_p, min_p": compiled(
            sampler._next_digit_kernel, TABLE=3, CUT=top_p, CUT_BEFORE=top_k, **min_p
        ),
        "sampling, score behind top_p, min_p": compiled(sampler._score_kernel, CUT=top_p, **min_p),
        "sampling, biases": compiled(adjustment._adjust_logits_kernel, fuses=False, seen_ptr=None),
        "sampling, penalties": compiled(adjustment._adjust_logits_kernel, fuses=False, bias_ptr=None),
        "sampling, biases and penalties": compiled(adjustment._adjust_logits_kernel, fuses=False),
        "sampling, log probabilities of blocks": compiled(logprobs._block_logprobs_kernel),
        "sampling, log probabilities": compiled(logprobs._top_logprobs_kernel, num_warps=4),
        "sampling, finish_step": compiled(next_token._finish_step_kernel, num_warps=1, **finish),
    }


def rounds(capability: int) -> dict[str, Any]:
    """The kernels of rounds of 4 drafts, and the choice of their tokens."""
    shape = {"W": 5, "W_PAD": 8, "B": 2, "B_PAD": 2, "C": 128, "STEP_ROWS": 1, "PLACE": 1, "HAS_BLOCKS": True}
    shape |= {"RING_ROWS": 5, "RING_STEPS": 16, "RING_HEADER": 2, "TOP": 20, "TOP_PAD": 32, "BLOCK": 1024}
    shape |= {"LONGEST": ngram.LONGEST_MATCH, "SHORTEST": ngram.SHORTEST_MATCH, "ENDS": ngram.ENDS}
    shape |= {"FIRST_ROW": 0, "ROWS": 5, "WIDTH": 5, "PDL": capability >= 90}
    types = {"newest_ptr": "*i64", "best_match_ptr": "*i64", "draft_tokens_ptr": "*i64", "sampled_ptr": "*i64"}
    types |= {"penalties_ptr": "*fp64", "bias_ptr": "*fp64", "top_ptr": "*i64", "logprobs_ring_ptr": "*i64"}
    integers = ("lengths", "live", "row_lens", "last_lens", "counts", "draft_lens", "history", "number", "accepted")
    types |= {f"{name}_ptr": "*i32" for name in (*integers, "committed", "seen")}

    def compiled(kernel: Any, num_warps: int = 1, fuses: bool = True, **constants: Any) -> Any:
        constants = {name: value for name, value in (shape | constants).items() if name in kernel.arg_names}
        own = {name: kind for name, kind in types.items() if name not in constants}
        return variant(capability, kernel, num_warps, constants, fuses, **own)

    greedy = {"sampled_ptr": None}
    return {
        "round, begin": compiled(round_kernels._begin_round_kernel),
        "round, begin, draft model": compiled(round_kernels._begin_model_draft_kernel),
        "round, take draft": compiled(round_kernels._take_draft_kernel),
        "round, take draft, greedy": compiled(round_kernels._take_draft_kernel, **greedy),
        "round, finish": compiled(round_kernels._finish_round_kernel),
        "round, finish, greedy": compiled(round_kernels._finish_round_kernel, **greedy, seen_ptr=None, **NO_LOGPROBS),
        "round, find match": compiled(ngram._find_match_kernel, 4),
        "round, take match": compiled(ngram._take_match_kernel),
        "round, penalties": compiled(adjustment._adjust_logits_kernel, 8, False, bias_ptr=None),
    }


def pair(capability: int, tp_size: int, batch_size: int) -> dict[str, Any]:
    """The kernels between paired ranks, for the same shape."""
    pdl = {"PDL": capability >= 90}
    hidden, heads, kv_heads = 4096, 32 // tp_size, 8 // tp_size
    batch_pad = triton.next_power_of_2(batch_size)
    roles_of_batch = {"B": batch_size, "P": triton.next_power_of_2(batch_size + 1)} | pdl
    message = {"HIDDEN": hidden, "HKV": kv_heads, "D": 128, "BLOCK": handover.BLOCK} | pdl
    no_tail = dict.fromkeys(["tail_ptr", "tail_scale_ptr"])
    into_tail = dict.fromkeys(["k_ptr", "v_ptr"])
    receive = message | {"OUT": heads * 128, "PARTS": 1, "VALUES": handover.BLOCK}
    receive |= {"SPEC_BLOCKS": heads * 128 // handover.BLOCK}
    spec_types = {"attn_out_ptr": "*bf16", "spec_out_ptr": "*i64", "spec_lse_ptr": "*i64"}
    in_parts = receive | {"PARTS": 5, "BLOCK": 128, "VALUES": 8, "SPEC_BLOCKS": heads * 128 // 8}
    only_channels = {"HIDDEN": hidden, "BLOCK": 32} | pdl
    sums = combine.num_sums(1, heads, 128)
    judged = {
        "ACCEPT_ALL": False, "B": batch_size, "B_PAD": batch_pad, "SUMS": sums, "SUMS_PAD": sums, "T": tp_size,
    } | pdl  # fmt: skip
    arrivals = {"SLOTS": 33, "SLOTS_PAD": 64, "T": tp_size, "T_PAD": tp_size}
    slots: dict[str, Any] = dict.fromkeys(
        ["takes_ptr", "computes_ptr", "predicts_ptr", "progress_ptr", "lead_ptr"], "*i32"
    )
    slots |= dict.fromkeys(["arrived_ptr", "header_ptr", "packets_ptr", "next_ptr"], "*i64") | {"counts_ptr": "*i32"}
    gathered = {"agreed_ptr": None, "peers_ptr": None}
    newest = {"HIDDEN": hidden, "HKV": kv_heads, "D": 128, "BLOCK": 256}
    chosen = arrivals | {"ROW": 1 + 2 * batch_size} | pdl
    decide = judged | {"T_PAD": tp_size}

    def compiled(kernel: Any, constants: dict[str, Any], num_warps: int = 1, **types: str) -> Any:
        fuses = kernel is not handover._receive_handover_kernel
        return variant(capability, kernel, num_warps, constants, fuses, x_ptr="*fp32", tail_ptr="*i8", **types)

    return {
        "meet": compiled(roles._step_barrier_kernel, {"WORLD": 2 * tp_size, "PAD": 2 * tp_size} | pdl),
        "update_roles": compiled(roles._update_roles_kernel, roles_of_batch),
        "receive_handover": compiled(handover._receive_handover_kernel, receive | no_tail, **spec_types),
        "receive_handover, in parts, quantised": compiled(
            handover._receive_handover_kernel, in_parts | into_tail, 4, **spec_types
        ),
        "receive_residual": compiled(handover._receive_residual_kernel, only_channels | {"next_ptr": None}),
        "decide": compiled(roles._decide_kernel, decide | {"forced_ptr": None}),
        "decide, forced": compiled(roles._decide_kernel, decide),
        "linked, decide": compiled(
            linked_pair._decide_kernel, judged | arrivals | gathered | {"forced_ptr": None}, **slots
        ),
        "linked, decide over packets": compiled(
            linked_pair._decide_kernel, judged | arrivals | {"forced_ptr": None}, agreed_ptr="*i64", **slots
        ),
        "linked, choose": compiled(linked_pair._choose_x_kernel, chosen | gathered, **slots),
        "linked, choose over packets": compiled(linked_pair._choose_x_kernel, chosen, agreed_ptr="*i64", **slots),
        "linked, choose, last": compiled(
            linked_pair._choose_x_kernel, chosen | gathered | {"header_ptr": None}, **slots
        ),
        "receive_residual, sent on": compiled(handover._receive_residual_kernel, only_channels, **slots),
        "linked, note": compiled(linked_pair._note_arrival_kernel, {}, **slots),
        "linked, replace": compiled(linked_pair._replace_newest_kernel, newest | no_tail, 2, **slots),
        "linked, replace, quantised": compiled(linked_pair._replace_newest_kernel, newest | into_tail, 2, **slots),
    }


def quantised_cache(capability: int) -> dict[str, Any]:
    """The kernels that write and restore the quantised cache, for 8 heads of 128."""
    types = dict.fromkeys(["words_ptr", "bits_ptr"], "*i32") | {"offset_ptr": "*i64"}
    types |= dict.fromkeys(["tail_ptr", "k8_ptr", "v8_ptr"], "*i8") | dict.fromkeys(
        ["k_scale_ptr", "v_scale_ptr"], "*fp32"
    )

    def compiled(kernel: Any, num_warps: int, **constants: Any) -> Any:
        default = {"H": 8, "D": 128} | ({"FORMAT": "flashq"} if "FORMAT" in kernel.arg_names else {})
        return variant(capability, kernel, num_warps, default | constants, **types)

    warps, pdl = codec_kernels.NUM_WARPS, {"PDL": capability >= 90}
    return {
        "kv_store": compiled(codec_kernels._store_kernel, codec_kernels.STORE_WARPS),
        "kv_store, head 64": compiled(codec_kernels._store_kernel, codec_kernels.STORE_WARPS, D=64),
        **{
            f"kv_store, {name}": compiled(codec_kernels._store_kernel, codec_kernels.STORE_WARPS, FORMAT=name)
            for name in ("turboquant3", "hybrid-k3v2")
        },
        "kv_compact, turboquant3": compiled(
            codec_kernels._kv_compact_kernel, codec_kernels.STORE_WARPS, FORMAT="turboquant3", **pdl
        ),
        "kv_restore, turboquant3": compiled(codec_kernels._restore_kernel, warps, FORMAT="turboquant3"),
        "kv_append, head 64": compiled(codec_kernels._kv_append_kernel, 1, D=64, **pdl),
        "kv_compact": compiled(codec_kernels._kv_compact_kernel, warps, **pdl),
        "kv_compact, head 64": compiled(codec_kernels._kv_compact_kernel, warps, D=64, **pdl),
        "kv_store, tail": compiled(codec_kernels._store_tail_kernel, warps),
        "kv_append": compiled(codec_kernels._kv_append_kernel, 1, **pdl),
        "kv_restore": compiled(codec_kernels._restore_kernel, warps),
    }


def between_products(capability: int) -> dict[str, Any]:
    """The kernels between the matrix products of a prompt, for the 8B shape and the partial sums of two ranks."""
    norm = {"PARTS": 2, "HIDDEN": 4096, "BLOCK": 4096}
    heads = {"HQ": 32, "HKV": 8, "D": 128, "HEADS_PAD": 64, "HALF_PAD": 64, "EPS": 1e-6}
    types = {"x_ptr": "*fp32", "parts_ptr": "*bf16", "weight_ptr": "*bf16", "y_ptr": "*bf16"}
    types |= {"qkv_ptr": "*bf16", "gate_up_ptr": "*bf16"}
    no_norms = dict.fromkeys(["q_norm_ptr", "k_norm_ptr"])
    silu = {"WIDTH": 14336, "BLOCK": prompt_kernels.SILU_BLOCK}
    return {
        "add_rms_norm": variant(capability, prompt_kernels._add_rms_norm_kernel, 8, norm, **types),
        "rotate_heads": variant(capability, prompt_kernels._rotate_heads_kernel, 8, heads | no_norms, **types),
        "rotate_heads, norms": variant(capability, prompt_kernels._rotate_heads_kernel, 16, heads, **types),
        "silu_mul": variant(capability, prompt_kernels._silu_mul_kernel, 4, silu, **types, out_ptr="*bf16"),
    }


def all_variants(capability: int) -> dict[str, Variant]:
    """Every variant that the tests compile, by name."""
    variants: dict[str, Variant] = {}

    def add(more: dict[str, Variant]) -> None:
        assert not variants.keys() & more.keys(), "two variants of one name"
        variants.update(more)

    for batch_size, spec in itertools.product((1, 8), (False, True)):
        name = f"batch {batch_size}" + ", spec" * spec
        add({f"lean, {name}": lean(capability, 4, 128, batch_size, spec)})
        add({f"lean combine, {name}": lean_combine(capability, 4, 128, batch_size, spec)})
        add({f"flashq combine, {name}": flashq_combine(capability, 4, 128, batch_size, spec)})
        for head_dim in (64,) if capability == 90 else (64, 80, 96, 256):
            add({f"lean, head {head_dim}, {name}": lean(capability, 4, head_dim, batch_size, spec)})
    add({"lean, 2 KV heads": lean(capability, 4, 128, 1, False, kv_heads=2)})
    for phase in ("all", "predictor", "rest"):
        add({f"lean, gated, spec, {phase}": lean(capability, 4, 128, 1, True, True, phase)})
    add({"flashq": flashq(capability, 4, 128, 1, False)})
    add({"lean, window": lean(capability, 4, 128, 1, False, window=True)})
    add({"lean, spec, window": lean(capability, 4, 128, 1, True, window=True)})
    add({"flashq, window": flashq(capability, 4, 128, 1, False, window=True)})
    add({"recall lists": choose_lists(capability, 4, 16, 2048), "recall lists, taken": take_lists(capability, 8)})
    add(quantised_weights(capability) | many_rows(capability) | rope_by_length(capability))
    add(quantised_cache(capability) | sampled(capability) | between_products(capability) | long_rows(capability))
    add(rounds(capability))
    add(_hopper_variants() if capability == 90 else _prefill_variants(capability))
    sizes = [(1, 1), (4, 1), (4, 8)] + [(1, 8), (2, 1)] * (capability == 90)  # ranks of a group, requests
    for tp_size, batch_size in sizes:
        kernels = decode_step(capability, tp_size, batch_size)
        # Only some kernels differ behind a gate in more than their gate.
        gated = decode_step(capability, tp_size, batch_size, True)
        chosen = gated if tp_size == 2 else GATED
        kernels |= {f"{name}, gated": gated[name] for name in chosen}
        if tp_size == 2 or (batch_size == 8 and tp_size == 4):
            for is_gated in (False, True):
                options = family_options(capability, tp_size, batch_size, is_gated)
                kernels |= {name + ", gated" * is_gated: kernel for name, kernel in options.items()}
        if (tp_size, batch_size) != (1, 8):
            kernels |= pair(capability, tp_size, batch_size)
        add({f"{name}, tp {tp_size}, batch {batch_size}": kernel for name, kernel in kernels.items()})
    return variants


def _prefill_variants(capability: int) -> dict[str, Variant]:
    return {
        f"prefill, head {head_dim}{', sas' * sas}": prefill_elsewhere(capability, head_dim, sas)
        for head_dim, sas in itertools.product((64, 128), (False, True))
    }


def _hopper_variants() -> dict[str, Variant]:
    """Variants for compute capability 9.0 only."""
    variants = {f"prefill, head {head_dim}": prefill(head_dim) for head_dim in (64, 128)}
    variants["reading alone"] = reading_alone()
    variants["lean, gated"] = lean(90, 4, 128, 1, False, True)
    variants["lean, 20 x 128, batch 8"] = lean(90, 20, 128, 8, False)
    for rows, batch_size in ((2, 1), (5, 1), (16, 1), (4, 4)):
        variants[f"lean, {rows} rows, batch {batch_size}"] = lean(90, 4, 128, batch_size, False, rows=rows)
    variants["lean combine, 5 rows"] = lean_combine(90, 4, 128, 1, False, rows=5)
    for rows, heads_per_kv, format in ((5, 4, "flashq"), (2, 4, "flashq"), (7, 2, "flashq"), (5, 4, "turboquant3")):
        name = f"{format}, {rows} rows of {heads_per_kv}"
        variants[name] = flashq(90, heads_per_kv, 128, 1, False, format=format, rows=rows)
        variants[f"{name}, masses"] = flashq(90, heads_per_kv, 128, 1, False, format=format, rows=rows, masses=True)
    variants["flashq, 5 rows, window"] = flashq(90, 4, 128, 1, False, rows=5, window=True)
    variants["flashq combine, 5 rows"] = flashq_combine(90, 4, 128, 1, False, rows=5)
    for phase in ("all", "predictor", "rest"):
        variants[f"lean, batch 8, gated, spec, {phase}"] = lean(90, 4, 128, 8, True, True, phase)
    shapes = ((4, 128, 2), (4, 128, 5), (8, 128, 3), (4, 256, 5), (16, 128, 1), (16, 256, 1), (4, 80, 2))
    for heads_per_kv, head_dim, parts in shapes:
        name = f"lean, {heads_per_kv} x {head_dim}, spec in {parts} parts"
        variants[name] = lean(90, heads_per_kv, head_dim, 1, True, True, spec_parts=parts)
    variants |= {
        "lean, batch 8, window": lean(90, 4, 128, 8, False, window=True),
        "lean, 5 rows, window": lean(90, 4, 128, 1, False, rows=5, window=True),
        "lean, spec, recall, window": lean(90, 4, 128, 1, True, True, spec_parts=3, recall=16, window=True),
        "lean combine, spec, recall, window": lean_combine(90, 4, 128, 1, True, spec_parts=3, recall=16, window=True),
        "flashq, spec, recall, window": flashq(90, 4, 128, 1, True, spec_parts=2, recall=16, window=True),
        "flashq, sas, 7 x 64, spec, window": flashq(90, 7, 64, 1, True, sas=True, window=True),
        "turboquant3, 7 x 64, spec, recall, window": flashq(
            90, 7, 64, 1, True, format="turboquant3", recall=16, window=True
        ),
        "flashq combine, spec, recall, window": flashq_combine(90, 4, 128, 1, True, 2, recall=16, window=True),
        "recall lists, window": choose_lists(90, 4, 16, 2048, window=True),
    }
    return variants | {
        "lean combine, spec in 3 parts": lean_combine(90, 4, 128, 1, True, spec_parts=3),
        "lean, spec, recall": lean(90, 4, 128, 1, True, True, spec_parts=3, recall=16),
        "lean, batch 8, gated, spec, recall, predictor": lean(90, 4, 128, 8, True, True, "predictor", recall=32),
        "lean, spec, recall, predictor": lean(90, 4, 128, 1, True, False, "predictor", recall=16),
        "lean combine, spec, recall, predictor": lean_combine(90, 4, 128, 1, True, recall=16, phase="predictor"),
        "flashq, spec, recall, predictor": flashq(90, 4, 128, 1, True, recall=16, phase="predictor"),
        "flashq combine, spec, recall, predictor": flashq_combine(90, 4, 128, 1, True, recall=16, phase="predictor"),
        "lean, batch 8, spec, recall, rest": lean(90, 4, 128, 8, True, True, "rest", recall=32),
        "lean combine, spec, recall": lean_combine(90, 4, 128, 1, True, spec_parts=3, recall=16),
        "flashq, spec, recall": flashq(90, 4, 128, 1, True, spec_parts=2, recall=16),
        "turboquant3, 7 x 64, spec, recall": flashq(90, 7, 64, 1, True, format="turboquant3", recall=16),
        "flashq combine, spec, recall": flashq_combine(90, 4, 128, 1, True, 2, recall=16),
        "flashq combine, spec in 2 parts": flashq_combine(90, 4, 128, 1, True, 2),
        "flashq, batch 8, spec": flashq(90, 4, 128, 8, True),
        "flashq, 8 x 128": flashq(90, 8, 128, 1, False),
        "flashq, 7 x 64": flashq(90, 7, 64, 1, False),
        "flashq, 7 x 64, spec": flashq(90, 7, 64, 1, True),
        "flashq, spec in 2 parts": flashq(90, 4, 128, 1, True, spec_parts=2),
        "flashq, sas": flashq(90, 4, 128, 1, False, sas=True),
        **{f"{name}, 4 x 128": flashq(90, 4, 128, 1, False, format=name) for name in FORMATS if name != "flashq"},
        "turboquant3, 7 x 64, spec": flashq(90, 7, 64, 1, True, format="turboquant3"),
        "hybrid-k3v2, batch 8, spec": flashq(90, 4, 128, 8, True, format="hybrid-k3v2"),
        "turboquant2, spec in 2 parts": flashq(90, 4, 128, 1, True, spec_parts=2, format="turboquant2"),
        "flashq, sas, batch 8, spec": flashq(90, 4, 128, 8, True, sas=True),
        "flashq, sas, 7 x 64, spec": flashq(90, 7, 64, 1, True, sas=True),
        "flashq, sas, 2 x 64, spec": flashq(90, 2, 64, 1, True, sas=True),
        "flashq, sas, spec in 2 parts": flashq(90, 4, 128, 1, True, sas=True, spec_parts=2),
    }


def is_fast(name: str) -> bool:
    """Whether the fast tier compiles this variant for compute capability 9.0."""
    begins = name.startswith(("kv_", "sampling, ", "round, ", "many rows, ")) and "turboquant3" not in name
    return name in FAST or begins or name.endswith(", tp 2, batch 1")
