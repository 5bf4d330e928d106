"""Self-flagging words: an fp32 value and the step's epoch in one 8-byte store, so that data and flag arrive together.

A rank pushes words to where its peers read them, in their memory or the host's: no fence, no separate flag, no memset
between steps. The reader polls until the upper half is the epoch it expects. Every wait has a deadline. Past it, the
reader notes the missing rank in the fault word and goes on, so that no kernel hangs; later waits of that step take no
time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from alspec.kernels.common.device import INTERPRETED

__all__ = [
    "BAD_NUMBERS",
    "LATE_PACKET",
    "PACKETS_PER_LINE",
    "fault_code",
    "pack_packets",
    "split_fault",
    "store_packets",
    "unpack_packets",
    "wait_packets",
]

PACKETS_PER_LINE = 16  # words of a line of memory, 128 bytes: a field that begins at one shares it with no other

# Kinds of fault: kind << 28 | slot << 8 | rank, the first of a step.
BAD_NUMBERS = 1
LATE_PACKET = 2
LATE = tl.constexpr(LATE_PACKET)


def fault_code(kind: int, slot: int, rank: int) -> int:
    """The fault word of this kind: in which slot (2 layer: attention output, 2 layer + 1: MLP output), and whose."""
    assert 0 <= slot < 2**20, slot
    assert 0 <= rank < 2**8, rank
    return kind << 28 | slot << 8 | rank


def split_fault(code: int) -> tuple[int, int, int]:
    """kind, slot and rank of a fault word."""
    return code >> 28, code >> 8 & 0xFFFFF, code & 0xFF


def unpack_packets(packets: Tensor, epoch: int) -> Tensor:
    """What kernels read out of words, from the host: fp32, NaN where a word is of another epoch."""
    return torch.where(packets >> 32 == epoch, packets.view(torch.float32)[..., ::2], torch.nan)


@triton.jit
def pack_packets(value, epoch):
    """fp32 values under the epoch, as int64."""
    return (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)


@triton.jit
def store_packets(ptr, value, epoch, mask=None):
    """Store fp32 values under the epoch for readers on other GPUs: written through, strong at system scope (SASS)."""
    tl.store(ptr, pack_packets(value, epoch), mask=mask, cache_modifier=".wt")


# $0: the value.  $1, $2: a word read before, lower and upper half.  $3: its address.  $4: epoch.  $5: nanoseconds to
# wait; with 0 the fault word stands.  $6: fault word.  $7: what to write there.
_POLL = """
{
    .reg .pred late, early;
    .reg .u64 begin, now, word;
    .reg .u32 flag;
    mov.u32 $0, $1;
    mov.u32 flag, $2;
    setp.eq.u32 early, flag, $4;
    @early bra DONE;
    mov.u64 begin, %globaltimer;
AGAIN:
    ld.relaxed.sys.global.b64 word, [$3];
    mov.b64 {$0, flag}, word;
    setp.eq.u32 early, flag, $4;
    @early bra DONE;
    ENDED
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.ge.u64 late, now, $5;
    @!late bra AGAIN;
    mov.u32 $0, 0x7FC00000;
    setp.ne.u64 late, $5, 0;
    @late st.volatile.global.u32 [$6], $7;
DONE:
}
"""
_AWAIT = tl.constexpr(_POLL.replace("ENDED", ""))
# $8, $9: a word, and the value with which it ends the wait.
_AWAIT_OR_END = tl.constexpr(
    _POLL.replace(
        "ENDED",
        "ld.relaxed.sys.global.b64 word, [$8]; setp.eq.u64 early, word, $9; @early mov.u32 $0, 0; @early bra DONE;",
    )
)


@triton.jit
def wait_packets(ptr, mask, epoch, timeout_ns, fault_ptr, code, end_ptr=None, end=None):
    """Values of the words at `ptr` once they carry `epoch`; after `timeout_ns` the fault word gets `code`.

    Args:
        ptr: tensor of pointers to int64.  mask: whose words exist; the others count as -0.0, which adds nothing.
        code: as `ptr`, int32.  end_ptr, end: a word, and the value of it that ends all waits; what has not come by then
            counts as 0.
    Returns:
        fp32, as `ptr`; NaN where the word did not come, for an old value may look like a right one. (Interpreted, there
        is nothing to wait for: NaN as well where the wait is ended.)
    """
    # All loads are issued together; only words that have not come yet are polled, one by one.
    none = (epoch.to(tl.int64) << 32) | 0x80000000
    word = tl.load(ptr, mask=mask, other=none, volatile=True)
    value = word.to(tl.int32)
    flag = (word >> 32).to(tl.int32)
    if INTERPRETED:
        value = tl.where(flag == epoch, value, 0x7FC00000)
    else:
        # Somebody was late in this step: its waits are over. After bad numbers they are not: everything still comes,
        # and a rank that runs ahead would write over words that another one has not read.
        fault = tl.load(fault_ptr, volatile=True)
        patience = tl.where(fault >> 28 == LATE, 0, timeout_ns).to(tl.int64)
        if end_ptr is None:
            value = tl.inline_asm_elementwise(
                _AWAIT, "=&r,r,r,l,r,l,l,r",
                [value, flag, ptr.to(tl.int64), epoch, patience, fault_ptr.to(tl.int64), code],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            value = tl.inline_asm_elementwise(
                _AWAIT_OR_END, "=&r,r,r,l,r,l,l,r,l,l",
                [
                    value, flag, ptr.to(tl.int64), epoch, patience, fault_ptr.to(tl.int64), code,
                    end_ptr.to(tl.int64), end,
                ],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    return value.to(tl.float32, bitcast=True)
