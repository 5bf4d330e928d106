"""Measure decode attention over a bf16 cache on random shapes, against torch SDPA and FlashInfer.

Half of the shapes are ragged, which SDPA has no form for. Its row is the quicker one of two forms:

- one call for each request, one after the other in the graph, each on a view of the cache;
- one call for all requests, padded to the longest, with a mask that was made before. Only PyTorch's cuDNN kernel and
  its memory-efficient kernel take a mask. Where neither supports the shape, this form is left out: PyTorch's plain
  attention would copy K and V for every query head.

FlashInfer has a row where it is installed and supports the shape: `single_decode_with_kv_cache` for one request,
otherwise `BatchDecodeWithPagedKVCacheWrapper` with pages in order, planned before the graph. It uses tensor cores from
4 query heads for each KV head.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from alspec.errors import BadNumbersError
from alspec.kernels.common.jit_launch import compiling
from alspec.launch.bench.bench_common import times_us
from alspec.launch.bench.decode_case import Case, Run, check, flashinfer, lean, sdpa
from alspec.launch.bench.shape_ratios import OURS, SDPA, distribution, lengths_text, ratios
from alspec.launch.terminal.flags import notify

__all__ = ["NUM_CASES", "Shape", "draw_shapes", "measure_shape", "measure_shapes", "shapes_table"]

NUM_CASES = 70
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
MAX_HEADS = 16  # KV heads, and query heads for each of them
MAX_BATCH = 32
MIN_TOKENS, MAX_TOKENS = 128, 256 * 1024
# K and V of all copies take at least COLD_BYTES, unless that needs more than MAX_COPIES, and at most MAX_BYTES.
COLD_BYTES, MAX_BYTES = 512 * 2**20, 8 * 10**9
MIN_COPIES, MAX_COPIES = 2, 128
REPLAYS = 11  # of a graph that runs every copy once
WORST = 10  # shapes in the table

FLASHINFER = "flashinfer"
FLASHINFER_DIMS = (64, 128, 256)  # others are not refused, but read wrong memory
PAGE_SIZE = 16
WORKSPACE_BYTES = 256 * 2**20
FUSED_WITH_MASK = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape of one case."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    seq_lens: tuple[int, ...]

    @property
    def copy_bytes(self) -> int:
        """Bytes of K and V of one copy, padded to the longest request."""
        return 4 * len(self.seq_lens) * self.num_kv_heads * max(self.seq_lens) * self.head_dim

    @property
    def copies(self) -> int:
        """Number of copies of the inputs that rotate."""
        return max(MIN_COPIES, min(MAX_COPIES, math.ceil(COLD_BYTES / self.copy_bytes)))

    @property
    def case(self) -> dict[str, Any]:
        """The `case` of its rows."""
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "batch": len(self.seq_lens),
            "seq_lens": list(self.seq_lens),
        }


def draw_shapes(count: int, seed: int) -> list[Shape]:
    """Draw shapes; the first ones of a seed do not depend on `count`. Every second one is ragged.

    Query heads for each KV head, KV heads and head_dim are uniform. Requests and lengths are log-uniform. Lengths are
    odd. The longest length is limited so that MIN_COPIES fit into MAX_BYTES.
    """
    generator = random.Random(seed)
    return [_draw_shape(generator, is_ragged=index % 2 == 1) for index in range(count)]


def _draw_shape(generator: random.Random, is_ragged: bool) -> Shape:
    group, num_kv_heads = generator.randint(1, MAX_HEADS), generator.randint(1, MAX_HEADS)
    head_dim = generator.choice(HEAD_DIMS)
    batch = min(MAX_BATCH, int(_log_uniform(generator, 2 if is_ragged else 1, MAX_BATCH + 1)))
    longest = min(MAX_TOKENS, MAX_BYTES // MIN_COPIES // (4 * batch * num_kv_heads * head_dim))

    def length() -> int:
        return max(MIN_TOKENS, int(_log_uniform(generator, MIN_TOKENS, longest)) - 1) | 1

    seq_lens = [length() for _ in range(batch)] if is_ragged else [length()] * batch
    return Shape(group * num_kv_heads, num_kv_heads, head_dim, tuple(seq_lens))


def _log_uniform(generator: random.Random, low: int, high: int) -> float:
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def measure_shapes(num_cases: int, seed: int, stream: float, found: Callable[[Row], None]) -> None:
    """Draw shapes, then check and time them one after the other.

    Args:
        num_cases, seed: as for `draw_shapes`.
        stream: bytes per second of a copy, for the rows.
        found: called with each row, without provenance, as soon as its shape is measured.
    Raises:
        BadNumbersError: our result is wrong.
    """
    shapes = draw_shapes(num_cases, seed)
    torch.manual_seed(seed)
    _compile(shapes)
    for shape in shapes:
        for row in measure_shape(shape, stream):
            found(row)


def _compile(shapes: list[Shape]) -> None:
    """Compile our kernels for all shapes side by side: one by one, this would take longer than the measurement."""
    # Nothing is launched, so all shapes may use the same memory, for K and for V.
    memory = torch.empty(max(shape.copy_bytes for shape in shapes) // 4, dtype=torch.bfloat16, device="cuda")
    with compiling():
        for shape in shapes:
            batch, longest = len(shape.seq_lens), max(shape.seq_lens)
            cache = memory[: shape.copy_bytes // 4].view(1, batch, shape.num_kv_heads, longest, shape.head_dim)
            q = memory.new_zeros(1, batch, shape.num_qo_heads, shape.head_dim)
            lean(Case(q, cache, cache, torch.tensor(shape.seq_lens, dtype=torch.int32, device="cuda")))(0)


def measure_shape(shape: Shape, stream: float, device: str = "cuda") -> list[Row]:
    """Check, then time all implementations of one shape; returns a row for each, ours first.

    Raises:
        BadNumbersError: our result is wrong. Others are left out if theirs is, with a notice.
    """
    case = Case.draw(list(shape.seq_lens), shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.copies, device)
    runs = [(OURS, lean(case))]
    check(case, runs[0][1])
    for impl, others in ((SDPA, _sdpa_runs(case)), (FLASHINFER, _flashinfer_runs(case))):
        for run in others:
            try:
                check(case, _joined(run))
            except BadNumbersError as error:
                notify([f"{impl} is left out for {shape.case}: {error}"])
                continue
            runs.append((impl, run))
    times = times_us([run for _, run in runs], shape.copies, REPLAYS, flush_l2=True)
    quickest: dict[str, dict[str, float]] = {}
    for (impl, _), us in zip(runs, times, strict=True):
        if impl not in quickest or us["p50"] < quickest[impl]["p50"]:
            quickest[impl] = us
    return [
        {
            "bench": "shapes",
            "impl": impl,
            "case": shape.case,
            "us": {name: round(value, 3) for name, value in us.items()},
            "bytes": case.num_bytes,
            "stream_tb_s": round(stream / 1e12, 3),
        }
        for impl, us in quickest.items()
    ]


def _joined(run: Run) -> Run:
    """The same run with its outputs in one tensor. This copy is not timed."""
    return lambda i: (torch.cat(run(i)),)


def _if_supported(prepare: Callable[[], Run | None]) -> list[Run]:
    """The prepared run, or nothing if there is none or if it cannot run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of every backend that does not support the shape
            run = prepare()
            if run is None:
                return []
            run(0)
    except (RuntimeError, ValueError):
        return []
    return [run]


def _sdpa_runs(case: Case) -> list[Run]:
    """The forms of SDPA: one if requests are equally long, otherwise up to two."""
    if bool((case.seq_lens == case.k.shape[3]).all()):
        return [sdpa(case)]
    return [_sdpa_per_request(case), *_if_supported(lambda: _sdpa_padded(case))]


def _sdpa_per_request(case: Case) -> Run:
    """SDPA on copy `i`, one call for each request; returns the output of each."""
    lengths = case.seq_lens.tolist()

    def run(i: int) -> tuple[Tensor, ...]:
        q, k, v = case.q[i][:, :, None], case.k[i], case.v[i]
        return tuple(
            F.scaled_dot_product_attention(
                q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length], enable_gqa=True
            )[:, :, 0]
            for b, length in enumerate(lengths)
        )

    return run


def _sdpa_padded(case: Case) -> Run:
    """SDPA on copy `i`, with all requests padded to the longest one; raises RuntimeError where no fused kernel can."""
    _, batch, hq, _ = case.q.shape
    later = torch.arange(case.k.shape[3], device=case.q.device) >= case.seq_lens[:, None]
    mask = torch.zeros(later.shape, dtype=case.q.dtype, device=case.q.device).masked_fill(later, -math.inf)
    mask = mask[:, None, None].expand(batch, hq, 1, -1).contiguous()

    def run(i: int) -> tuple[Tensor, ...]:
        with sdpa_kernel(FUSED_WITH_MASK):
            out = F.scaled_dot_product_attention(
                case.q[i][:, :, None], case.k[i], case.v[i], attn_mask=mask, enable_gqa=True
            )
        return (out[:, :, 0],)

    return run


def _flashinfer_runs(case: Case) -> list[Run]:
    """FlashInfer's decode; empty if it is not installed or does not support the shape."""
    _, batch, hq, dim = case.q.shape
    if dim not in FLASHINFER_DIMS or importlib.util.find_spec("flashinfer") is None:
        return []
    use_tensor_cores = hq // case.k.shape[2] >= 4
    if batch == 1:
        return _if_supported(lambda: flashinfer(case, use_tensor_cores))
    return _if_supported(lambda: _flashinfer_batch(case, use_tensor_cores))


def _flashinfer_batch(case: Case, use_tensor_cores: bool) -> Run:
    """FlashInfer's decode of several requests on copy `i`, planned here, on a copy of the cache in pages."""
    _, _, hq, dim = case.q.shape
    lengths = case.seq_lens.tolist()

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=case.q.device)

    first_pages = [0, *itertools.accumulate(math.ceil(length / PAGE_SIZE) for length in lengths)]
    last_page_lens = [(length - 1) % PAGE_SIZE + 1 for length in lengths]
    layout = [integers(first_pages), integers(list(range(first_pages[-1]))), integers(last_page_lens)]
    indptr, indices, last_page_len = (tensor.clone() for tensor in layout)
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=case.q.device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=use_tensor_cores,
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last_page_len,
    )
    dtype = case.q.dtype
    wrapper.plan(*layout, hq, case.k.shape[2], dim, PAGE_SIZE, q_data_type=dtype, kv_data_type=dtype)
    pages = [(_in_pages(k, lengths), _in_pages(v, lengths)) for k, v in zip(case.k, case.v, strict=True)]

    def run(i: int) -> tuple[Tensor, ...]:
        return (wrapper.run(case.q[i], pages[i]),)

    return run


def _in_pages(cache: Tensor, lengths: list[int]) -> Tensor:
    """[B, Hkv, N, D] -> [pages, Hkv, PAGE_SIZE, D]: the pages of each request, of which the last ends with zeros."""
    padded = [F.pad(x[:, :length], (0, 0, 0, -length % PAGE_SIZE)) for x, length in zip(cache, lengths, strict=True)]
    return torch.cat([x.unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1) for x in padded])


def shapes_table(rows: list[Row]) -> Table:
    """Two tables: the distribution of ratios, and the shapes with the lowest ratio of the best other one to ours."""
    found = ratios(rows)
    shares = Table(title=f"time / ours, {len(found)} random shapes")
    shares.add_column("")
    for name, values in (("SDPA", [x.sdpa for x in found]), ("best other", [x.best for x in found])):
        cells = distribution(values)
        if not shares.row_count:
            for heading in cells:
                shares.add_column(heading, justify="right")
        shares.add_row(name, *cells.values())
    worst = Table(title="worst shapes")
    for heading in ("heads", "head_dim", "batch", "tokens", "K and V, MB", "ours, us", "SDPA", "best other"):
        worst.add_column(heading, justify="right")
    for x in sorted(found, key=lambda x: x.best)[:WORST]:
        worst.add_row(
            f"{x.case['num_qo_heads']}/{x.case['num_kv_heads']}",
            str(x.case["head_dim"]),
            str(x.case["batch"]),
            lengths_text(x.case["seq_lens"]),
            f"{x.num_bytes / 1e6:.1f}",
            f"{x.us:.1f}",
            f"{x.sdpa:.2f}x",
            f"{x.best:.2f}x",
        )
    both = Table.grid()
    both.add_row(shares)
    both.add_row(worst)
    return both
