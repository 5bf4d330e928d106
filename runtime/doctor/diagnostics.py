"""Installation checks of everything the runtime builds on: each function is one check (see checkup.py)."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

from alspec.errors import UserError
from alspec.kernels.attention.oracles import gate_up_silu_ref
from alspec.kernels.bench.probes import exchange_packets, increment, send_word
from alspec.kernels.linear.decode_weight import WeightFormat, pack_weight
from alspec.kernels.linear.projections import gate_up_silu
from alspec.models.checkpoint.checkpoint import Checkpoint, verify_checksums
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.distributed.host_memory import HostMemoryError
from alspec.runtime.distributed.peer_memory import allocate_packets
from alspec.runtime.distributed.placement import PeerMemory, gpus_without_access, why_no_peers
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.doctor.checkup import CHECKS, Scope, check, skip
from alspec.runtime.engine.memory import GIB
from alspec.runtime.profiling.predicted_costs import LINK_BYTES
from alspec.runtime.profiling.provenance import versions as installed_versions
from alspec.runtime.profiling.stats import stream_bandwidth

__all__ = ["CHECKS", "packed_product"]

MINIMUM = {"python": "3.11", "torch": "2.11", "triton": "3.6"}
GPU_FILE = "/dev/nvidia0"  # exists if the driver sees a GPU, even if torch does not
SIDE = 256  # inputs, and rows of gate and of up, of a quantised product
PRODUCT_ERROR = 0.01  # relative; its result is rounded to bf16
SIZE = 5000  # elements of a probe: several blocks, the last one partly filled
LAUNCHES = 32
COPY_BYTES = 2**28
# Between PCIe x16 of generation 5 (64 GB/s one way) and the NVLink of data-centre GPUs (300 GB/s and more).
NVLINK_GB_PER_S = 100
REDUCE_WORDS = 2048  # 8 KB, the size of an all-reduce in decode
REDUCES = 16
ROUNDS = 64
MESSAGE_BYTES = (LINK_BYTES, 16 * 1024 * 1024)
WORD = 0x5EED
KERNEL_DEADLINE_NS = 2_000_000_000


def _span(values: list[float], unit: str) -> str:
    """`4.2 TB/s`, or `4.1 to 4.2 TB/s`."""
    texts = [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values))]
    return f"{' to '.join(dict.fromkeys(texts))} {unit}"


def _expect(what: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        raise RuntimeError(f"{what}: {wrong} of {found.numel()} values are wrong")


def _best_us(run: Callable[[], object]) -> float:
    """Microseconds of the fastest of five runs on the current GPU."""
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(min(times))


@contextmanager
def _captured(work: Callable[[], object]) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture `work` as a graph on the current GPU; it must have run once before."""
    graph = torch.cuda.CUDAGraph()
    try:
        # A separate stream: PyTorch's default capture stream belongs to the GPU that captured first.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            work()
        yield graph
    finally:
        torch.cuda.synchronize()
        graph.reset()


@check("versions", "install the versions that pyproject.toml asks for")
def versions(scope: Scope) -> str:
    """Python, torch and Triton are new enough, and the driver runs the CUDA version that torch was built for."""
    found = installed_versions()
    required = {name: minimum for name, minimum in MINIMUM.items() if name != "triton" or sys.platform == "linux"}
    old = [name for name, minimum in required.items() if _numbers(found[name]) < _numbers(minimum)]
    if old:
        text = ", ".join(f"{name} {found[name]} (needs {MINIMUM[name]})" for name in old)
        raise UserError(f"{text}; pip install --upgrade 'torch>={MINIMUM['torch']}' brings its Triton along")
    text = ", ".join(f"{name} {found[name]}" for name in MINIMUM)
    driver = _driver_cuda()
    if torch.version.cuda is None or driver is None:
        return f"{text}, {'no NVIDIA driver' if driver is None else f'driver for CUDA {driver[0]}.{driver[1]}'}"
    # Within one major version, an older driver runs programs of a newer toolkit.
    if driver[0] < _numbers(torch.version.cuda)[0]:
        raise UserError(
            f"torch is built for CUDA {torch.version.cuda}, the driver runs up to {driver[0]}.{driver[1]}; "
            f"update the NVIDIA driver, or install a torch for CUDA {driver[0]}"
        )
    return f"{text}, CUDA {torch.version.cuda}, driver for CUDA {driver[0]}.{driver[1]}"


def _numbers(version: str) -> list[int]:
    """Major and minor version; empty if nothing is installed."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _driver_cuda() -> tuple[int, int] | None:
    """Newest CUDA version that the installed driver supports; None without a driver."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


@check("GPUs", "see nvidia-smi; another process may hold the GPU")
def gpus(scope: Scope) -> str:
    """Each rank has a GPU that is new enough; reports its free memory and how much others hold."""
    count, ranks = scope.num_gpus, scope.placement.local_world_size
    wanted = scope.transport_name != "gloo" and "CUDA_VISIBLE_DEVICES" not in os.environ
    if wanted and not count and Path(GPU_FILE).exists():
        build = f"torch {torch.__version__}" + ("" if torch.version.cuda else " is built for CPUs and")
        raise UserError(f"{build} finds no GPU, but {GPU_FILE} is there; install a torch built for the driver's CUDA")
    if 0 < count < ranks and scope.transport_name != "gloo":
        raise UserError(
            f"{count} GPU(s) for {ranks} ranks; start with --nproc-per-node {count}, or use --transport gloo (CPU)"
        )
    rows = scope.each_gpu(_describe_gpu)
    names = sorted({(name, major, minor) for name, major, minor, *_ in rows})
    for name, major, minor in names:
        if major < 8:
            raise UserError(f"{name} has compute capability {major}.{minor}; 8.0 (Ampere) or later is needed")
    kinds = " and ".join(f"{name} (compute capability {major}.{minor})" for name, major, minor in names)
    free, held = [row[3] for row in rows], [row[4] for row in rows]
    where = f"{len(rows)} of {count}" if len(rows) < count else str(count)
    return f"{where} x {kinds}, {_span(free, 'GiB')} free, {_span(held, 'GiB')} held by contexts and other processes"


def _describe_gpu(device: torch.device) -> tuple[str, int, int, float, float]:
    """(name, capability major, minor, GiB free, GiB held by anything but this process's tensors)."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    return properties.name, properties.major, properties.minor, free / GIB, held / GIB


@check("links", "see nvidia-smi topo -m; set NCCL_P2P_DISABLE=1 if copies between GPUs go wrong")
def links(scope: Scope) -> str:
    """Peer access between the GPUs of this host, and the rate of copies from GPU 0 to the others."""
    scope.need_gpu()
    if scope.num_gpus == 1:
        skip("one GPU here")
    if scope.placement.local_rank != 0:
        skip("local rank 0 checks the links")
    without = gpus_without_access(range(scope.num_gpus))
    access = "no peer access " + " ".join(f"{a}-{b}" for a, b in without) if without else "peer access everywhere"
    rates = []
    with torch.cuda.device(0):
        source = torch.arange(COPY_BYTES // 4, dtype=torch.int32, device="cuda:0")
        for peer in range(1, scope.num_gpus):
            target = torch.zeros_like(source, device=f"cuda:{peer}")
            copy = functools.partial(target.copy_, source)
            copy()
            rates.append(COPY_BYTES / _best_us(copy) / 1e3)
            _expect(f"copy to GPU {peer} and back", target.to(source.device), source)
    kind = "NVLink" if min(rates) >= NVLINK_GB_PER_S else "PCIe" if max(rates) < NVLINK_GB_PER_S else "NVLink and PCIe"
    return f"{scope.num_gpus} GPUs, {access}, copies from GPU 0 at {_span(rates, 'GB/s')}, the rate of {kind}"


@check("memory rate", "another process may use the GPU; see nvidia-smi")
def memory_rate(scope: Scope) -> str:
    """Bytes per second that a copy within a device's memory reads and writes: the limit of decode."""
    rates = scope.each_gpu(stream_bandwidth) if scope.devices else [stream_bandwidth(torch.device("cpu"))]
    torch.cuda.empty_cache()
    return f"{_span([rate / 1e9 for rate in rates], 'GB/s')} of a {'GPU' if scope.devices else 'CPU'}'s memory"


@check("Triton", "Triton needs a C compiler (gcc, or CC set) and a writable TRITON_CACHE_DIR or ~/.triton")
def triton_kernel(scope: Scope) -> str:
    """A Triton kernel compiles, runs and gives the right result."""

    def probe(device: torch.device) -> float:
        x = torch.arange(SIZE, dtype=torch.float32, device=device)
        out = torch.full_like(x, torch.nan)
        started = time.perf_counter()
        increment(x, out)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        _expect("kernel", out, x + 1)
        return seconds

    return f"a kernel equals torch, ready after {_span(scope.each_gpu(probe), 's')}"


@check(
    "quantised weights",
    "update Triton; without --weights, and with checkpoints that are not quantised, it is not needed",
)
def quantised_weights(scope: Scope) -> str:
    """Products of FP8 and of INT4 weights, which GPUs keep packed, equal those of the dequantised weights."""

    def probe(device: torch.device) -> float:
        started = time.perf_counter()
        for weight_format in ("fp8", "int4"):
            found, expected = packed_product(weight_format, device)
            error = float((found - expected).norm() / expected.norm())
            if not error < PRODUCT_ERROR:
                raise RuntimeError(f"a product of {weight_format} weights is wrong by {error:.1%}")
        return time.perf_counter() - started

    return (
        f"products of FP8 and INT4 equal those of dequantised weights, ready after {_span(scope.each_gpu(probe), 's')}"
    )


def packed_product(weight_format: WeightFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """`gate_up_silu` of one row with packed random weights, and its oracle with their values: two tensors [1, SIDE]."""
    generator = torch.Generator().manual_seed(0)
    codes, group = torch.randint(16, (2 * SIDE, SIDE), generator=generator), SIDE if weight_format == "fp8" else 32
    stored = (codes - 8.0).to(torch.float8_e4m3fn) if weight_format == "fp8" else codes.byte()
    scales = torch.rand(2 * SIDE, SIDE // group, generator=generator).bfloat16() / SIDE
    weight = pack_weight(stored.to(device), scales.to(device), None, weight_format, group, SIDE)
    x = torch.randn(1, SIDE, generator=generator).bfloat16().to(device)
    squares = x.float().square().sum(1, keepdim=True)
    out = torch.empty(1, SIDE, dtype=torch.bfloat16, device=device)
    gate_up_silu(x, squares, weight, out, 0.0)
    return out.double(), gate_up_silu_ref(x, squares, weight.dequantise(torch.float32), 0.0)


@check("CUDA graph", "unset CUDA_LAUNCH_BLOCKING; generate works with --cuda-graph off")
def cuda_graph(scope: Scope) -> str:
    """A captured Triton kernel and torch operation give the right result when replayed on new input."""

    def probe(device: torch.device) -> float:
        x = torch.arange(SIZE, dtype=torch.float32, device=device)
        out = torch.empty_like(x)

        def work() -> None:
            increment(x, out)
            out.mul_(2)

        work()
        with _captured(work) as graph:
            x.add_(5)
            out.fill_(torch.nan)
            graph.replay()
            _expect("replay", out, 2 * (x + 1))
            return _best_us(graph.replay)

    return f"capture and replay equal torch, {_span(scope.each_gpu(probe), 'us')} for 2 kernels"


@check("dependent launch", "update the NVIDIA driver and Triton")
def dependent_launch(scope: Scope) -> str:
    """Programmatic dependent launch in a graph: kernels may start early, and the result is still right."""

    def chain(x: Tensor, pdl: bool) -> None:
        for _ in range(LAUNCHES):
            increment(x, x, pdl)

    def probe(device: torch.device) -> list[float]:
        if torch.cuda.get_device_capability(device) < (9, 0):
            skip("compute capability below 9.0, kernels start one after another")
        times = []
        for pdl in (True, False):
            x = torch.zeros(SIZE, device=device)
            work = functools.partial(chain, x, pdl)
            work()
            with _captured(work) as graph:
                times.append(_best_us(graph.replay) / LAUNCHES)
                _expect("chain of launches", x, torch.full_like(x, 6 * LAUNCHES))
        return times

    times = scope.each_gpu(probe)
    with_pdl, without = (_span([pair[index] for pair in times], "us") for index in (0, 1))
    return f"{with_pdl} a kernel in a graph, {without} without"


@check("pinned memory", "raise the limit of locked memory (ulimit -l); in a container, allow IPC_LOCK")
def pinned_memory(scope: Scope) -> str:
    """The host reads what a running kernel wrote, and the kernel reads the reply; tokens reach the host this way."""

    def probe(device: torch.device) -> float:
        mail = torch.zeros(3, dtype=torch.int32, pin_memory=True)
        mail[1] = WORD
        send_word(mail, WORD, KERNEL_DEADLINE_NS)  # the reply is there already: this launch only compiles the kernel
        torch.cuda.synchronize()
        mail.zero_()
        started = time.perf_counter()
        send_word(mail, WORD, KERNEL_DEADLINE_NS)
        while int(mail[0]) != WORD and time.perf_counter() - started < 2 * KERNEL_DEADLINE_NS / 1e9:
            pass
        seconds = time.perf_counter() - started
        mail[1] = WORD
        torch.cuda.synchronize()
        if mail.tolist() != [WORD, WORD, WORD]:
            raise RuntimeError("host and running kernel do not see each other's writes in pinned memory")
        return seconds * 1e6

    return f"the host reads a running kernel's write {_span(scope.each_gpu(probe), 'us')} after launch; the reply works"


@check("demo checkpoint", "install alspec again, with Git LFS content if it comes from git")
def demo_checkpoint(scope: Scope) -> str:
    """The files of the bundled model are complete."""
    verify_checksums(DEMO_CHECKPOINT)
    checkpoint = Checkpoint.open(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
    return f"{len(checkpoint.entries)} tensors, {checkpoint.total_bytes / 1e6:.1f} MB, checksums match"


@check("NCCL", "set NCCL_DEBUG=INFO to see more; a container needs --ipc=host or a larger /dev/shm")
def nccl(scope: Scope) -> str:
    """All-reduces of all ranks are right, both launched one by one and replayed from a graph."""
    transport = scope.connect("nccl")
    rank, world_size = scope.placement.rank, scope.placement.world_size
    x = torch.full((REDUCE_WORDS,), rank + 1.0, device=transport.device)
    total = torch.full_like(x, world_size * (world_size + 1) / 2)
    out, idle = torch.empty_like(x), torch.zeros_like(x)

    def work() -> None:
        transport.all_reduce(out.copy_(x))
        for _ in range(REDUCES - 1):
            transport.all_reduce(idle)

    eager_us = _best_us(work) / REDUCES
    eager = out.clone()
    with _captured(work) as graph:
        x.mul_(2)
        graph_us = _best_us(graph.replay) / REDUCES
        replayed = out.clone()
    # Raise only now, when no rank is inside a collective any more.
    _expect("all-reduce", eager, total)
    _expect("replayed all-reduce", replayed, 2 * total)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    times = f"{eager_us:.1f} us, {graph_us:.1f} us in a graph"
    return f"{version}, all-reduce of 8 KB over {world_size} ranks right, {times}, NVLink multicast off"


@check("symmetric memory", "see the line on links; --transport host and nccl do not need it")
def symmetric_memory(scope: Scope) -> str:
    """A kernel of each rank writes to the memory of all others and reads what they wrote to its own."""
    transport = _transport_of_one_host(scope)
    reason = why_no_peers(scope.placement.peer_gpus)
    if reason:
        skip(reason)
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, transport.device.index):
        skip("this torch uses NVLink multicast in spite of TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    return f"{_exchange_result(transport, 'symm')}, NVLink multicast off"


@check("host memory", "--transport nccl does not need it; a container may prevent processes from sharing memory")
def host_memory(scope: Scope) -> str:
    """A kernel of each rank writes to host memory that every rank has pinned, and reads what the others wrote."""
    transport = _transport_of_one_host(scope)
    try:
        return _exchange_result(transport, "host")
    except HostMemoryError as error:
        if why_no_peers(scope.placement.peer_gpus):
            raise
        skip(f"{error}; not needed, GPUs reach each other")


def _transport_of_one_host(scope: Scope) -> Transport:
    """Connect the GPUs of one host; skip the check if there is one rank, no GPU, or more than one host."""
    scope.need_gpu()
    scope.need_ranks()
    if scope.transport is None or scope.transport.device.type != "cuda":
        skip("NCCL does not run")
    if scope.placement.local_world_size != scope.placement.world_size:
        skip("ranks on several hosts; start it on each host alone")
    return scope.transport


def _exchange_result(transport: Transport, peer_memory: PeerMemory) -> str:
    """Let the kernels of all ranks exchange packets `ROUNDS` times; returns a line with the time of one exchange."""
    placement, device = transport.placement, transport.device
    world_size = placement.world_size
    (memories,) = allocate_packets(
        peer_memory, [-(-world_size // 2)], [range(world_size)], transport
    )  # two int32 flags fit in one packet
    addresses = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    result = torch.zeros(2, dtype=torch.int64, device=device)
    for rounds in (0, ROUNDS):  # 0 rounds: compile before the ranks wait for each other
        transport.barrier()
        exchange_packets(addresses, placement.rank, world_size, rounds, result, KERNEL_DEADLINE_NS)
    done, elapsed_ns = result.tolist()
    flags = memories[placement.rank].view(torch.int32)[:world_size].tolist()
    transport.barrier()  # no rank may free memory that another still writes
    if done != ROUNDS:
        raise RuntimeError(f"{done} of {ROUNDS} exchanges within {KERNEL_DEADLINE_NS / 1e9:g} s, flags seen: {flags}")
    us = elapsed_ns / 1e3 / (ROUNDS - 1)
    return f"packets to and from {world_size - 1} peer(s) in {us:.1f} us"


@check("Gloo", "check that host names resolve; GLOO_SOCKET_IFNAME selects the network interface")
def gloo(scope: Scope) -> str:
    """All-reduces between processes on the CPU are right."""
    transport = scope.connect("gloo")
    world_size = scope.placement.world_size
    times = []
    for _ in range(20):
        x = torch.full((REDUCE_WORDS,), scope.placement.rank + 1.0)
        started = time.perf_counter()
        transport.all_reduce(x)
        times.append((time.perf_counter() - started) * 1e6)
    _expect("all-reduce", x, torch.full_like(x, world_size * (world_size + 1) / 2))
    return f"all-reduce of 8 KB over {world_size} ranks right, {min(times):.0f} us"


@check("pair link", "a pair over a network (--pair-transport nccl, several hosts) sends a message in each layer")
def pair_link(scope: Scope) -> str:
    """A message to the rank of the other half of the ranks, and back, arrives as it was sent."""
    scope.need_ranks()
    transport = scope.transport
    if transport is None:
        skip("no ranks are connected")
    if scope.placement.world_size % 2:
        skip("an odd number of ranks")
    placement = replace(scope.placement, num_groups=2)
    times = []
    for num_bytes in MESSAGE_BYTES:
        expected = torch.arange(num_bytes // 8, device=transport.device)
        message = expected * int(placement.group == 0)
        times.append(transport.message_us(message, placement))
        _expect("message", message, expected)
    rate = (MESSAGE_BYTES[1] - MESSAGE_BYTES[0]) / max(times[1] - times[0], 1e-3) / 1e3
    return f"{MESSAGE_BYTES[0] // 1024} KB to rank {placement.paired_rank} in {times[0]:.0f} us, {rate:.2g} GB/s"
