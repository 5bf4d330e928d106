"""The link between paired ranks that no kernel reaches across: messages in a fixed order, each way on its own.

Each direction has its own communicator and stream, so a message waits for its values alone, and a message that has not
arrived holds up nothing. A message is a broadcast in a group of the two ranks: one kernel on either side, on one SM.

Messages are received outside of the step's CUDA graph: kernels of a step may wait for one, and only other streams are
sure to run beside them. Nor are they a graph of their own: in a graph NCCL starts each message by a call of the host,
and these calls wait for each other.

On a CPU, messages are asynchronous operations of Gloo. What has arrived is noted by `poll` and `await_message`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from alspec.kernels.common.jit_launch import is_compiling
from alspec.kernels.common.side_stream import SideStream

__all__ = ["LINK_SMS", "Expected", "PairLink"]

LINK_SMS = 2  # SMs that its kernels take: one for each direction

Expected = tuple[Tensor, Callable[[], None]]  # where a message goes; launches what notes for kernels that it is there


class PairLink:
    """Both directions of one pair.

    Args:
        out, back: a group of the pair's two ranks for what this rank sends, and one for what it receives.
        rank, paired_rank: in the job.
        device: of the messages.
    """

    def __init__(
        self, out: dist.ProcessGroup, back: dist.ProcessGroup, rank: int, paired_rank: int, device: torch.device
    ) -> None:
        self._out, self._back, self._rank, self._paired_rank, self._device = out, back, rank, paired_rank, device
        self._out_stream, self._back_stream = SideStream(device), SideStream(device)
        self._joined = torch.zeros(1, device=device)
        # On a CPU:
        self._sent: list[dist.Work | None] = []
        self._expected: deque[tuple[dist.Work | None, Callable[[], None]]] = deque()
        self._num_noted = 0  # messages of this step

    @property
    def is_host_driven(self) -> bool:
        """The host takes part in each message: on a CPU."""
        return self._out_stream.stream is None

    def ping(self, message: Tensor, is_first: bool) -> None:
        """Send a message to the paired rank and back, on the current stream; it opens the connections."""
        send = partial(dist.broadcast, message, self._rank, group=self._out)
        receive = partial(dist.broadcast, message, self._paired_rank, group=self._back)
        for call in (send, receive) if is_first else (receive, send):
            call()

    def order_receives(self) -> None:
        """Let the messages of the next step follow the launches so far."""
        self._back_stream.follow()

    def receive_step(self, messages: Sequence[Expected]) -> None:
        """Receive the messages of a step, in order, beside all launches to come.

        They follow `order_receives`: the launches of the step before read what is received.
        """
        if is_compiling():
            for _, note in messages:
                note()
            return
        if self._back_stream.stream is None:
            self._num_noted = 0
            for message, note in messages:
                self._expected.append(
                    (dist.broadcast(message, self._paired_rank, group=self._back, async_op=True), note)
                )
            return
        with torch.cuda.stream(self._back_stream.stream):
            for message, note in messages:
                dist.broadcast(message, self._paired_rank, group=self._back)
                note()

    def send(self, message: Tensor) -> None:
        """Send a message when the launches so far have written it; it must not change until `join`."""
        if is_compiling():
            return
        if self.is_host_driven:
            self._sent.append(dist.broadcast(message, self._rank, group=self._out, async_op=True))
            return
        with self.fork():
            dist.broadcast(message, self._rank, group=self._out)

    def fork(self) -> AbstractContextManager[None]:
        """Launches of this block follow the launches so far and what was sent, and run beside later launches."""
        return self._out_stream.fork()

    def join(self) -> None:
        """Let later launches follow what was sent and launched in `fork`."""
        for work in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()
        self._out_stream.join()
        if not self.is_host_driven:
            self._joined.zero_()  # an ordinary launch, see `SideStream.join`

    def poll(self) -> None:
        """On a CPU: note what has arrived."""
        while self._expected and (self._expected[0][0] is None or self._expected[0][0].is_completed()):
            self._note_next()

    def await_message(self, slot: int) -> None:
        """On a CPU: wait until this message of the step has arrived. On a GPU kernels wait."""
        while self.is_host_driven and self._num_noted <= slot:
            self._note_next()

    def _note_next(self) -> None:
        work, note = self._expected.popleft()
        if work is not None:
            work.wait()
        note()
        self._num_noted += 1

    def release(self) -> None:
        """Wait for all messages of the steps that were launched."""
        while self._expected:
            self._note_next()
