"""Codes of quantised weights -> operands of tensor cores, numbers of 16 bits, without rounding.

e4m3: its bits are moved, and a product with a power of two corrects the exponent. Four bits: the mantissa of 128 + code
(fp16: 1024 + code), from which 128 + zero is subtracted. decode_weight.py has the layout of a word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED

__all__ = ["code_operands", "scale_of", "zero_operand"]


@triton.jit
def _to_half(x, BF16: tl.constexpr):
    """Interpreter: the bits of exact numbers of 16 bits, in the low half of int32."""
    if BF16:
        bits = (x.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    else:
        bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits


@triton.jit
def _fp8_pairs(word, BF16: tl.constexpr):
    """Four codes of e4m3 -> two pairs of numbers of 16 bits."""
    if INTERPRETED:
        x = ()
        for i in tl.static_range(2):
            byte = (word >> (8 - 8 * i)) & 0xFF, (word >> (24 - 8 * i)) & 0xFF
            low = (((byte[0] & 0x80) << 24) | ((byte[0] & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
            high = (((byte[1] & 0x80) << 24) | ((byte[1] & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
            x = x + (_to_half(low, BF16) | (_to_half(high, BF16) << 16),)  # noqa: RUF005
    else:
        KIND: tl.constexpr = "bf16x2" if BF16 else "f16x2"
        # Exponent and mantissa move behind the sign; then the exponent lacks 120 (fp16: 8). Adding -0 keeps the sign.
        SHIFT: tl.constexpr = "4" if BF16 else "1"
        MASK: tl.constexpr = "0x07F007F0" if BF16 else "0x3F803F80"
        POWER: tl.constexpr = "0x7B807B80" if BF16 else "0x5C005C00"
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, p, z; shl.b32 c, $2, 8;"
            f" mov.b32 p, {POWER}; mov.b32 z, 0x80008000;"
            f" shr.u32 a, $2, {SHIFT}; and.b32 a, a, {MASK}; lop3.b32 a, $2, z, a, 0xEA;"
            f" shr.u32 b, c, {SHIFT}; and.b32 b, b, {MASK}; lop3.b32 b, c, z, b, 0xEA;"
            f" fma.rn.{KIND} $0, a, p, z; fma.rn.{KIND} $1, b, p, z; }}",
            "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _int4_pairs(word, zero, BF16: tl.constexpr):
    """Eight codes of four bits -> four pairs `code - zero` of 16 bits; zero: of the row, below 16."""
    if INTERPRETED:
        x = ()
        for i in tl.static_range(4):
            low = (((word >> (4 * i)) & 15) - zero).to(tl.float32)
            high = (((word >> (16 + 4 * i)) & 15) - zero).to(tl.float32)
            x = x + (_to_half(low, BF16) | (_to_half(high, BF16) << 16),)  # noqa: RUF005
    else:
        KIND: tl.constexpr = "bf16x2" if BF16 else "f16x2"
        MAGIC: tl.constexpr = "0x43004300" if BF16 else "0x64006400"
        ONE: tl.constexpr = "0x3F803F80" if BF16 else "0x3C003C00"
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d, m, n, o;"
            f" mov.b32 m, {MAGIC}; mov.b32 n, 0x000F000F; mov.b32 o, {ONE};"
            " shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12;"
            # (x & n) | m
            " lop3.b32 a, $4, n, m, 0xEA; lop3.b32 b, b, n, m, 0xEA;"
            " lop3.b32 c, c, n, m, 0xEA; lop3.b32 d, d, n, m, 0xEA;"
            f" fma.rn.{KIND} $0, a, o, $5; fma.rn.{KIND} $1, b, o, $5;"
            f" fma.rn.{KIND} $2, c, o, $5; fma.rn.{KIND} $3, d, o, $5; }}",
            "=r,=r,=r,=r,r,r", [word, zero], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def zero_operand(word, FORMAT: tl.constexpr, BF16: tl.constexpr):
    """What `_int4_pairs` takes as the zero point in a scale's word: on the device -(128 + zero) twice, in 16 bits."""
    zero = word
    if FORMAT == "int4":
        zero = word & 15
        if not INTERPRETED:
            zero = zero * 0x10001 + (-0x3CFF3D00 if BF16 else -0x1BFF1C00)
    return zero


@triton.jit
def scale_of(word, FORMAT: tl.constexpr):
    """The scale in a word."""
    return (word & -16 if FORMAT == "int4" else word).to(tl.float32, bitcast=True)


@triton.jit
def code_operands(words, index: tl.constexpr, zeros, FORMAT: tl.constexpr, BF16: tl.constexpr):
    """Operands of a line's k-block: four pairs of row g, four of row g + 8."""
    if FORMAT == "int4":
        x = _int4_pairs(words[2 * index], zeros[0], BF16) + _int4_pairs(words[2 * index + 1], zeros[1], BF16)
    else:
        x = _fp8_pairs(words[0], BF16) + _fp8_pairs(words[1], BF16) + _fp8_pairs(words[2], BF16)
        x = x + _fp8_pairs(words[3], BF16)
    return x
