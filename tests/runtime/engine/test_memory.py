"""The memory plan against real tensors, and errors if it does not fit."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from alspec.config import ChoiceConfig
from alspec.errors import DoesNotFitError
from alspec.kernels.attention.dispatch import DecodeAttention
from alspec.kernels.attention.torch_attention import prefill_attention
from alspec.models.llama import Llama, LlamaWeights, Shard, random_weights
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import weights_bytes
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode.eager_sampling import DRAW_BYTES, DRAWN_AT_ONCE, sample
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import CHUNK_TOKENS, prefill
from alspec.runtime.distributed import peer_memory as exchange
from alspec.runtime.distributed.placement import PeerMemory, Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine import memory
from alspec.runtime.engine.memory import HISTORY_BYTES, RoundSize, _host_bytes, available_bytes, check_fits, plan_memory

CPU = torch.device("cpu")
GIB = 2**30
MODEL = LlamaConfig(
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_qo_heads=8,
    num_kv_heads=4,
    head_dim=10,
    vocab_size=301,
)


def num_bytes(weights: LlamaWeights) -> int:
    """Bytes of all tensors; shared memory counts once."""
    layers = [tensor for layer in weights.layers for tensor in layer.tensors.values()]
    tensors: list[Tensor] = [weights.embedding, *layers, weights.final_norm, weights.lm_head]
    whole = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors if len(tensor)
    }
    # random_weights shares one tensor of ones between the two norms of a layer; a checkpoint has two.
    shared = sum(layer.input_norm is layer.post_norm for layer in weights.layers)
    return sum(whole.values()) + shared * weights.final_norm.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocab_size", [300, 301, 5])
@pytest.mark.parametrize(("tp_size", "num_groups"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_planned_weights_have_the_bytes_of_real_ones(
    tp_size: int, num_groups: int, vocab_size: int, tied: bool, dtype: torch.dtype
) -> None:
    config = MODEL.model_copy(update={"vocab_size": vocab_size, "tie_word_embeddings": tied})
    world_size = tp_size * num_groups
    for rank in range(world_size):
        shard = Shard(rank % tp_size, tp_size, rank, world_size)
        plan = plan_memory(config, shard, dtype, 1, 1)
        assert plan.weights_bytes == num_bytes(random_weights(config, shard, dtype, CPU))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_planned_cache_has_the_bytes_of_a_real_one(tp_size: int) -> None:
    plan = plan_memory(MODEL, Shard(0, tp_size, 0, tp_size), torch.bfloat16, 3, 200)
    cache = KVCache(MODEL.num_layers, 3, MODEL.num_kv_heads // tp_size, 200, MODEL.head_dim, torch.bfloat16, CPU)
    assert plan.cache_bytes == cache.num_bytes
    assert plan.total_bytes == plan.weights_bytes + plan.cache_bytes + plan.buffer_bytes


def test_buffers_hold_one_chunk_and_the_logits() -> None:
    """At least the residual and the widest activation of one prompt chunk, and the gathered logits."""
    for tokens in (10, CHUNK_TOKENS, 10 * CHUNK_TOKENS):
        plan = plan_memory(MODEL, Shard(), torch.float32, 2, tokens)
        chunk = min(tokens, CHUNK_TOKENS)
        least = 4 * chunk * (MODEL.hidden_size + 2 * MODEL.intermediate_size) + 4 * 2 * MODEL.vocab_size
        assert least < plan.buffer_bytes < 20 * least


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_buffers_of_a_quantised_cache_hold_a_layer(tp_size: int, batch_size: int) -> None:
    """One layer: of a prompt in INT8 and dequantised, or of all requests in fp32. MLP or attention may need more."""
    config = MODEL.model_copy(update={"head_dim": 64})
    for tokens in (100, 10 * CHUNK_TOKENS):
        exact, quantised = (
            plan_memory(config, Shard(0, tp_size, 0, tp_size), torch.bfloat16, batch_size, tokens, kv_cache)
            for kv_cache in ("bf16", "turbo4")
        )
        numbers = 2 * tokens * config.num_kv_heads // tp_size * config.head_dim
        least = numbers * max(1 + 2, 4 * batch_size)
        mlp, attention = 4 * config.intermediate_size, 2 * config.num_qo_heads * config.head_dim
        mask = 256 * tokens if tokens > CHUNK_TOKENS else 0
        widest = 2 * (max(mlp, attention) * min(tokens, CHUNK_TOKENS) // tp_size + mask)
        assert exact.buffer_bytes <= quantised.buffer_bytes <= exact.buffer_bytes + 3 * least
        assert quantised.buffer_bytes >= exact.buffer_bytes - widest + least


def peak_bytes(run: Callable[[], object]) -> int:
    """The peak memory of the tensors that `run` allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(num_bytes for _, num_bytes in changes))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_step_over_a_quantised_cache_stays_within_the_plan(batch_size: int) -> None:
    """On the CPU, the predictor and the verification dequantise the keys and values of a layer for all requests."""
    config, tokens = MODEL.model_copy(update={"head_dim": 64}), 2048
    cache = new_cache("turbo4", config, 1, batch_size, tokens, torch.float32, CPU)
    attention = DecodeAttention([cache.layer(0)], config.num_qo_heads, 64, 0.125, CPU)
    q = torch.randn(batch_size, config.num_qo_heads, 64)
    seq_lens = torch.full((batch_size,), tokens, dtype=torch.int32)

    def step() -> None:
        for layer in range(config.num_layers):
            attention.predict(q, cache.layer(layer), seq_lens)
            attention.verify(q, cache.layer(layer), seq_lens)

    step()
    plan = plan_memory(config, Shard(), torch.float32, batch_size, tokens, "turbo4")
    dequantised = 2 * 4 * batch_size * config.num_kv_heads * tokens * 64
    assert dequantised <= peak_bytes(step) <= plan.buffer_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_queries_behind_a_prefix_take_a_mask_of_their_dtype(dtype: torch.dtype) -> None:
    """On the CPU. No other tensor is as large as queries times tokens; some CPUs copy K and V, so these are small."""
    queries, tokens = 256, 16384
    q, (k, v) = torch.randn(queries, 4, 16).to(dtype), torch.randn(2, 1, tokens, 16).to(dtype)
    mask = queries * tokens * dtype.itemsize
    assert mask <= peak_bytes(lambda: prefill_attention(q, k, v, 0.125)) < 1.5 * mask


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "min_p": 0.001}, {"top_k": 1000}], ids=str)
def test_drawing_tokens_stays_within_its_bytes(settings: dict[str, float]) -> None:
    logits, counters = torch.randn(DRAWN_AT_ONCE, 20_000), torch.arange(DRAWN_AT_ONCE)
    choice = ChoiceConfig.model_validate({"temperature": 1.0} | settings)
    assert peak_bytes(lambda: sample(logits, choice, counters, counters)) <= DRAW_BYTES * logits.numel()


def test_buffers_hold_the_sampling_of_up_to_eight_requests() -> None:
    """The vocabulary is larger than all activations."""
    config = MODEL.model_copy(update={"vocab_size": 128256})
    planned = {b: plan_memory(config, Shard(), torch.float32, b, 64).buffer_bytes for b in (1, 8, 16)}
    for batch_size, num_bytes in planned.items():
        logits = 5 * 4 * batch_size * config.vocab_size
        assert num_bytes == logits + DRAW_BYTES * min(batch_size, DRAWN_AT_ONCE) * config.vocab_size


@pytest.mark.parametrize("peer_memory", ["symm", "host"])
@pytest.mark.parametrize(("tp_size", "num_groups"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_buffers_hold_the_packets_of_each_request(
    tp_size: int, num_groups: int, peer_memory: PeerMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second request adds its logits, in fp32 five times, and its packets in memory of the GPU."""
    world_size = tp_size * num_groups

    def allocate(kind: PeerMemory, sizes: list[int], buffer_ids: object, transport: Transport) -> list[list[Tensor]]:
        places = 1 if kind == "host" else world_size
        return [
            [torch.zeros(size, dtype=torch.int64) for _ in range(places)] * (world_size // places) for size in sizes
        ]

    monkeypatch.setattr(exchange, "allocate_packets", allocate)
    transport = Transport(Placement(), CPU, "gloo", None)
    transport.placement = Placement(0, world_size, 0, world_size, num_groups)
    planned, held = [], []
    for batch_size in (1, 2):
        shape = (2 * MODEL.num_layers, batch_size, MODEL.hidden_size, MODEL.vocab_size)
        sums, logits, _ = exchange.build_exchanges(transport, peer_memory, *shape)
        fields = [each.packets if peer_memory == "symm" else each.own_packets for each in (sums, logits)]
        held.append(sum(packets.nbytes for packets in fields if packets is not None))
        plan = plan_memory(MODEL, transport.placement.shard, torch.bfloat16, batch_size, 100)
        planned.append(plan.buffer_bytes)
    assert (held[0] > 0) == (world_size > 1)
    # All ranks have the same number of rows of logits, so there may be a few more rows than tokens.
    packets = held[1] - held[0]
    assert planned[1] - planned[0] == pytest.approx(20 * MODEL.vocab_size + packets, abs=8 * (world_size + 2))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(200, 50_000), st.floats(0.0, 1.0))
def test_the_offered_context_is_the_largest_that_fits(batch_size: int, max_context: int, share: float) -> None:
    """The offered context fits, and 64 tokens more do not."""

    def total(context: int) -> int:
        return plan_memory(MODEL, Shard(), torch.float32, batch_size, context).total_bytes

    available = int(share * (total(max_context) - 1))
    with pytest.raises(DoesNotFitError) as caught:
        check_fits(MODEL, Shard(), torch.float32, batch_size, max_context, available)
    offered = re.search(r"the largest context that fits is (\d+) tokens", str(caught.value))
    if offered is None:
        assert "no context fits; use more ranks" in str(caught.value)
        assert total(64) > available
        return
    context = int(offered[1])
    assert context % 64 == 0
    plan = check_fits(MODEL, Shard(), torch.float32, batch_size, context, available)
    assert plan.total_bytes <= available
    assert total(context + 64) > available or context + 64 >= max_context


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 2**30),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 0\n"}, 2**30),
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "file 600\ninactive_file 500\n"}, 800),
        ({"memory.max": "1000", "memory.current": "1700", "memory.stat": "inactive_file 500\n"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "4096",
                "memory/memory.usage_in_bytes": "96",
                "memory/memory.stat": "cache 3\ninactive_file 0\n",
            },
            4000,
        ),
    ],
    ids=["no container", "no limit", "limit", "beyond the limit", "version 1"],
)
def test_the_limit_of_a_container_bounds_the_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  1048576 kB\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert _host_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("meminfo", "stat", "expected"),
    [
        ("MemAvailable: 1024 kB\n", "anon 7\n", 2**20),  # the container does not report inactive files
        ("MemTotal: 9 kB\n", "inactive_file 0\n", 2**30),  # the kernel does not report available memory
    ],
)
def test_memory_is_known_without_one_of_the_numbers(tmp_path: Path, meminfo: str, stat: str, expected: int) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for folder in (tmp_path / "proc", group):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(meminfo)
    for name, text in {"memory.max": str(2**30), "memory.current": "0", "memory.stat": stat}.items():
        (group / name).write_text(text)
    assert _host_bytes(tmp_path) == min(expected, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def test_a_gpu_needs_memory_for_scores_if_no_library_fuses_them() -> None:
    """The scores of all heads, and K and V once for each query head. Not in 16 bits, nor on the CPU."""
    config = LlamaConfig.from_shape("llama-3.1-8b")

    def more(dtype: torch.dtype, tokens: int, head_dim: int = 128) -> int:
        shape = config.model_copy(update={"head_dim": head_dim})
        return (
            plan_memory(shape, Shard(), dtype, 1, tokens, device_type="cuda").buffer_bytes
            - plan_memory(shape, Shard(), dtype, 1, tokens).buffer_bytes
        )

    assert more(torch.bfloat16, 131072) == more(torch.float16, 131072, 256) == 0
    for tokens in (2048, 8192, 131072):
        scores = min(tokens, max(256, 2**25 // (tokens * 32))) * tokens * 32
        expanded = 2 * 4 * tokens * 4096
        mlp = 4 * min(tokens, 8192) * 4 * 14336
        assert more(torch.float32, tokens) <= 16 * scores + expanded <= more(torch.float32, tokens) + mlp
    assert more(torch.bfloat16, 131072, 100) > 2**30
    assert more(torch.bfloat16, 131072, 264) > 2**30


def test_the_message_names_needed_and_available_memory() -> None:
    config = LlamaConfig.from_shape("llama-3.1-8b")
    plan = plan_memory(config, Shard(), torch.bfloat16, 4, 131072)
    with pytest.raises(DoesNotFitError) as caught:
        check_fits(config, Shard(), torch.bfloat16, 4, 131072, 40 * GIB)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message
    assert f"needs {plan.total_bytes / GIB:.2f} GiB" in message
    assert f"cache {plan.cache_bytes / GIB:.2f} for 4 x 131072 tokens" in message
    assert "has 40.00 GiB" in message


def test_the_plan_of_llama_8b_has_the_published_numbers() -> None:
    """8.03e9 parameters in bf16, and 128 KiB of keys and values for each token."""
    plan = plan_memory(LlamaConfig.from_shape("llama-3.1-8b"), Shard(), torch.bfloat16, 1, 1024)
    assert plan.weights_bytes == 2 * 8_030_261_248
    assert plan.cache_bytes == 1024 * 128 * 1024


def test_rounds_add_rows_a_history_and_a_draft_model() -> None:
    """Logits of all rows; the draft model's weights and its bf16 cache beside any cache of the model itself."""
    config = MODEL.model_copy(update={"head_dim": 64})
    small = config.model_copy(update={"num_layers": 1})
    sizes = config, Shard(), torch.float32, 2, 512, "turbo4"
    plain = plan_memory(*sizes)
    own = plan_memory(small, Shard(), torch.float32, 2, 512)
    for rows in (2, 16):
        rounds = plan_memory(*sizes, rounds=RoundSize(rows))
        logits = (3 + 2) * 4 * 2 * (rows - 1) * config.vocab_size
        assert (rounds.weights_bytes, rounds.cache_bytes) == (plain.weights_bytes, plain.cache_bytes)
        assert rounds.buffer_bytes == plain.buffer_bytes + logits + HISTORY_BYTES * 2 * (512 + rows)
        both = plan_memory(*sizes, rounds=RoundSize(rows, small))
        assert both.weights_bytes == plain.weights_bytes + own.weights_bytes
        assert both.cache_bytes == plain.cache_bytes + own.cache_bytes
        assert both.buffer_bytes == max(rounds.buffer_bytes, own.buffer_bytes)
    copied = plan_memory(*sizes, rounds=RoundSize(2, None, "fp8"))
    assert copied.weights_bytes == plain.weights_bytes + weights_bytes(config, 1, torch.float32)
    with pytest.raises(DoesNotFitError):
        check_fits(*sizes[:5], both.total_bytes - 1, "turbo4", rounds=RoundSize(16, small))
    assert check_fits(*sizes[:5], both.total_bytes, "turbo4", rounds=RoundSize(16, small)) == both


@pytest.mark.parametrize("kv_cache", ["bf16", "turbo4"])
def test_an_exact_fit_fits(kv_cache: str) -> None:
    config = MODEL.model_copy(update={"head_dim": 64})
    plan = plan_memory(config, Shard(), torch.float32, 1, 512, kv_cache)
    assert plan.cache_bytes == new_cache(kv_cache, config, 1, 1, 512, torch.float32, CPU).num_bytes
    assert check_fits(config, Shard(), torch.float32, 1, 512, plan.total_bytes, kv_cache) == plan
    with pytest.raises(DoesNotFitError):
        check_fits(config, Shard(), torch.float32, 1, 512, plan.total_bytes - 1, kv_cache)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("kv_cache", "dtype", "num_tokens"),
    [
        ("bf16", torch.bfloat16, 131072),
        ("turbo4", torch.bfloat16, 131072),
        # No library fuses the softmax: for one chunk, and after a prefix.
        ("bf16", torch.float32, 8192),
        ("bf16", torch.float32, 65536),
    ],
    ids=["bf16", "turbo4", "fp32-8k", "fp32-64k"],
)
def test_a_long_prompt_stays_within_the_plan(kv_cache: str, dtype: torch.dtype, num_tokens: int) -> None:
    """Two layers of the 8B shape have the activations of all 32. The plan is less than three times the peak."""
    config = LlamaConfig.from_shape("llama-3.1-8b").model_copy(update={"num_layers": 2})
    device = torch.device("cuda", 0)
    others = torch.cuda.memory_allocated(device)  # by other tests
    plan = plan_memory(config, Shard(), dtype, 1, num_tokens, kv_cache, "cuda")
    transport = Transport(Placement(), device, "nccl", None)
    model = Llama(config, random_weights(config, Shard(), dtype, device), transport)
    cache = new_cache(kv_cache, config, 1, 1, num_tokens, dtype, device)
    token_ids = torch.randint(config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    held = torch.cuda.memory_allocated(device) - others
    torch.cuda.reset_peak_memory_stats(device)
    logits, layer_sums = prefill(model, cache, transport, 0, token_ids, no_hook)
    assert bool(logits.isfinite().all() & layer_sums.isfinite().all())
    peak = torch.cuda.max_memory_allocated(device) - others
    assert peak <= plan.total_bytes
    assert plan.buffer_bytes < 3 * (peak - held)


def test_ranks_of_a_host_share_its_memory() -> None:
    alone, shared = available_bytes(CPU, 1), available_bytes(CPU, 4)
    assert shared > 2**20
    assert alone == pytest.approx(4 * shared, rel=0.2)


@pytest.mark.parametrize("context", [64, 448])
def test_a_context_that_fits_exactly_is_offered(context: int) -> None:
    available = plan_memory(MODEL, Shard(), torch.float32, 1, context).total_bytes
    with pytest.raises(DoesNotFitError, match=f"the largest context that fits is {context} tokens"):
        check_fits(MODEL, Shard(), torch.float32, 1, 1000, available)


@pytest.mark.parametrize("kv_cache", ["bf16", "turbo4"])
def test_a_prompt_of_several_chunks_stays_within_the_plan(kv_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where attention after a prefix also needs a mask, which is wider than the MLP here."""
    chunk_tokens, tokens = 512, 4096
    monkeypatch.setattr(memory, "CHUNK_TOKENS", chunk_tokens)
    config = MODEL.model_copy(update={"num_layers": 1, "num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 64})
    transport = Transport(Placement(), CPU, "gloo", None)
    model = Llama(config, random_weights(config, Shard(), torch.float32, CPU), transport)
    cache = new_cache(kv_cache, config, 1, 1, tokens, torch.float32, CPU)
    plan = plan_memory(config, Shard(), torch.float32, 1, tokens, kv_cache)
    with torch.no_grad():
        peak = peak_bytes(lambda: prefill(model, cache, transport, 0, [1] * tokens, no_hook, chunk_tokens))
    assert 0.9 * plan.buffer_bytes < peak <= plan.buffer_bytes
