"""Quantised folders of every format: values, logits, and the parts of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_runner import Runner, ThreadTransport, close, on_ranks
from quantised_folders import FORMATS, save_quantised
from torch import Tensor

from alspec.config import EngineConfig
from alspec.models.checkpoint.checkpoint import expected_tensors
from alspec.models.checkpoint.quantised.quantised_checkpoint import QuantisedCheckpoint
from alspec.models.checkpoint.source import model_config, open_checkpoint
from alspec.models.llama import Shard, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.memory import plan_memory

CPU = torch.device("cpu")


def open_folder(folder: Path) -> tuple[LlamaConfig, QuantisedCheckpoint]:
    settings = EngineConfig(model=folder)
    config = model_config(settings)
    checkpoint = open_checkpoint(settings, config)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    return config, checkpoint


def ids(length: int) -> list[int]:
    return torch.randint(151, (length,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_values_and_logits(name: str, tmp_path: Path) -> None:
    """Every value bit by bit in fp32, bf16 and fp16; then logits of transformers with the same values."""
    reference = save_quantised(tmp_path, name)
    config, checkpoint = open_folder(tmp_path)
    expected = reference.state_dict()
    assert len(checkpoint.readers) == 7 * config.num_layers
    for weight in expected_tensors(config):
        assert torch.equal(checkpoint.tensor_slice(weight), expected[weight]), weight
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(checkpoint.load(weight, CPU, dtype), expected[weight].to(dtype)), weight
    weights = load_weights(checkpoint, config, Shard(), torch.float32, CPU)
    runner = Runner(config, weights, Transport(Placement(), CPU, "gloo", None))
    prompt = ids(40)
    close(runner.prefill(prompt[:-1], 17), reference(torch.tensor([prompt])).logits[0, -2])
    close(runner.decode(prompt[-1], len(prompt)), reference(torch.tensor([prompt])).logits[0, -1])


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block", "int4-zeros", "int4-ordered", "awq", "gptq"])
@pytest.mark.parametrize(("family", "linear"), [("Qwen2", 7), ("Qwen3", 7), ("Phi3", 4)])
@torch.no_grad()
def test_families(name: str, family: str, linear: int, tmp_path: Path) -> None:
    """Biases, which GPTQ's files also hold as zeros where there are none; q, k, v and gate, up in one tensor each."""
    hidden = {"hidden_size": 512} if family == "Phi3" else {}
    reference = save_quantised(tmp_path, name, family=family, **hidden)
    config, checkpoint = open_folder(tmp_path)
    assert len(checkpoint.readers) == linear * config.num_layers
    prompt, tp_size = ids(24), 2
    ranks = [load_weights(checkpoint, config, Shard(rank, 2, rank, 2), torch.float32, CPU) for rank in range(tp_size)]

    def work(transport: ThreadTransport) -> Tensor:
        return Runner(config, ranks[transport.placement.rank], transport).prefill(prompt, 7)

    with on_ranks(tp_size, work) as logits:
        close(logits[0], reference(torch.tensor([prompt])).logits[0, -1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tp_size", [2, 4])
@torch.no_grad()
def test_ranks_hold_parts_of_the_whole(name: str, tp_size: int, tmp_path: Path) -> None:
    save_quantised(tmp_path, name)
    config, checkpoint = open_folder(tmp_path)
    assert tp_size in config.valid_tp_sizes
    whole = load_weights(checkpoint, config, Shard(), torch.bfloat16, CPU)
    shards = [Shard(rank, tp_size, rank, tp_size) for rank in range(tp_size)]
    parts = [load_weights(checkpoint, config, shard, torch.bfloat16, CPU) for shard in shards]
    q_rows, kv_rows = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(whole.layers):
        ranks = [part.layers[index] for part in parts]
        assert torch.equal(torch.cat([rank.o for rank in ranks], 1), layer.o)
        assert torch.equal(torch.cat([rank.down for rank in ranks], 1), layer.down)
        sizes = [q_rows // tp_size, kv_rows // tp_size, kv_rows // tp_size]
        split = zip(*(rank.qkv.split(sizes) for rank in ranks), strict=True)
        assert torch.equal(torch.cat([torch.cat(part) for part in split]), layer.qkv)
        halves = zip(*(rank.gate_up.chunk(2) for rank in ranks), strict=True)
        assert torch.equal(torch.cat([torch.cat(part) for part in halves]), layer.gate_up)
    planned = plan_memory(config, shards[1], torch.bfloat16, 1, 64).weights_bytes
    held = [tensor for layer in parts[1].layers for tensor in layer.tensors.values()]
    held += [parts[1].embedding, parts[1].final_norm, parts[1].lm_head]
    assert planned == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("name", ["gptq-ordered", "gptq-in-order"])
@torch.no_grad()
def test_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    """Ranks that hold channels of an ordered weight, whose groups are then uneven."""
    reference = save_quantised(tmp_path, name, intermediate_size=2 * 48)
    config, checkpoint = open_folder(tmp_path)
    ranks = [load_weights(checkpoint, config, Shard(rank, 2, rank, 2), torch.float32, CPU) for rank in range(2)]
    prompt = ids(20)

    def work(transport: ThreadTransport) -> Tensor:
        return Runner(config, ranks[transport.placement.rank], transport).prefill(prompt, 7)

    with on_ranks(2, work) as logits:
        close(logits[0], reference(torch.tensor([prompt])).logits[0, -1])


@pytest.mark.parametrize("name", FORMATS)
def test_any_slice_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    """Rows anywhere, from the files and cut from the canonical form; channels between groups, from the files."""
    save_quantised(tmp_path, name)
    config, checkpoint = open_folder(tmp_path)
    weight = "model.layers.1.mlp.down_proj.weight"  # [96, 512]
    whole = checkpoint.packed_slice(weight, CPU)
    values = checkpoint.tensor_slice(weight)
    for start, stop in [(0, 1), (5, 90), (95, 96), (8, 16)]:
        for part in (checkpoint.packed_slice(weight, CPU, 0, start, stop), whole.rows(start, stop)):
            assert torch.equal(part.dequantise(torch.float32), values[start:stop])
    assert config.quantisation is not None
    scheme = config.quantisation.scheme_of("model.layers.1.mlp.down_proj")
    assert scheme is not None
    multiple = scheme.column_multiple
    for start, stop in [(0, multiple), (multiple, 3 * multiple), (512 - multiple, 512)]:
        part = checkpoint.packed_slice(weight, CPU, 1, start, stop)
        assert part.shape == (96, stop - start)
        assert torch.equal(part.dequantise(torch.float32), values[:, start:stop])
