"""Kernels compiled side by side, before they are launched."""

import pytest
import torch
import triton

from alspec.kernels.launch import compiling, launch
from alspec.kernels.probes import _increment_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_kernels_are_compiled_once_and_launched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    x = torch.ones(1000, device="cuda")
    outs = [torch.zeros_like(x) for _ in range(3)]
    sizes = [64, 128, 128]  # two variants

    def run() -> None:
        for out, size in zip(outs, sizes, strict=True):
            launch(_increment_kernel, (triton.cdiv(1000, size),))(x, out, 1000, BLOCK=size, PDL=False)

    with compiling():
        run()
    torch.cuda.synchronize()
    assert all(bool((out == 0).all()) for out in outs)
    assert len(compiled) == 2
    run()
    assert all(bool((out == 2).all()) for out in outs)
    assert len(compiled) == 2


def test_what_cannot_be_compiled_is_told() -> None:
    with pytest.raises(Exception, match="BLOCK"), compiling():
        launch(_increment_kernel, (1,))(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"), 4, PDL=False)
    x = torch.ones(4, device="cuda")
    launch(_increment_kernel, (1,))(x, x, 4, BLOCK=16, PDL=False)
    assert (x == 2).all()
