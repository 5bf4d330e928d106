"""Device code: expand codes stored in planes (kv_codec/code_planes.py) to bytes, the registers of an MMA operand.

A nibble of a word selects a byte of a table (PTX `prmt`): four bytes of a register with one instruction. The tables are
constants, so a code can stand for any byte. Codes of 4 bits select a magnitude by three bits; the fourth is a sign, and
a negative code stands for 127 minus the byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED

__all__ = ["expand_group"]

NIBBLES_1 = tl.constexpr(0x44444444)
NIBBLES_2 = tl.constexpr(0x33333333)
NIBBLES_3 = tl.constexpr(0x77777777)
SIGNS = tl.constexpr(0x88888888 - 2**32)


@triton.constexpr_function
def _table_word(table, index):
    """Bytes 4 index .. 4 index + 3 of a table, as a 32-bit literal."""
    word = sum([byte << (8 * i) for i, byte in enumerate(table[4 * index : 4 * index + 4])])
    return f"0x{word:08X}"


@triton.jit
def _lookup(selectors, TABLE: tl.constexpr):
    """Look up the eight nibbles of each word, 0 .. 7, in a table of 4 or 8 bytes: the lower four, the upper four."""
    if INTERPRETED:
        low, high = tl.zeros_like(selectors), tl.zeros_like(selectors)
        for n in tl.static_range(8):
            nibble = (selectors >> (4 * n)) & 7
            byte = tl.zeros_like(selectors)
            for i in tl.static_range(len(TABLE)):
                byte = tl.where(nibble == i, TABLE[i], byte)
            if n < 4:
                low |= byte << (8 * n)
            else:
                high |= byte << (8 * (n - 4))
    else:
        FIRST: tl.constexpr = _table_word(TABLE, 0)
        SECOND: tl.constexpr = _table_word(TABLE, len(TABLE) // 4 - 1)
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 first, second, upper; mov.b32 first, " + FIRST + "; mov.b32 second, " + SECOND + ";"
            " shr.u32 upper, $2, 16; prmt.b32 $0, first, second, $2; prmt.b32 $1, first, second, upper; }",
            "=r,=r,r", [selectors], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return low, high


@triton.jit
def _lookup_signed(word, TABLE: tl.constexpr):
    """Look up the eight nibbles of each word: three bits select a byte u of TABLE, the fourth makes it 127 - u."""
    low, high = _lookup(word & NIBBLES_3, TABLE)
    if INTERPRETED:
        for n in tl.static_range(4):
            low ^= ((word >> (4 * n + 3)) & 1) * (127 << (8 * n))
            high ^= ((word >> (4 * n + 19)) & 1) * (127 << (8 * n))
    else:
        # A selector of 8 gives 0xFF, the sign of the byte 0x80 repeated; a selector of 0 gives that byte.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 ones, upper, u, v; mov.b32 ones, 0x80808080; shr.u32 upper, $2, 16;"
            " prmt.b32 u, ones, ones, $2; prmt.b32 v, ones, ones, upper;"
            " xor.b32 u, u, ones; xor.b32 v, v, ones; xor.b32 $0, u, $3; xor.b32 $1, v, $4; }",
            "=r,=r,r,r,r", [word & SIGNS, low, high], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return low, high


@triton.jit
def _word(rows, INDEX: tl.constexpr):
    return rows[INDEX // 4][INDEX % 4]


@triton.jit
def expand_group(rows, GROUP: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Expand the codes of a group to the bytes of eight registers, (m, kq, rh) of code_planes.py.

    Args:
        rows: words of a lane, four by four, as `read_codes` loads them.
        GROUPS: groups of a lane.
        TABLE: the byte of each code; of 4-bit codes only those of codes 8 to 15.
    """
    registers = ()
    if BITS == 4:
        for pair in tl.static_range(4):
            registers = registers + _lookup_signed(_word(rows, 4 * GROUP + pair), TABLE)
    else:
        for pair in tl.static_range(4):
            word = _word(rows, 2 * GROUP + pair // 2)
            if pair % 2 == 1:
                word >>= 2
            selectors = word & NIBBLES_2
            if BITS == 3:
                high = _word(rows, 2 * GROUPS + GROUP)
                if pair < 2:
                    high <<= 2 - pair
                if pair == 3:
                    high >>= 1
                selectors |= high & NIBBLES_1
            registers = registers + _lookup(selectors, TABLE)
    return registers
