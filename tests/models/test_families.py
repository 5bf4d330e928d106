"""Every family and option against transformers in fp32: logits of prompts and steps, on one rank and on several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from family_models import CASES, greedy, save_family
from model_runner import Runner, ThreadTransport, close, load_runner, on_ranks
from torch import Tensor

from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Shard, load_weights, random_weights, rotate_values
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.window_cache import WindowCache
from alspec.runtime.engine.memory import plan_memory

CPU = torch.device("cpu")


def prompt(length: int) -> list[int]:
    return torch.randint(151, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def own_greedy(runner: Runner, ids: list[int], count: int) -> list[int]:
    tokens = [int(runner.prefill(ids, chunk_tokens=17).argmax())]
    while len(tokens) < count:
        tokens.append(int(runner.decode(tokens[-1], len(ids) + len(tokens)).argmax()))
    return tokens


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_and_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = save_family(tmp_path, case)
    runner = load_runner(tmp_path)
    ids = prompt(61)
    close(runner.prefill(ids, chunk_tokens=17), reference(torch.tensor([ids])).logits[0, -1])
    assert own_greedy(load_runner(tmp_path), ids, 20) == greedy(reference, ids, 20)


@torch.no_grad()
def test_a_mistral_with_windows_in_some_layers(tmp_path: Path) -> None:
    """As Ministral-8B-Instruct-2410 names itself; transformers' Auto classes take it for a Ministral."""
    save_family(tmp_path, "ministral")
    path = tmp_path / "config.json"
    named = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    reference, ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), prompt(61)
    close(load_runner(tmp_path).prefill(ids, chunk_tokens=17), reference(torch.tensor([ids])).logits[0, -1])
    assert own_greedy(load_runner(tmp_path), ids, 20) == greedy(reference, ids, 20)


@pytest.mark.parametrize("case", ["mistral-window", "qwen3-window"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 21, 64])
@torch.no_grad()
def test_windows_in_prompts_of_any_chunks(case: str, chunk_tokens: int, tmp_path: Path) -> None:
    """Chunks shorter and longer than the window; afterwards one more token is decoded."""
    reference, ids = save_family(tmp_path, case), prompt(62)
    runner, expected = load_runner(tmp_path), reference(torch.tensor([ids])).logits[0]
    assert isinstance(runner.cache, WindowCache)
    close(runner.prefill(ids[:-1], chunk_tokens), expected[-2])
    close(runner.decode(ids[-1], len(ids)), expected[-1])


@pytest.mark.parametrize("case", ["llama-biases", "qwen2", "qwen3-biases", "phi3-partial", "qwen2-window"])
@pytest.mark.parametrize("tp_size", [2, 4])
@torch.no_grad()
def test_ranks_share_a_model(case: str, tp_size: int, tmp_path: Path) -> None:
    """Also with more ranks than KV heads: two ranks then have the same one."""
    reference = save_family(tmp_path, case)
    config = LlamaConfig.from_folder(tmp_path)
    checkpoint, ids = Checkpoint.open(tmp_path, config), prompt(24)
    shards = [Shard(rank, tp_size, rank, tp_size) for rank in range(tp_size)]
    ranks = [load_weights(checkpoint, config, shard, torch.float32, CPU) for shard in shards]
    for rank, shard in zip(ranks, shards, strict=True):
        tensors = [tensor for layer in rank.layers for tensor in layer.tensors.values()]
        tensors += [rank.embedding, rank.final_norm] + ([] if config.tie_word_embeddings else [rank.lm_head])
        planned = plan_memory(config, shard, torch.float32, 1, 64).weights_bytes
        assert planned == sum(tensor.nbytes for tensor in tensors)
        assert all(tensor.is_contiguous() for layer in rank.layers for tensor in layer.tensors.values())

    def work(transport: ThreadTransport) -> Tensor:
        runner = Runner(config, ranks[transport.placement.rank], transport)
        logits = [runner.prefill(ids[:15], chunk_tokens=7)]
        logits += [runner.decode(ids[position], position + 1) for position in range(15, len(ids))]
        return torch.stack(logits)

    expected = reference(torch.tensor([ids])).logits[0, 14:]
    with on_ranks(tp_size, work) as logits:
        close(logits[0], expected)
        assert all(torch.equal(other, logits[0]) for other in logits[1:])


@torch.no_grad()
def test_one_kv_head_on_every_rank(tmp_path: Path) -> None:
    reference = save_family(tmp_path, "llama-biases", num_key_value_heads=1)
    config = LlamaConfig.from_folder(tmp_path)
    checkpoint, ids = Checkpoint.open(tmp_path, config), prompt(20)
    ranks = [load_weights(checkpoint, config, Shard(rank, 4, rank, 4), torch.float32, CPU) for rank in range(4)]

    def work(transport: ThreadTransport) -> Tensor:
        return Runner(config, ranks[transport.placement.rank], transport).prefill(ids, chunk_tokens=7)

    with on_ranks(4, work) as logits:
        close(logits[0], reference(torch.tensor([ids])).logits[0, -1])


@torch.no_grad()
def test_rotated_values_rotate_their_biases(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen2", num_key_value_heads=1)
    plain, rotated = load_runner(tmp_path), load_runner(tmp_path)
    head_dim = plain.model.config.head_dim
    matrix = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=torch.Generator().manual_seed(3)))[0]
    rotate_values(rotated.model.weights, rotated.model.config, matrix)
    ids = prompt(40)
    close(rotated.prefill(ids, 64), plain.prefill(ids, 64))
    values, expected = (runner.cache.layer(0).v[0, :, :40] for runner in (rotated, plain))
    assert torch.allclose(values, expected @ matrix.T, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-biases", "qwen3"])
def test_random_weights_have_every_tensor(case: str, tmp_path: Path) -> None:
    save_family(tmp_path, case)
    config = LlamaConfig.from_folder(tmp_path)
    shard = Shard(0, 2, 0, 2)
    found = random_weights(config, shard, torch.float32, CPU)
    expected = load_weights(Checkpoint.open(tmp_path, config), config, shard, torch.float32, CPU)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert {name: x.shape for name, x in layer.tensors.items()} == {
            name: x.shape for name, x in other.tensors.items()
        }
