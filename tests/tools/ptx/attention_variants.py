"""Variants of the attention kernels of decoding and prompts, as a GPU of some compute capability launches them."""

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.experimental.gluon import language as gl
from variant import Variant, variant

from alspec.kernels.attention import recall as recall_lists
from alspec.kernels.attention.decode import combine, lean_decode, mainloop_sm80, mainloop_sm90
from alspec.kernels.attention.decode_quantised import quantised_decode, quantised_mainloop
from alspec.kernels.attention.prefill import int8_prefill, int8_prefill_sm90


def lean(
    capability: int,
    heads_per_kv: int,
    head_dim: int,
    batch_size: int,
    spec: bool,
    gate: bool = False,
    phase: str = "all",
    kv_heads: int = 8,
    spec_parts: int = 1,
    recall: int = 0,
    rows: int = 1,
    window: bool = False,
) -> Any:
    """The attention kernel as `lean_decode_attention` launches it; plain and without a gate as in a decode step."""
    uses_tma, columns = lean_uses_tma(capability, heads_per_kv * rows, head_dim, rows), heads_per_kv * rows
    constants = _lean_constants(
        capability, heads_per_kv, head_dim, batch_size, spec, kv_heads, spec_parts, phase, rows
    ) | {
        **recalling(recall, phase), "HEADS_PAD": max(8 if uses_tma else 16, triton.next_power_of_2(columns)),
        "STAGES": _lean_settings(capability, head_dim, uses_tma)[2],
        "READ_LENGTHS_EARLY": capability >= 90 and phase != "rest",
    }  # fmt: skip
    if phase == "predictor" and gate:  # of a pair over a link: after a join
        constants |= {"PDL": False, "READ_LENGTHS_EARLY": False}
    if not window:
        constants["sliding_window"] = None
    if rows == 1:
        constants["row_lens_ptr"] = None
    else:
        del constants["block_lse_ptr"]
    if phase != "all":
        constants |= dict.fromkeys(["epoch_ptr"])
    if not gate:
        constants["gate_ptr"] = None
    if not spec:
        constants |= dict.fromkeys(["spec_out_ptr", "epoch_ptr"])
    if spec_parts == 1 and (not recall or phase != "all"):
        constants["spec_lse_ptr"] = None
    types = {"spec_out_ptr": "*i64", "spec_lse_ptr": "*i64"} if spec and phase == "all" else {}
    if not uses_tma:
        return variant(capability, mainloop_sm80.lean_decode_kernel, 4, constants, **types)
    if batch_size > 1 and not spec:
        types |= {"out_ptr": "*bf16"}
    else:
        constants |= dict.fromkeys(["out_ptr", "out_lse_ptr"])
    short, width = constants["BLOCK_N"], constants["D"]
    for name, block_n in (("desc", short), ("long", 2 * short if constants["LONG"] else short)):
        types |= dict.fromkeys([f"k_{name}", f"v_{name}"], descriptor("bf16", gl.bfloat16, [1, block_n, width]))
    return variant(capability, mainloop_sm90.lean_sm90_kernel, 4, constants, **types)


def recall_constants(recall: int, is_lean: bool = True) -> dict[str, int]:
    """Blocks of a recall list, and the parts of `A~` over them."""
    parts = lean_decode.lean_recall_parts if is_lean else quantised_decode.quantised_recall_parts
    return {"RECALL": recall, "RECALL_PARTS": parts(recall)}


def recalling(recall: int, phase: str = "all", is_lean: bool = True) -> dict[str, Any]:
    """Constants of an attention kernel that recalls so many blocks."""
    constants: dict[str, Any] = recall_constants(recall, is_lean)
    if not recall:
        constants["recalled_ptr"] = None
    if not recall or phase == "predictor":
        constants["block_lse_ptr"] = None
    return constants


def choose_lists(capability: int, heads_per_kv: int, recall: int, num_blocks: int, window: bool = False) -> Variant:
    """The kernel that chooses recall lists, for a pair."""
    constants: dict[str, Any] = {
        "HKV": 8, "HEADS": heads_per_kv, "HEADS_PAD": triton.next_power_of_2(heads_per_kv), "RECALL": recall,
        "RECALL_PAD": triton.next_power_of_2(recall), "BLOCKS_PAD": num_blocks, "ROWS": 1, "TOGETHER": 1,
        "chosen_rows_ptr": None,
    }  # fmt: skip
    if not window:
        constants["windows_ptr"] = None
    kernel = recall_lists._choose_recall_lists_kernel
    return variant(capability, kernel, recall_lists.num_warps(num_blocks), constants)


def take_lists(capability: int, batch_size: int) -> Variant:
    """The kernel that takes the recall lists of a step, for a pair."""
    constants = {"B": batch_size, "B_PAD": triton.next_power_of_2(batch_size), "BLOCK": 1024, "PDL": capability >= 90}
    return variant(capability, recall_lists._take_recall_lists_kernel, 4, constants)


def lean_uses_tma(capability: int, columns: int, head_dim: int, rows: int = 1) -> bool:
    """Whether `lean` is the kernel of mainloop_sm90.py, in bf16."""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)):
        return lean_decode._uses_tma(torch.device("cuda"), columns, head_dim, torch.bfloat16, rows)


def descriptor(name: str, kind: Any, tile: list[int]) -> str:
    """The type of the tensor descriptor of such a tile."""
    return f"tensordesc<{name}{tile},{gl.NVMMASharedLayout.get_default_for(tile, kind)!r}>"


def lean_combine(
    capability: int, heads_per_kv: int, head_dim: int, batch_size: int, spec: bool, kv_heads: int = 8,
    spec_parts: int = 1, recall: int = 0, phase: str = "all", rows: int = 1, window: bool = False,
) -> Any:  # fmt: skip
    """The kernel that combines the partials of `lean`."""
    constants = _lean_constants(capability, heads_per_kv, head_dim, batch_size, spec, kv_heads, spec_parts, phase, rows)
    constants |= recall_constants(recall)
    width, slices, at_once = combine.combine_sizes(
        batch_size * rows, heads_per_kv * kv_heads, head_dim, 132 // (kv_heads * batch_size)
    )
    constants |= {"SLICE": width, "SLICES": slices, "ROUND": at_once, "gate_ptr": None}
    constants["SLICES_PER_PROGRAM"] = combine.slices_per_program(batch_size * rows, heads_per_kv * kv_heads, head_dim)
    uses_tma = lean_uses_tma(capability, heads_per_kv * rows, head_dim, rows)
    constants["WHOLE"] = batch_size > 1 and not spec and uses_tma
    if not window:
        constants["sliding_window"] = None
    if not spec:
        constants["sums_ptr"] = None
    return variant(
        capability, mainloop_sm80.lean_combine_kernel, 1, constants, False, combine.COMBINE_REGISTERS, out_ptr="*bf16"
    )


@functools.cache
def _lean_settings(capability: int, head_dim: int, uses_tma: bool) -> tuple[int, int, int, bool]:
    """The settings of an A100, an H100 or H200, a B200, for 16-bit numbers."""
    memory = {80: 166912, 90: 232448, 100: 232448}[capability]
    gpu = SimpleNamespace(major=capability // 10, shared_memory_per_block_optin=memory)
    lean_decode._settings.cache_clear()
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu):
        return lean_decode._settings(torch.device("cuda"), 2 * triton.next_power_of_2(head_dim), uses_tma)


def _lean_constants(
    capability: int, heads_per_kv: int, head_dim: int, batch_size: int, spec: bool, kv_heads: int, spec_parts: int,
    phase: str, rows: int,
) -> dict[str, Any]:  # fmt: skip
    columns = heads_per_kv * rows
    uses_tma = lean_uses_tma(capability, columns, head_dim, rows)
    block_n, long_run, _, _ = _lean_settings(capability, head_dim, uses_tma)
    heads_pad = triton.next_power_of_2(columns)
    is_wide = rows == 1 or (uses_tma and heads_pad == 32)
    block_n, long_run = lean_decode._tile_of(block_n, long_run, heads_pad, is_wide)
    return {
        "HKV": kv_heads, "HEADS_PER_KV": columns, "D": triton.next_power_of_2(head_dim), "HEAD_DIM": head_dim,
        "ROWS": rows,
        "PROGRAMS": 132, "B_PAD": lean_decode._pad_batch(batch_size), "BLOCK_N": block_n, "LONG": long_run,
        "SPEC": spec, "SPEC_PARTS": spec_parts, "PHASE": lean_decode.PHASES[phase], "PDL": capability >= 90,
    }  # fmt: skip


def flashq(
    capability: int, heads_per_kv: int, head_dim: int, batch_size: int, spec: bool, sas: bool = False,
    spec_parts: int = 1, format: str = "flashq", recall: int = 0, rows: int = 1, window: bool = False,
    masses: bool = False, phase: str = "all",
) -> Variant:  # fmt: skip
    """The attention kernel as `quantised_decode_attention` launches it. masses: it writes the weights of blocks."""
    settings = quantised_decode.GPU_SETTINGS
    constants = _flashq_constants(capability, heads_per_kv, head_dim, batch_size, spec, spec_parts, rows, window) | {
        "FORMAT": format, "PER_SM": settings.per_sm, "SAS": sas, "gate_ptr": None,
        "READ_LENGTHS_EARLY": capability >= 90, "BULK": capability >= 90, **recalling(recall, phase, is_lean=False),
        "PHASE": lean_decode.PHASES[phase],
    }  # fmt: skip
    if masses:
        del constants["block_lse_ptr"]
    if not window:
        constants["sliding_window"] = None
    if not spec:
        constants |= dict.fromkeys(["spec_out_ptr", "epoch_ptr"])
    if phase != "all":
        constants["epoch_ptr"] = None
    if (spec_parts == 1 and not recall) or phase != "all":
        constants["spec_lse_ptr"] = None
    types = {"spec_out_ptr": "*i64", "spec_lse_ptr": "*i64"} if spec and phase == "all" else {}
    return variant(
        capability, quantised_mainloop.quantised_decode_kernel, settings.num_warps, constants,
        maxnreg=quantised_decode.REGISTERS, **types,
    )  # fmt: skip


def flashq_combine(
    capability: int, heads_per_kv: int, head_dim: int, batch_size: int, spec: bool, spec_parts: int = 1,
    recall: int = 0, window: bool = False, rows: int = 1, phase: str = "all",
) -> Any:  # fmt: skip
    """The kernel that combines the partials of `flashq`."""
    constants = _flashq_constants(capability, heads_per_kv, head_dim, batch_size, spec, spec_parts, rows, window)
    constants |= recall_constants(recall, False) | {"PHASE": lean_decode.PHASES[phase]}
    outputs = constants["OUTPUTS"]
    width, slices, at_once = combine.combine_sizes(
        batch_size * rows, 8 * heads_per_kv, head_dim, constants["PROGRAMS"] // outputs
    )
    constants |= {"SLICE": width, "SLICES": slices, "ROUND": at_once, "gate_ptr": None}
    if not window:
        constants["sliding_window"] = None
    if not spec:
        constants["sums_ptr"] = None
    return variant(
        capability,
        quantised_mainloop.quantised_combine_kernel,
        1,
        constants,
        False,
        combine.COMBINE_REGISTERS,
        out_ptr="*bf16",
    )


def _flashq_constants(
    capability: int, heads_per_kv: int, head_dim: int, batch_size: int, spec: bool, spec_parts: int, rows: int,
    window: bool,
) -> dict[str, Any]:  # fmt: skip
    settings = quantised_decode.GPU_SETTINGS
    together = quantised_decode.quantised_rows_together(heads_per_kv, rows, sliding_window=1 if window else None)
    bundles, programs = batch_size * -(-rows // together), 132 * settings.per_sm
    if rows > 1:
        programs = quantised_decode.programs_of_rows(programs, 8 * bundles)
    return {
        "HEADS_PER_KV": together * heads_per_kv, "D": head_dim, "ROWS": rows, "TOGETHER": together,
        **quantised_decode.schedule_sizes(bundles, 8, programs), "WARPS": settings.num_warps,
        "SPEC": spec, "SPEC_PARTS": spec_parts, "PHASE": lean_decode.PHASES["all"], "PDL": capability >= 90,
    }  # fmt: skip


def prefill(head_dim: int) -> Any:
    """The attention kernel of prompts as `int8_prefill_attention` launches it on Hopper."""
    constants = {"HQ": 32, "HEADS_PER_KV": 4, "D": head_dim, "STAGES": int8_prefill_sm90.STAGES}
    tile = [int8_prefill_sm90.TILE, head_dim]
    types = {"k_desc": descriptor("i8", gl.int8, tile), "v_desc": descriptor("fp16", gl.float16, tile)}
    kernel, registers = int8_prefill_sm90.prefill_sm90_kernel, int8_prefill_sm90.REGISTERS
    return variant(90, kernel, 4, constants, maxnreg=registers, out_ptr="*bf16", **types)


def prefill_elsewhere(capability: int, head_dim: int, sas: bool) -> Any:
    """The attention kernel of prompts as it is launched on other GPUs."""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)):
        int8_prefill.num_warps.cache_clear()
        num_warps = int8_prefill.num_warps(torch.device("cuda"))
    block = int8_prefill.BLOCK
    constants = {"HQ": 32, "HEADS_PER_KV": 4, "D": head_dim, "BLOCK_M": block, "BLOCK_N": block, "SAS": sas}
    constants["STAGES"] = int8_prefill.NUM_STAGES
    types = {"k_desc": f"tensordesc<i8[{block}, {head_dim}]>", "v_desc": f"tensordesc<fp16[{block}, {head_dim}]>"}
    types |= {"cutoff": "fp32", "out_ptr": "*bf16"}
    return variant(capability, int8_prefill._prefill_kernel, num_warps, constants, **types)
