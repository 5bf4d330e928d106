"""Kernels compiled side by side, before they are launched."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
import triton
from triton.runtime._async_compile import active_mode

from alspec.kernels.bench.probes import _increment_kernel
from alspec.kernels.common import jit_launch as launch_module
from alspec.kernels.common.jit_launch import compiling, jit_launch, raise_smem_limit

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class FakeKernel:
    """Acts as a Triton kernel in `compiling`, without a GPU: each compilation waits until all others have begun."""

    def __init__(self, together: threading.Barrier) -> None:
        self.together = together
        self.cache: dict[int, Any] = {}
        self.launched: list[int] = []
        self.loaded: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launched.append

    def warmup(self, size: int, grid: tuple[int, ...]) -> Any:
        """Submit a variant that is not compiled yet, as `JITFunction.run` does."""
        if size in self.cache:
            return self.cache[size]
        compiled = partial(self.cache.__setitem__, size)
        return active_mode.get().submit(size, partial(self._compile, size), compiled)

    def _compile(self, size: int) -> Any:
        self.together.wait(timeout=30)
        if size < 0:
            raise ValueError("no such size")
        kernel = self

        class Compiled:
            @property
            def run(self) -> None:
                kernel.loaded.append(size)

        return Compiled()


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_variants_compile_in_parallel_and_load_once(no_device: None) -> None:
    kernel = FakeKernel(threading.Barrier(3))  # compiled one after another, they would time out
    for _ in range(2):  # the second time, all are compiled
        with compiling():
            for size in (1, 2, 2, 3, 1):
                jit_launch(kernel, (1,))(size)
    assert sorted(kernel.loaded) == [1, 1, 2, 2, 3, 3]
    assert not kernel.launched
    jit_launch(kernel, (1,))(2)
    assert kernel.launched == [2]


def test_a_compilation_error_is_raised_and_ends_the_mode(no_device: None) -> None:
    kernel = FakeKernel(threading.Barrier(2))

    def compile_both() -> None:
        with compiling():
            for size in (-1, 1):
                jit_launch(kernel, (1,))(size)

    with pytest.raises(ValueError, match="no such size"):
        compile_both()
    assert active_mode.get() is None
    jit_launch(kernel, (1,))(5)
    assert kernel.launched == [5]


def test_the_limit_of_shared_memory_is_raised_when_the_kernel_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int | None, int, int]] = []

    class Driver:
        def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:  # noqa: N802 (CUDA's name)
            calls.append((function.value, attribute, value))

    monkeypatch.setattr(launch_module, "_driver", Driver)
    monkeypatch.setattr(triton.knobs.runtime.kernel_load_end_hook, "calls", [])
    raise_smem_limit(_increment_kernel)
    for function, name in ((1, "other_kernel"), (2, "_increment_kernel")):
        triton.knobs.runtime.kernel_load_end_hook(None, function, name, {}, "hash")
    assert calls == [(2, 8, 48 * 1024)]


@pytest.mark.gpu
@needs_gpu
def test_kernels_compile_once_and_launch_later(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"]))
    x = torch.ones(1000, device="cuda")
    outs = [torch.zeros_like(x) for _ in range(3)]
    sizes = [64, 128, 128]  # two variants

    def run() -> None:
        for out, size in zip(outs, sizes, strict=True):
            jit_launch(_increment_kernel, (triton.cdiv(1000, size),))(x, out, 1000, BLOCK=size, PDL=False)

    with compiling():
        run()
    torch.cuda.synchronize()
    assert all(bool((out == 0).all()) for out in outs)
    assert len(compiled) == 2
    run()
    assert all(bool((out == 2).all()) for out in outs)
    assert len(compiled) == 2


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_that_cannot_compile_raises() -> None:
    with pytest.raises(Exception, match="BLOCK"), compiling():
        jit_launch(_increment_kernel, (1,))(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"), 4, PDL=False)
    x = torch.ones(4, device="cuda")
    jit_launch(_increment_kernel, (1,))(x, x, 4, BLOCK=16, PDL=False)
    assert (x == 2).all()
