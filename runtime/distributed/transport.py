"""Collectives and pair messages over torch.distributed: NCCL between GPUs, Gloo between CPU processes."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from alspec.errors import CannotConnectError, RankFailureError, UserError, one_line
from alspec.runtime.distributed.pair_link import PairLink
from alspec.runtime.distributed.placement import Placement

__all__ = [
    "NOTICE_S",
    "STORE_GONE",
    "STORE_LOST",
    "TIMEOUT",
    "PairMessage",
    "Transport",
    "agent_hosts_store",
    "connect_store",
]

# Longer than any normal wait; the heartbeat ends a job with a dead rank much earlier.
TIMEOUT = timedelta(seconds=600)
# A message may be expected while a user thinks: the heartbeat, not NCCL, ends a job with a dead rank.
LINK_TIMEOUT = timedelta(days=7)
PINGS = 10  # exchanges of which the fastest counts
# torchrun's store is there before any rank: it is gone if it cannot be reached within this time.
CONNECT_TIMEOUT = timedelta(seconds=5)
STORE_GONE = "the job's key-value store is gone"
STORE_LOST = f"{STORE_GONE}: rank 0 or torchrun on its host has ended"
NOTICE_S = 10.0  # ranks that wait longer than this for others print a notice

# The server ends with the last store of this process, but other ranks may already be connected for their next engine.
_hosted: list[dist.Store] = []
_GROUPS = itertools.count()  # numbers of the process groups made by this process; the same on every rank

# Renamed in PyTorch 2.13.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

REASON_BYTES = 200  # length of a text in `first_reason`

MAX_GATHERED = 4  # up to this many ranks, 16-bit partial sums are gathered
# Sequence parallelism (Megatron): the residual stream of a prompt is spread over the ranks from this many tokens and
# ranks on. With fewer tokens, two collectives take longer than one. Two ranks would receive the same bytes either way.
# With at least T (T - 1) tokens, every rank has some.
LEAST_SPREAD, FEWEST_SPREADING = 1024, 3


def agent_hosts_store() -> bool:
    """True if torchrun's agent hosts the job's key-value store; otherwise rank 0 hosts it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(placement: Placement) -> dist.Store:
    """Connect to the job's key-value store, which torchrun's agent hosts, or else rank 0.

    The agent's store outlives a failed attempt (torchrun --max-restarts), so each attempt has its own key prefix.

    Raises:
        UserError: the address is missing or wrong, or rank 0 cannot be reached.
        RankFailureError: torchrun's store is gone.
    """
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UserError(
            f"WORLD_SIZE is {placement.world_size}, but MASTER_ADDR and MASTER_PORT are missing; use torchrun"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise UserError(f"MASTER_PORT: expected a number from 1 to 65535, found {port!r:.80}")
    where = f"{placement.world_size - 1} other rank(s) at {address}:{port}"
    notice = threading.Timer(NOTICE_S, lambda: print(f"alspec: waiting for {where}", file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()
    has_agent = agent_hosts_store()
    try:
        is_host = placement.rank == 0 and not has_agent
        store = dist.TCPStore(
            address,
            int(port),
            world_size=placement.world_size,
            is_master=is_host,
            timeout=CONNECT_TIMEOUT if has_agent else TIMEOUT,
            multi_tenant=True,
        )
        store.set_timeout(TIMEOUT)
        if is_host and not _hosted:
            _hosted.append(store)
        return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    except dist.DistError as error:
        if has_agent:
            raise RankFailureError(STORE_LOST) from None
        why = str(error).splitlines()[0]
        raise UserError(f"cannot connect to {where}: {why}; start them all, or choose another MASTER_PORT") from None
    finally:
        notice.cancel()


class PairMessage:
    """A message from the paired rank that is being received."""

    def __init__(self, buffer: Tensor, work: dist.Work | None) -> None:
        self._buffer = buffer
        self._work = work

    def wait(self) -> Tensor:
        """Wait for the message and return it. On GPUs the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        return self._buffer


class Transport:
    """The process groups of one rank: its tensor-parallel group, its pair, and the whole job.

    With one rank nothing is initialised and every collective is the identity.

    Args:
        placement: this rank's.
        device: this rank's.
        backend: `nccl` or `gloo`.
        store: the job's store; None with one rank.
    Raises:
        CannotConnectError: the ranks cannot reach each other.
    """

    def __init__(self, placement: Placement, device: torch.device, backend: str, store: dist.Store | None) -> None:
        self.placement = placement
        self.device = device
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._pair_link: PairLink | None = None
        if placement.world_size == 1:
            return
        assert store is not None
        # Keep NVLink multicast off: a program that crashes while using it can disable the GPUs of the host.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # The messages of a pair must keep their order; suppress NCCL's warning that they do.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        try:
            self._connect(backend, store)
        except BaseException as error:
            self.close()  # another transport may follow
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise CannotConnectError(
                f"transport: {backend} cannot connect the ranks: {one_line(error)}; check that host names resolve; "
                f"{backend.upper()}_SOCKET_IFNAME selects the network interface"
            ) from error

    def _connect(self, backend: str, store: dist.Store) -> None:
        placement, device = self.placement, self.device
        dist.init_process_group(
            backend,
            # A separate prefix: keys of a failed attempt to connect still hold addresses.
            store=dist.PrefixStore(f"groups-{next(_GROUPS)}", store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        tp_size = placement.tp_size
        # Every rank takes part in creating every group, in the same order.
        tp_groups = [
            dist.new_group(list(range(group * tp_size, (group + 1) * tp_size))) for group in range(placement.num_groups)
        ]
        self._tp_group = tp_groups[placement.group]
        if placement.num_groups == 2:
            pairs = [dist.new_group([tp_rank, tp_rank + tp_size]) for tp_rank in range(tp_size)]
            self._pair = pairs[placement.tp_rank]
        self._warm_up()

    def _warm_up(self) -> None:
        """Open every connection now, outside of any measurement and while both sides of a pair are present."""
        token = torch.ones(1, device=self.device)
        self.all_gather_world(self.all_reduce(token))
        if self.placement.num_groups == 2:
            for sender in (0, 1):
                if self.placement.group == sender:
                    self.send(token)
                else:
                    self.receive(token.shape).wait()
            self.flush()
            self.gather_pair(token)
        self.synchronize()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the tensor-parallel group, in place; bit-identical on every rank of the group."""
        if self.placement.tp_size > 1:
            dist.all_reduce(tensor, group=self._tp_group)
        return tensor

    def gather_partials(self, partial: Tensor) -> Tensor:
        """Return tensors whose sum over the first dimension is the sum over the tensor-parallel group.

        Up to four ranks gather 16-bit values. A rank then receives 2 (T - 1) bytes per value, an fp32 all-reduce takes
        8 (T - 1) / T: 2 against 4 bytes for two ranks, 6 either way for four. A 16-bit all-reduce would round the sums.

        Args:
            partial: [...] on each rank.
        Returns:
            [P, ...], the same on every rank; P = T in `partial`'s dtype if gathered, else P = 1 in fp32.
        """
        tp_size = self.placement.tp_size
        if tp_size == 1 or (partial.itemsize == 2 and tp_size <= MAX_GATHERED):
            return self.all_gather_group(partial)
        return self.all_reduce(partial.float())[None]

    def own_tokens(self, num_tokens: int) -> range:
        """Tokens whose residual stream this rank keeps (sequence parallelism): an equal part, or all of few."""
        placement = self.placement
        if placement.tp_size < FEWEST_SPREADING or num_tokens < LEAST_SPREAD:
            return range(num_tokens)
        return range(num_tokens)[self._share_of(placement.tp_rank, num_tokens)]

    def _share_of(self, tp_rank: int, num_tokens: int) -> slice:
        size = -(-num_tokens // self.placement.tp_size)
        return slice(tp_rank * size, (tp_rank + 1) * size)

    def scatter_partials(self, partial: Tensor) -> Tensor:
        """Send each rank the partial sums of its `own_tokens`; only if tokens are spread over the ranks.

        Together with `gather_tokens` in 16 bits, a rank receives 4 (T - 1) / T bytes per value, half of an fp32
        all-reduce.

        Args:
            partial: [n, hidden] on each rank.
        Returns:
            [T, m, hidden] in rank order, for the m tokens of this rank; to be summed over T.
        """
        tp_size = self.placement.tp_size
        sizes = [len(range(len(partial))[self._share_of(tp_rank, len(partial))]) for tp_rank in range(tp_size)]
        own = sizes[self.placement.tp_rank]
        out = partial.new_empty(tp_size, own, *partial.shape[1:])
        dist.all_to_all_single(out.flatten(0, 1), partial, [own] * tp_size, sizes, group=self._tp_group)
        return out

    def gather_tokens(self, own: Tensor, num_tokens: int) -> Tensor:
        """[m, hidden] for each rank's `own_tokens` -> [n, hidden]; only if tokens are spread over the ranks."""
        size = -(-num_tokens // self.placement.tp_size)
        if len(own) < size:  # the last ranks have fewer tokens
            own = torch.nn.functional.pad(own, (0, 0, 0, size - len(own)))
        return self.all_gather_group(own).flatten(0, 1)[:num_tokens]

    def all_gather_group(self, tensor: Tensor) -> Tensor:
        """[...] on each rank -> [T, ...] in rank order, over the tensor-parallel group."""
        if self.placement.tp_size == 1:
            return tensor[None]
        out = tensor.new_empty(self.placement.tp_size, *tensor.shape)
        _gather(out.view(-1), tensor.contiguous().view(-1), group=self._tp_group)
        return out

    def all_gather_world(self, tensor: Tensor) -> Tensor:
        """[...] on each rank -> [world, ...] in rank order, over all ranks of the job."""
        if self.placement.world_size == 1:
            return tensor[None]
        out = tensor.new_empty(self.placement.world_size, *tensor.shape)
        dist.all_gather(list(out.unbind()), tensor.contiguous())
        return out

    def all_gather_peers(self, tensor: Tensor) -> Tensor:
        """[...] on each rank -> [peers, ...] in rank order, over the ranks of `Placement.peers`."""
        return self.all_gather_group(tensor) if self.placement.is_linked else self.all_gather_world(tensor)

    @property
    def peer_group(self) -> dist.ProcessGroup:
        """The process group of `Placement.peers`."""
        group = self._tp_group if self.placement.is_linked else dist.group.WORLD
        assert group is not None
        return group

    def gather_pair(self, tensor: Tensor) -> Tensor:
        """[...] on each rank of a pair -> [2, ...] in group order."""
        out = tensor.new_empty(2, *tensor.shape)
        _gather(out.view(-1), tensor.contiguous().view(-1), group=self._pair)
        return out

    def pair_link(self, placement: Placement | None = None) -> PairLink:
        """The connected link to the paired rank for fused steps; every rank of the job calls it.

        Args:
            placement: in two groups; by default that of the job.
        """
        if self._pair_link is None:
            placement = placement or self.placement
            tp_size = placement.tp_size
            # Every rank takes part in creating every group, in the same order.
            links = [[self._small_group([tp_rank, tp_rank + tp_size]) for _ in range(2)] for tp_rank in range(tp_size)]
            from_first, from_second = links[placement.tp_rank]
            out, back = (from_first, from_second) if placement.group == 0 else (from_second, from_first)
            self._pair_link = PairLink(out, back, placement.rank, placement.paired_rank, self.device)
            self._pair_link.ping(torch.zeros(1, dtype=torch.int64, device=self.device), placement.group == 0)
            self.synchronize()
        return self._pair_link

    def message_us(self, message: Tensor, placement: Placement | None = None) -> float:
        """Send a message to the paired rank and back several times; every rank of the job calls it.

        Args:
            message: written on the rank of the second group.  placement: as for `pair_link`.
        Returns:
            The shortest time of one way on the slowest rank, microseconds.
        """
        link, is_first = self.pair_link(placement), (placement or self.placement).group == 0
        return self._shortest_us(lambda: link.ping(message, is_first)) / 2

    def all_reduce_us(self, num_values: int) -> float:
        """Return the shortest time of an all-reduce of fp32 values, on the slowest rank, in microseconds.

        Every rank of the job calls it.
        """
        values = torch.zeros(num_values, device=self.device)
        return self._shortest_us(lambda: self.all_reduce(values))

    def _shortest_us(self, exchange: Callable[[], object]) -> float:
        """Return the shortest of several times that an exchange takes, on the slowest rank, in microseconds."""
        times: list[float] = []
        for _ in range(PINGS):
            self.barrier()
            started = time.perf_counter()
            exchange()
            self.synchronize()
            times.append((time.perf_counter() - started) * 1e6)
        own = torch.tensor([min(times)], dtype=torch.float64, device=self.device)
        return float(self.all_gather_world(own).max())

    def _small_group(self, ranks: list[int]) -> dist.ProcessGroup:
        """A process group whose collectives take one thread block, and so one SM."""
        options = None
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = 1
            # No thread block clusters: a cluster starts only if one GPC has free SMs for all of its blocks.
            options.config.cga_cluster_size = 0
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=LINK_TIMEOUT, pg_options=options)
        return group

    def first_reason(self, reason: str) -> str:
        """Exchange reasons: return that of the first rank with a non-empty one, else ''. All ranks call it."""
        own = torch.frombuffer(bytearray(reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")), dtype=torch.uint8)
        rows = self.all_gather_world(own.to(self.device)).tolist()
        reasons = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
        return next((f"rank {rank}: {text}" if rank else text for rank, text in enumerate(reasons) if text), "")

    def send(self, tensor: Tensor) -> None:
        """Send to the paired rank without waiting; call `flush` before `tensor` is written again."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.placement.paired_rank, group=self._pair)
        self._sent.append((work, tensor))

    def receive(self, shape: torch.Size | tuple[int, ...]) -> PairMessage:
        """Start to receive the paired rank's next message, fp32 of this shape."""
        buffer = torch.empty(shape, device=self.device)
        return PairMessage(buffer, dist.irecv(buffer, self.placement.paired_rank, group=self._pair))

    def flush(self) -> None:
        """Wait until all messages of `send` have left their buffers."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()

    def synchronize(self) -> None:
        """Make the host wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all ranks of the job, with idle devices."""
        self.synchronize()
        self.all_gather_world(torch.zeros(1, device=self.device))
        self.synchronize()

    def close(self) -> None:
        """Destroy the process groups; call `barrier` before."""
        if self.placement.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
