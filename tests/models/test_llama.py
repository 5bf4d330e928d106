"""The model against transformers' Llama, its shards against the whole, and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from model_runner import Runner, ThreadTransport, close, load_runner, on_ranks
from torch import Tensor

from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import (
    Llama,
    LlamaWeights,
    Shard,
    linear_in_pairs,
    load_weights,
    random_weights,
    rotate_values,
)
from alspec.models.llama_config import LlamaConfig, RopeScaling
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 151,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


def save_reference(
    folder: Path, max_shard_size: str | int = "1GB", dtype: torch.dtype = torch.float32, **sizes: Any
) -> Any:
    """Save a transformers Llama of `TINY`'s shape with `sizes` changed; returns it as transformers reads it in fp32.

    Its weights are large enough for peaked attention and its norms differ from 1, so that every part shows in the
    logits.
    """
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(TINY | sizes)))
    for name, parameter in model.named_parameters():
        parameter.data = torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.2
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompt(vocab_size: int, length: int = 90) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("heads_per_kv", [1, 4])
def test_rotated_values_give_the_same_logits(heads_per_kv: int, tmp_path: Path) -> None:
    """W_v rotates every value, W_o rotates outputs back; the cache holds rotated values."""
    sizes = {"num_attention_heads": 2 * heads_per_kv, "num_key_value_heads": 2, "head_dim": 16}
    save_reference(tmp_path, **sizes)
    plain, rotated = load_runner(tmp_path), load_runner(tmp_path)
    matrix = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))[0]
    rotate_values(rotated.model.weights, rotated.model.config, matrix)
    ids = prompt(plain.model.config.vocab_size, 40)
    close(rotated.prefill(ids, 64), plain.prefill(ids, 64))
    close(rotated.decode(5, 41), plain.decode(5, 41))
    values, expected = (runner.cache.layer(0).v[0, :, :41] for runner in (rotated, plain))
    assert torch.allclose(values, expected @ matrix.T, atol=1e-4)
    assert not torch.allclose(values, expected, atol=1e-2)


VARIANTS: dict[str, dict[str, Any]] = {
    "gqa1": {},
    "gqa3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "gqa4": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "rope-llama3": {"rope_parameters": LLAMA3},
    "rope-linear": {"rope_parameters": LINEAR},
    "rope-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "head-dim": {"head_dim": 20},
    "rms-eps": {"rms_norm_eps": 0.1},
    "sharded": {"max_shard_size": 30_000},
    "everything": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3,
        "max_shard_size": 20_000,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_are_transformers(variant: str, tmp_path: Path) -> None:
    """Prefill in odd chunks, then every decode step token by token, each against transformers with its own cache."""
    reference = save_reference(tmp_path, **VARIANTS[variant])
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert (num_files > 1) == ("max_shard_size" in VARIANTS[variant])
    ids, split = prompt(TINY["vocab_size"]), 71
    runner = load_runner(tmp_path)
    expected = reference(torch.tensor([ids[:split]]), use_cache=True)
    close(runner.prefill(ids[:split], chunk_tokens=17), expected.logits[0, -1])
    for position in range(split, len(ids)):
        expected = reference(
            torch.tensor([ids[position : position + 1]]), past_key_values=expected.past_key_values, use_cache=True
        )
        close(runner.decode(ids[position], position + 1), expected.logits[0, -1])


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 63, 64, 65, 89, 90, 1000])
@torch.no_grad()
def test_prefill_chunks(chunk_tokens: int, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, **VARIANTS["gqa3"])
    ids = prompt(TINY["vocab_size"])
    logits = load_runner(tmp_path).prefill(ids, chunk_tokens)
    close(logits, reference(torch.tensor([ids])).logits[0, -1])


@torch.no_grad()
def test_decode_from_the_first_token(tmp_path: Path) -> None:
    reference = save_reference(tmp_path)
    ids = prompt(TINY["vocab_size"], 30)
    runner = load_runner(tmp_path)
    expected = reference(torch.tensor([ids])).logits[0]
    close(runner.prefill(ids[:1], chunk_tokens=8), expected[0])
    for position in range(1, len(ids)):
        close(runner.decode(ids[position], position + 1), expected[position])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@torch.no_grad()
def test_half_precision_weights_run_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, dtype=dtype)
    ids = prompt(TINY["vocab_size"])
    runner = load_runner(tmp_path)
    assert all(tensor.dtype == torch.float32 for tensor in every_tensor(runner.model.weights))
    close(runner.prefill(ids, chunk_tokens=33), reference(torch.tensor([ids])).logits[0, -1])


@torch.no_grad()
def test_bf16_execution_stays_near_fp32(tmp_path: Path) -> None:
    """bf16 weights and activations, fp32 residual: the logits keep about two digits."""
    reference = save_reference(tmp_path, dtype=torch.bfloat16)
    config = LlamaConfig.from_folder(tmp_path)
    weights = load_weights(Checkpoint.open(tmp_path, config), config, Shard(), torch.bfloat16, CPU)
    assert all(tensor.dtype == torch.bfloat16 for tensor in every_tensor(weights))
    model = Llama(config, weights, Transport(Placement(), CPU, "gloo", None))
    ids = prompt(TINY["vocab_size"], 20)
    cache = KVCache(config.num_layers, 1, config.num_kv_heads, 20, config.head_dim, torch.bfloat16, CPU)
    logits, layer_sums = prefill(model, cache, Transport(Placement(), CPU, "gloo", None), 0, ids, no_hook)
    assert logits.dtype == layer_sums.dtype == torch.float32
    expected = reference(torch.tensor([ids])).logits[0, -1]
    assert (logits[0] - expected).norm() < 0.05 * expected.norm()


def every_tensor(weights: LlamaWeights) -> list[Tensor]:
    layers = [tensor for layer in weights.layers for tensor in layer.tensors.values()]
    return [weights.embedding, *layers, weights.final_norm, weights.lm_head]


def shards_of(folder: Path, tp_size: int) -> tuple[LlamaConfig, Checkpoint, list[LlamaWeights]]:
    config = LlamaConfig.from_folder(folder)
    checkpoint = Checkpoint.open(folder, config)
    shards = [Shard(rank, tp_size, rank, tp_size) for rank in range(tp_size)]
    return config, checkpoint, [load_weights(checkpoint, config, shard, torch.float32, CPU) for shard in shards]


def join_rows(parts: list[Tensor], sizes: list[int]) -> Tensor:
    """Undo the split of a fused projection: each rank holds its rows of every part, one part after the other."""
    pieces = zip(*(part.split(sizes) for part in parts), strict=True)
    return torch.cat([torch.cat(piece) for piece in pieces])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("max_shard_size", ["1GB", 30_000], ids=["single", "sharded"])
def test_shards_join_to_the_checkpoint(tp_size: int, max_shard_size: str | int, tmp_path: Path) -> None:
    save_reference(tmp_path, max_shard_size, num_attention_heads=8, head_dim=10)
    config, checkpoint, ranks = shards_of(tmp_path, tp_size)
    stored = checkpoint.tensor_slice
    q_rows, kv_rows = (heads * config.head_dim // tp_size for heads in (config.num_qo_heads, config.num_kv_heads))
    intermediate = config.intermediate_size // tp_size
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        layers = [rank.layers[index] for rank in ranks]
        names = [prefix + f"self_attn.{part}_proj.weight" for part in "qkv"]
        qkv = join_rows([layer.qkv for layer in layers], [q_rows, kv_rows, kv_rows])
        assert torch.equal(qkv, torch.cat([stored(name) for name in names]))
        names = [prefix + f"mlp.{part}_proj.weight" for part in ("gate", "up")]
        gate_up = join_rows([layer.gate_up for layer in layers], [intermediate, intermediate])
        assert torch.equal(gate_up, torch.cat([stored(name) for name in names]))
        assert torch.equal(torch.cat([layer.o for layer in layers], 1), stored(prefix + "self_attn.o_proj.weight"))
        assert torch.equal(torch.cat([layer.down for layer in layers], 1), stored(prefix + "mlp.down_proj.weight"))
        for layer in layers:
            assert torch.equal(layer.input_norm, stored(prefix + "input_layernorm.weight"))
            assert torch.equal(layer.post_norm, stored(prefix + "post_attention_layernorm.weight"))
            assert all(tensor.is_contiguous() for tensor in layer.tensors.values()), (
                "kernels read rows one after another"
            )
    assert torch.equal(torch.cat([rank.lm_head for rank in ranks]), stored("lm_head.weight"))
    for rank in ranks:
        assert torch.equal(rank.embedding, stored("model.embed_tokens.weight"))
        assert torch.equal(rank.final_norm, stored("model.norm.weight"))


@pytest.mark.parametrize(
    ("vocab_size", "shards", "sizes"),
    [(8, 1, [8]), (8, 4, [2, 2, 2, 2]), (151, 4, [38, 38, 38, 37]), (5, 4, [2, 2, 1, 0]), (2, 4, [1, 1, 0, 0])],
)
def test_vocab_range(vocab_size: int, shards: int, sizes: list[int]) -> None:
    ranges = [Shard(0, 1, rank, shards).vocab_range(vocab_size) for rank in range(shards)]
    assert [stop - start for start, stop in ranges] == sizes
    covered = [row for start, stop in ranges for row in range(start, stop)]
    assert covered == list(range(vocab_size))


@pytest.mark.parametrize("tied", [True, False])
def test_empty_vocabulary_shard(tied: bool, tmp_path: Path) -> None:
    save_reference(tmp_path, vocab_size=5, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1)
    _, checkpoint, ranks = shards_of(tmp_path, 4)
    assert ranks[3].lm_head.shape == (0, TINY["hidden_size"])
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(torch.cat([rank.lm_head for rank in ranks]), checkpoint.tensor_slice(name))


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("vocab_size", [151, 5], ids=["uneven", "empty-shard"])
@torch.no_grad()
def test_tensor_parallel_logits_are_transformers(tp_size: int, vocab_size: int, tmp_path: Path) -> None:
    """Prefill and decode on T shards, with the runtime's collectives between threads."""
    reference = save_reference(
        tmp_path, num_attention_heads=8, head_dim=12, vocab_size=vocab_size, bos_token_id=0, eos_token_id=1
    )
    ids, split = prompt(vocab_size, 24), 15
    config, _, ranks = shards_of(tmp_path, tp_size)

    def work(transport: ThreadTransport) -> Tensor:
        runner = Runner(config, ranks[transport.placement.rank], transport)
        logits = [runner.prefill(ids[:split], chunk_tokens=7)]
        logits += [runner.decode(ids[position], position + 1) for position in range(split, len(ids))]
        return torch.stack(logits)

    expected = reference(torch.tensor([ids])).logits[0, split - 1 :]
    with on_ranks(tp_size, work) as logits:
        close(logits[0], expected)
        assert all(torch.equal(other, logits[0]) for other in logits[1:])


SHAPE = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_qo_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=1001,
    rope_scaling=RopeScaling(rope_type="llama3", factor=8.0),
)


def random_shard(shard: Shard, config: LlamaConfig = SHAPE) -> LlamaWeights:
    return random_weights(config, shard, torch.float32, CPU)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_of_paired_ranks_are_replicas(tied: bool) -> None:
    config = SHAPE.model_copy(update={"tie_word_embeddings": tied})
    first, paired, neighbour = (random_shard(Shard(t, 2, v, 4), config) for t, v in ((0, 0), (0, 2), (1, 1)))
    for mine, theirs, other in zip(first.layers, paired.layers, neighbour.layers, strict=True):
        for name, tensor in mine.tensors.items():
            assert torch.equal(tensor, getattr(theirs, name))
            assert "norm" in name or not torch.equal(tensor, getattr(other, name))
    assert torch.equal(first.embedding, neighbour.embedding)
    whole = random_shard(Shard(), config).lm_head
    parts = [random_shard(Shard(rank % 2, 2, rank, 4), config).lm_head for rank in range(4)]
    assert torch.equal(torch.cat(parts), whole)


def test_random_weights_are_unrelated() -> None:
    weights = random_shard(Shard())
    drawn = [weights.embedding, weights.lm_head]
    drawn += [tensor for layer in weights.layers for tensor in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    related = torch.corrcoef(torch.stack([tensor.flatten()[:1000] for tensor in drawn])).fill_diagonal_(0)
    assert float(related.abs().max()) < 0.2, "more than 6 standard errors"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@torch.no_grad()
def test_random_weights_keep_activations_near_unit_size(tp_size: int) -> None:
    """Every weight N(0, 1/fan_in): after some layers the logits are finite and of unit size, at every T."""
    hidden, attention, mlp = SHAPE.hidden_size, SHAPE.num_qo_heads * SHAPE.head_dim, SHAPE.intermediate_size
    for layer in random_shard(Shard(tp_size - 1, tp_size, tp_size - 1, tp_size)).layers:
        for weight, fan_in in ((layer.qkv, hidden), (layer.o, attention), (layer.gate_up, hidden), (layer.down, mlp)):
            assert float(weight.std()) == pytest.approx(fan_in**-0.5, rel=0.02)
    ids = prompt(SHAPE.vocab_size, 40)

    def work(transport: ThreadTransport) -> Tensor:
        return Runner(SHAPE, random_shard(transport.placement.shard), transport).prefill(ids, chunk_tokens=64)

    with on_ranks(tp_size, work) as logits:
        assert logits[0].shape == (SHAPE.vocab_size,)
        assert logits[0].isfinite().all()
        assert 0.8 < float(logits[0].std()) < 1.25
        assert abs(float(logits[0].mean())) < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "rows"), [(64, 301), (96, 64), (256, 1000), (577, 33)])
def test_the_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype, columns: int, rows: int) -> None:
    """Neither on their number, nor on the row's place among them."""
    weight, bias = torch.randn(rows, columns, dtype=dtype), torch.randn(rows, dtype=dtype)
    x = torch.randn(27, columns, dtype=dtype)
    for own in (None, bias):
        alone = torch.cat([linear_in_pairs(row[None], weight, own) for row in x])
        expected = F.linear(x.double(), weight.double(), None if own is None else own.double())
        torch.testing.assert_close(alone.double(), expected, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)
        for chosen in (range(27), range(1, 27), [3, 3, 9], [26]):
            assert torch.equal(linear_in_pairs(x[list(chosen)], weight, own), alone[list(chosen)])
