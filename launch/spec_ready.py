"""How long after the start of speculative decode `A~` can be used, measured by a kernel that waits for its words."""

from __future__ import annotations

import math
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from alspec.errors import BadNumbersError, RankFailureError
from alspec.kernels.launch import RESERVED_BYTES, prefer_l1
from alspec.kernels.lean_attention import LeanWorkspace, Speculation, guess_parts, lean_decode_attention
from alspec.kernels.merge import num_sums
from alspec.kernels.reference import decode_attention_ref
from alspec.kernels.words import unpack_words
from alspec.launch.output import no_command
from alspec.predictor import predictor_ranges
from alspec.runtime.stats import spread

__all__ = ["merged", "pair_speculation", "spec_ready_us", "written"]

WARMUP, REPETITIONS = 5, 20
FLUSH_BYTES = 200 * 2**20
# Words of a program that waits, one for each lane. A poll takes as long as the slowest of its loads, which go through
# what memory is busy with: with 256 words, up to 22 us.
POLLED = 32
# Programs that wait for the same words: what one asks for too early, another one sees. All together leave attention and
# its merge places on an SM, which holds 32 programs.
WATCHERS, WATCHERS_OF_SM = 6, 28
# The first launch is held back until everything after it is queued and the waiting kernels spin.
HEAD_START_CYCLES = 2_000_000
DEADLINE_NS = 50_000_000
ROUNDS = 16  # of words to and fro, to compare two clocks
NEVER = torch.iinfo(torch.int64).max
TOLERANCE = 1e-2


@triton.jit
def _stamp(time_ptr):
    """Write the GPU's clock, in ns."""
    tl.store(time_ptr, globaltimer())


@triton.jit(do_not_specialize=["epoch", "size"])
def _wait_and_copy(
    words_ptr,  # [size] int64: values under an epoch
    epoch,
    copy_ptr,  # [size] fp32
    size,
    times_ptr,  # [size / PAD] int64: when words were first seen, in ns; before that, `never`
    never,
    deadline_ns,
    PAD: tl.constexpr,
    WATCHERS: tl.constexpr,
):
    """Spin until all words carry the epoch; who sees a block first copies its values. Past the deadline, just end.

    Every PAD words have WATCHERS programs; grid [WATCHERS size / PAD].
    """
    start = globaltimer()
    block = tl.program_id(0) // WATCHERS
    at = block * PAD + tl.arange(0, PAD)
    late = 1
    words = tl.full([PAD], 0, tl.int64)
    while (late > 0) & (globaltimer() - start < deadline_ns):
        words = tl.load(words_ptr + at, mask=at < size, other=0, volatile=True)
        late = tl.sum(((words >> 32 != epoch) & (at < size)).to(tl.int32))
    if late == 0:  # noqa: SIM102 (`and` would not spare the atomic)
        if tl.atomic_min(times_ptr + block, globaltimer()) == never:
            tl.store(copy_ptr + at, words.to(tl.int32).to(tl.float32, bitcast=True), mask=at < size)


@triton.jit(do_not_specialize=["first"])
def _exchange(
    mine_ptr,  # [1] int64, on this GPU: the last round that the other one has answered, or asked for
    other_ptr,  # [1] int64, on the other GPU
    # [rounds, 2] int64: this GPU's clock in ns before a round begins, and when its word has come; `never` if it has not
    times_ptr,
    rounds,
    first,
    never,
    deadline_ns,
    ASKS: tl.constexpr,
):
    """A word to the other GPU and one back, `rounds` times, whoever asks first; grid [1]. Rounds count from `first`."""
    start = globaltimer()
    for i in range(rounds):
        before = globaltimer()
        if ASKS:
            tl.store(other_ptr, first + i)
        seen = tl.load(mine_ptr, volatile=True)
        while (seen != first + i) & (globaltimer() - start < deadline_ns):
            seen = tl.load(mine_ptr, volatile=True)
        came = tl.where(seen == first + i, globaltimer(), never)
        if not ASKS:
            tl.store(other_ptr, first + i)
        tl.store(times_ptr + 2 * i, before)
        tl.store(times_ptr + 2 * i + 1, came)


def pair_speculation(chunk_size: int, q: Tensor, parts: int, device: torch.device) -> tuple[Speculation, Tensor]:
    """What attention of q [B, Hq, D] writes for a pair, with the words of `A~` on `device`; and these words, zeroed.

    `A~` comes in so many parts. Their epoch is 0.
    """
    batch, hq, dim = q.shape
    size = parts * q.numel()
    words = torch.zeros(size + (parts * batch * hq if parts > 1 else 0), dtype=torch.int64, device=device)
    speculation = Speculation(
        chunk_size,
        words[:size].view(parts, *q.shape),
        torch.full((batch, num_sums(hq, dim), 2), torch.nan, device=q.device),
        torch.zeros(1, dtype=torch.int32, device=q.device),
        words[size:].view(parts, batch, hq) if parts > 1 else None,
    )
    return speculation, words


def written(out: Tensor, speculation: Speculation | None) -> tuple[Tensor, ...]:
    """What attention writes: its output; with a guess `A~`, the verdict's sums and, of several parts, their lse."""
    if speculation is None:
        return (out,)
    lse = () if speculation.spec_lse is None else (speculation.spec_lse,)
    return (out, speculation.spec_out, speculation.sums, *lse)


def merged(spec_out: Tensor, spec_lse: Tensor | None, epoch: int) -> Tensor:
    """`A~` [B, Hq, D] fp32 of the words of a `Speculation` under an epoch; NaN where one is missing."""
    o = unpack_words(spec_out, epoch)
    if spec_lse is None:
        return o[0]
    weight = (unpack_words(spec_lse, epoch) * math.log(2)).softmax(0)
    return (o * weight[..., None]).sum(0)


class _Watch:
    """A kernel that waits for words, and when it saw them."""

    def __init__(self, words: Tensor) -> None:
        device = words.device
        self.words = words
        self.copy = torch.empty(words.shape, device=device)
        self.times = torch.empty(triton.cdiv(words.numel(), POLLED), dtype=torch.int64, device=device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.watchers = min(WATCHERS, WATCHERS_OF_SM * sms // len(self.times))

    def reset(self) -> None:
        self.copy.fill_(torch.nan)
        self.times.fill_(NEVER)

    def start(self, epoch: int) -> None:
        """Launch it, on the current stream of the GPU that has the words."""
        # Many small programs: one that polls many words takes much of its SM's share of memory bandwidth.
        compiled = _wait_and_copy[(self.watchers * len(self.times),)](
            self.words, epoch, self.copy, self.words.numel(), self.times, NEVER, DEADLINE_NS, POLLED, self.watchers,
            num_warps=1,
        )  # fmt: skip
        # All of an SM's memory as shared memory, as attention needs: an SM cannot change that while a program runs.
        room = torch.cuda.get_device_properties(self.words.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        prefer_l1(compiled, (room + RESERVED_BYTES) // (compiled.metadata.shared + RESERVED_BYTES))

    def seen_at(self) -> int:
        """When the last word was seen, in ns; `NEVER` if one was not."""
        return int(self.times.max())


class _Clocks:
    """How far the second GPU's clock is ahead of the first one's.

    The two send a word to and fro; in the quickest round the answer is taken to be given in its middle. So the error is
    at most half of what a word takes both ways, and small where it takes as long one way as the other. A millisecond
    later, when the time is taken, the clocks may have drifted by some 20 ns.
    """

    def __init__(self, here: torch.device, there: torch.device) -> None:
        self.words = [torch.zeros(1, dtype=torch.int64, device=device) for device in (here, there)]
        self.times = [torch.zeros(ROUNDS, 2, dtype=torch.int64, device=device) for device in (here, there)]
        self.streams = [torch.cuda.Stream(device) for device in (here, there)]
        self.first = 1

    def start(self) -> None:
        """Launch the exchange on both GPUs, on streams of its own."""
        for side in (1, 0):
            with torch.cuda.device(self.streams[side].device), torch.cuda.stream(self.streams[side]):
                _exchange[(1,)](
                    self.words[side], self.words[1 - side], self.times[side], ROUNDS, self.first, NEVER, DEADLINE_NS,
                    ASKS=side == 0, num_warps=1,
                )  # fmt: skip
        self.first += ROUNDS

    def ahead_ns(self) -> float:
        """By the last exchange, once it has ended.

        Raises:
            RankFailureError: a word did not come in time.
        """
        asked, answered = (times.tolist() for times in self.times)
        if any(came == NEVER for times in (asked, answered) for _, came in times):
            raise RankFailureError("spec_ready: two GPUs could not compare their clocks: a word did not come")
        # In whole ns: beyond 2^60 of them since 1970, floats are 256 apart.
        _, twice = min(
            (end - begin, 2 * seen - begin - end) for (begin, end), (_, seen) in zip(asked, answered, strict=True)
        )
        return float(twice / 2)


def spec_ready_us(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, chunk_size: int, peer: bool) -> dict[str, float]:
    """Microseconds from the launch of speculative decode until another kernel sees all of `A~`.

    The clock starts when the kernel before it ends, so its launch is in it. With `peer`, `A~` lies on the second GPU,
    where a kernel waits for it; the clocks of the two are compared right before.

    Args:
        q, k, v, seq_lens: of one request, as for `lean_decode_attention`, on the first GPU.
    Returns:
        p20, p50, p80 over launches with a cold L2.
    Raises:
        RankFailureError: a word did not come in time.
        BadNumbersError: `A~` is wrong.
    """
    here = q.device
    there = torch.device("cuda", 1) if peer else here
    batch, hq, dim = q.shape
    sms = torch.cuda.get_device_properties(here).multi_processor_count
    workspace = LeanWorkspace.allocate(batch, hq, k.shape[1], dim, here, sms)
    out, lse = torch.empty_like(q), torch.empty(batch, hq, device=here)
    parts = guess_parts(chunk_size, batch, hq, k.shape[1], dim, q.dtype, here)
    speculation, words = pair_speculation(chunk_size, q, parts, there)
    assert speculation.epoch is not None
    started = torch.zeros(1, dtype=torch.int64, device=here)
    guess, clocks = _Watch(words), _Clocks(here, there) if peer else None
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=here)
    main, waiting = torch.cuda.Stream(here), torch.cuda.Stream(there)

    def attend() -> None:
        _stamp[(1,)](started)
        lean_decode_attention(q, k, v, seq_lens, dim**-0.5, workspace, out, lse, speculation)

    samples = []
    for repetition in range(WARMUP + REPETITIONS):
        guess.reset()
        speculation.epoch.fill_(repetition)
        _synchronize(here, there)
        if repetition == 0:
            # Compile and load before anything spins: loading a kernel waits for the device.
            with torch.cuda.device(here):
                flush.fill_(1)
                torch.cuda._sleep(1)
                attend()
            if clocks is not None:
                clocks.start()
            with torch.cuda.device(there):
                guess.start(-1)  # of no epoch that comes: it waits till its deadline
            _synchronize(here, there)
            guess.reset()
        if clocks is not None:
            clocks.start()
            _synchronize(here, there)
        with torch.cuda.device(there), torch.cuda.stream(waiting):
            guess.start(repetition)
        with torch.cuda.device(here), torch.cuda.stream(main):
            flush.fill_(repetition % 7)
            torch.cuda._sleep(HEAD_START_CYCLES)
            attend()
        _synchronize(here, there)
        end = guess.seen_at()
        if end == NEVER or not torch.equal(guess.copy, unpack_words(words, repetition)):
            raise RankFailureError(f"spec_ready: repetition {repetition}: A~ did not come")
        samples.append((end - int(started) - (clocks.ahead_ns() if clocks else 0)) / 1e3)
    _check_guess(speculation, q, k, v, seq_lens, WARMUP + REPETITIONS - 1)
    return spread(samples[WARMUP:])


def _check_guess(speculation: Speculation, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, epoch: int) -> None:
    """Compare `A~` of one request with the fp64 oracle over its tokens."""
    n = int(seq_lens)
    sink_end, window_start = (int(end) for end in predictor_ranges(seq_lens, speculation.chunk_size))
    tokens = [*range(sink_end), *range(window_start, n)]
    near = torch.tensor([len(tokens)])
    wanted, _ = decode_attention_ref(q, k[:, :, tokens], v[:, :, tokens], near, q.shape[-1] ** -0.5)
    found = merged(speculation.spec_out, speculation.spec_lse, epoch).to(wanted)
    error = float((found - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        raise BadNumbersError(f"spec_ready: wrong A~: relative error {error:.2e} for {n} tokens")


def _synchronize(here: torch.device, there: torch.device) -> None:
    torch.cuda.synchronize(here)
    torch.cuda.synchronize(there)


if __name__ == "__main__":
    sys.exit(no_command(__file__, "launch/bench_kernels.py --bench ready"))
