"""Layers of a quantised cache, for the tests of the kernels that write into them."""

from __future__ import annotations

import torch

from alspec.kernels.kv_codec.formats import record_words
from alspec.kernels.kv_codec.quantised_layer import BLOCK, QuantisedLayer

__all__ = ["assert_same", "noisy_layer", "on_cpu"]


def noisy_layer(
    batch_size: int, bits: list[int], head_dim: int, num_blocks: int, device: torch.device, format: str = "flashq"
) -> QuantisedLayer:
    """A layer of noise. Its heads have `bits`, in reverse order in odd requests."""
    heads = len(bits)
    rows = torch.tensor([bits if request % 2 == 0 else bits[::-1] for request in range(batch_size)])
    sizes = torch.tensor([num_blocks * record_words(format, b, head_dim) for b in rows.flatten().tolist()])
    ends = sizes.cumsum(0)
    return QuantisedLayer(
        words=torch.randint(-(2**31), 2**31, (int(ends[-1]),), dtype=torch.int32).to(device),
        offset=(ends - sizes).view(batch_size, heads).to(device),
        bits=rows.to(device, torch.int32),
        scales=torch.full((batch_size, heads, num_blocks, 2), torch.nan, device=device),
        tail=torch.randint(-119, 120, (batch_size, heads, 2, BLOCK, head_dim), dtype=torch.int8).to(device),
        tail_scale=torch.rand(batch_size, heads, 2).to(device) + 0.01,
        format=format,
    )


def assert_same(found: QuantisedLayer, expected: QuantisedLayer) -> None:
    for name in expected.tensors:
        a, b = (layer.tensors[name].cpu() for layer in (found, expected))
        if a.is_floating_point():
            a, b = a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ"


def on_cpu(layer: QuantisedLayer) -> QuantisedLayer:
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in layer.tensors.items()}
    return QuantisedLayer(**tensors, format=layer.format)
