"""LL packets: 4 bytes of data (fp32) and 4 bytes of epoch in one 8-byte store, as in NCCL's LL protocol.

Data and flag arrive together. So a rank pushes packets into peer memory (GPU memory of its peers, or host memory)
without a fence, a separate flag, or a memset between steps. The reader polls until the upper half is the right epoch.
Every wait has a timeout. After the timeout, the reader writes the missing rank into the fault word and continues, so
that no kernel hangs. Later waits of that step return at once.
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

PACKETS_PER_LINE = 16  # in 128 bytes; buffers that begin at multiples of it share no line of memory

# Kinds of fault. A fault word is kind << 28 | reduce_index << 8 | rank; only the first fault of a step is kept.
BAD_NUMBERS = 1
LATE_PACKET = 2
LATE = tl.constexpr(LATE_PACKET)


def fault_code(kind: int, reduce_index: int, rank: int) -> int:
    """The fault word for a kind of fault, an all-reduce of the step and a rank.

    Args:
        kind: BAD_NUMBERS or LATE_PACKET.
        reduce_index: 2 layer for the attention output, 2 layer + 1 for the MLP output. After the L layers: 2 L for the
            logits, 2 L + 1 for the step barrier, 2 L + 2 for x between paired ranks. From 2 L + 3 on, those of draft
            steps, in the same order.
        rank: whose data was bad or late.
    """
    assert 0 <= reduce_index < 2**20, reduce_index
    assert 0 <= rank < 2**8, rank
    return kind << 28 | reduce_index << 8 | rank


def split_fault(code: int) -> tuple[int, int, int]:
    """Split a fault word into kind, reduce_index and rank."""
    return code >> 28, code >> 8 & 0xFFFFF, code & 0xFF


def unpack_packets(packets: Tensor, epoch: int) -> Tensor:
    """Read packets on the host: fp32, NaN where a packet has another epoch."""
    return torch.where(packets >> 32 == epoch, packets.view(torch.float32)[..., ::2], torch.nan)


@triton.jit
def pack_packets(value, epoch):
    """Pack fp32 values and the epoch into int64 packets."""
    return (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)


@triton.jit
def store_packets(ptr, value, epoch, mask=None):
    """Store fp32 values as packets for readers on other GPUs: write-through, system scope in SASS."""
    tl.store(ptr, pack_packets(value, epoch), mask=mask, cache_modifier=".wt")


# $0: the value.  $1, $2: the packet as loaded before, lower and upper half.  $3: its address.  $4: epoch.  $5: timeout
# in ns; with 0 the fault word stays as it is.  $6: address of the fault word.  $7: the fault code to store there.
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
# $8, $9: address of a packet, and the value that ends the wait.
_AWAIT_OR_END = tl.constexpr(
    _POLL.replace(
        "ENDED",
        "ld.relaxed.sys.global.b64 word, [$8]; setp.eq.u64 early, word, $9; @early mov.u32 $0, 0; @early bra DONE;",
    )
)


@triton.jit
def wait_packets(ptr, mask, epoch, timeout_ns, fault_ptr, code, end_ptr=None, end=None):
    """Wait until the packets at `ptr` carry `epoch`, and return their values; on timeout store `code` as the fault.

    Args:
        ptr: tensor of pointers to int64.
        mask: which packets exist; the others count as -0.0, which adds nothing.
        timeout_ns: longest wait.
        code: int32, same shape as `ptr`.
        end_ptr, end: when the packet at `end_ptr` equals `end`, all waits end; packets still missing count as 0.
    Returns:
        fp32, same shape as `ptr`; NaN where a packet did not arrive, because an old value could pass for a right one.
        (The interpreter does not wait: it returns NaN also where `end` would end the wait.)
    """
    # All loads are issued together; only packets that have not arrived are polled, one after the other.
    absent = (epoch.to(tl.int64) << 32) | 0x80000000
    packet = tl.load(ptr, mask=mask, other=absent, volatile=True)
    value = packet.to(tl.int32)
    flag = (packet >> 32).to(tl.int32)
    if INTERPRETED:
        value = tl.where(flag == epoch, value, 0x7FC00000)
    else:
        # After a late packet, all further waits of this step return at once. After bad numbers they do not: all packets
        # still arrive, and a rank that ran ahead would overwrite packets that another rank has not read.
        fault = tl.load(fault_ptr, volatile=True)
        remaining_ns = tl.where(fault >> 28 == LATE, 0, timeout_ns).to(tl.int64)
        if end_ptr is None:
            value = tl.inline_asm_elementwise(
                _AWAIT, "=&r,r,r,l,r,l,l,r",
                [value, flag, ptr.to(tl.int64), epoch, remaining_ns, fault_ptr.to(tl.int64), code],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            value = tl.inline_asm_elementwise(
                _AWAIT_OR_END, "=&r,r,r,l,r,l,l,r,l,l",
                [
                    value, flag, ptr.to(tl.int64), epoch, remaining_ns, fault_ptr.to(tl.int64), code,
                    end_ptr.to(tl.int64), end,
                ],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    return value.to(tl.float32, bitcast=True)
