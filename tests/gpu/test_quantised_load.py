"""Quantised weights that are dequantised on the GPU have the values of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantised_folders import FORMATS, save_quantised

from alspec.config import EngineConfig
from alspec.models.checkpoint.source import model_config, open_checkpoint
from alspec.models.llama import Shard, load_weights


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_of_the_cpu(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_quantised(tmp_path, name)
    settings = EngineConfig(model=tmp_path)
    config = model_config(settings)
    checkpoint = open_checkpoint(settings, config)
    shard = Shard(1, 2, 1, 2)
    host, device = (load_weights(checkpoint, config, shard, dtype, torch.device(kind)) for kind in ("cpu", "cuda"))
    for expected, found in zip(host.layers, device.layers, strict=True):
        for part, tensor in expected.tensors.items():
            assert found.tensors[part].is_cuda
            assert torch.equal(found.tensors[part].cpu(), tensor), part
