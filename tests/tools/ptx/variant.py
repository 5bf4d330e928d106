"""One variant of a kernel, compiled without a GPU when its code is first read."""

import functools
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from alspec.kernels.kv_codec.quantised_layer import PER_HEAD

HALF = {"q_ptr", "k_ptr", "v_ptr", "x_ptr", "w_ptr", "gamma_ptr", "table_ptr", "x_norm_ptr", "bias_ptr"}
HALF |= {"q_norm_ptr", "k_norm_ptr"}
INTEGER = {"seq_lens_ptr", "epoch_ptr", "fault_ptr", "gate_ptr"}
INTEGER |= {"priority_ptr", "is_sender_ptr", "is_receiver_ptr", "hits_ptr", "live_ptr", "forced_ptr", "gates_ptr"}
INTEGER |= {"recalled_ptr", "lists_ptr", "peer_lists_ptr", "senders_ptr", "windows_ptr"}
INTEGER |= {"half_ptr", "halves_ptr", "next_half_ptr", "kept_lens_ptr"}
INTEGER |= {"next_gate_ptr", "records_ptr", "bits_ptr", "tail_ptr", "best_token_ptr", "stamps_ptr"}
WIDE = {"peers_ptr", "packets_ptr", "token_ids_ptr", "ring_ptr", "verdicts_ptr", "verdict_ptr", "inbox_ptr"}
WIDE |= {"barrier_ptr", "offset_ptr", "own_packets_ptr"}
SCALARS = {"qk_scale": "fp32", "eps": "fp32", "timeout_ns": "i64", "threshold2": "fp32"}
DIVISIBLE = {"capacity", "chunk_size"}


@dataclass(frozen=True)
class Variant:
    """One variant of a kernel."""

    kernel: Any
    capability: int
    src: ASTSource
    options: dict[str, Any]

    @functools.cached_property
    def asm(self) -> Any:
        """The code of all stages, from `ttgir` to `cubin`."""
        return triton.compile(self.src, target=GPUTarget("cuda", self.capability, 32), options=self.options).asm

    @property
    def name(self) -> str:
        """The module and the name of the kernel function."""
        return f"{self.kernel.fn.__module__}.{self.kernel.fn.__name__}".removeprefix("alspec.kernels.")

    def constant(self, name: str) -> Any:
        """The value of a constexpr argument; None without this argument."""
        names = self.kernel.arg_names
        return self.src.constants.get((names.index(name),)) if name in names else None


def variant(
    capability: int,
    kernel: Any,
    num_warps: int,
    constants: dict[str, Any],
    fuses: bool = True,
    maxnreg: int | None = None,
    **types: str,
) -> Variant:
    """One variant, with pointers and sizes aligned as the launchers' are; `types` overrules what names say."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = types[name]
        elif name.endswith("_ptr"):
            kind = "bf16" if name in HALF else "i32" if name in INTEGER else "i64" if name in WIDE else "fp32"
            signature[name] = "*" + kind
        else:
            signature[name] = SCALARS.get(name, "i32")
        parameter = kernel.params[index]
        assert name not in PER_HEAD or parameter.do_not_specialize_on_alignment, "compiled again for some layers"
        is_free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if name not in constants and not is_free and (name.endswith("_ptr") or name in DIVISIBLE):
            attributes[(index,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "enable_fp_fusion": fuses, "maxnreg": maxnreg}
    return Variant(kernel, capability, source, options)
