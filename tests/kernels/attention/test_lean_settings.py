"""The tiles, loads and parts of `A~` that lean decode attention chooses for a GPU. The tests need no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alspec.kernels.attention import dispatch
from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, _settings, _uses_tma, spec_parts
from alspec.kernels.attention.decode_quantised.quantised_decode import GPU_SETTINGS
from alspec.kernels.attention.dispatch import KVLayer, attend_workspace
from alspec.runtime.cache.quantised_cache import QuantisedCache


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], torch.device]]:
    """`gpu(major, shared memory)` pretends that there is a GPU of that compute capability, with 132 SMs."""

    def pretend(major: int, shared_memory: int) -> torch.device:
        properties = SimpleNamespace(
            major=major, multi_processor_count=132, shared_memory_per_block_optin=shared_memory
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
        _settings.cache_clear()
        return torch.device("cuda")

    yield pretend
    _settings.cache_clear()


@pytest.mark.parametrize(
    ("major", "shared_memory"), [(7, 65536), (8, 101376), (8, 166912), (9, 232448), (10, 232448), (12, 101376)]
)
@pytest.mark.parametrize("row_bytes", [32, 128, 256, 512])
def test_tiles_fit_into_shared_memory(
    major: int, shared_memory: int, row_bytes: int, gpu: Callable[[int, int], torch.device]
) -> None:
    """Every tile in flight needs K, V and 16 rows of q. All else needs 16 KiB."""
    block_n, long_run, num_stages, pdl = _settings(gpu(major, shared_memory), row_bytes, False)
    longest = 2 * block_n if long_run else block_n
    assert num_stages * (2 * longest + 16) * row_bytes + 16384 <= shared_memory
    assert block_n in (16, 32, 64, 128)
    assert 1 <= num_stages <= 3
    assert pdl == (major >= 9)


@pytest.mark.parametrize(
    ("major", "shared_memory", "head_dim", "expected"),
    [
        (9, 232448, 64, (128, 16, 3, True)),
        (9, 232448, 128, (64, 3, 3, True)),
        (9, 232448, 256, (64, 0, 2, True)),
        (8, 166912, 64, (128, 0, 3, False)),
        (8, 166912, 128, (128, 0, 2, False)),
        (10, 232448, 128, (64, 0, 2, True)),
    ],
)
def test_tiles_of_gpus(
    major: int,
    shared_memory: int,
    head_dim: int,
    expected: tuple[int, int, int, bool],
    gpu: Callable[..., torch.device],
) -> None:
    """Only Hopper has two kinds of tiles."""
    assert _settings(gpu(major, shared_memory), 2 * head_dim, False) == expected


@pytest.mark.parametrize(("head_dim", "expected"), [(64, (128, 16)), (128, (64, 3)), (256, (64, 0))])
def test_tiles_of_tma_copies(head_dim: int, expected: tuple[int, int], gpu: Callable[..., torch.device]) -> None:
    """Two tiles of K and two of V are in flight: 32 to 128 KB."""
    block_n, long_run, num_stages, pdl = _settings(gpu(9, 232448), 2 * head_dim, True)
    assert (block_n, long_run) == expected
    assert 2**15 <= 2 * num_stages * block_n * 2 * head_dim <= 2**17
    assert pdl


@pytest.mark.parametrize(
    ("major", "heads_per_kv", "head_dim", "dtype", "expected"),
    [
        (9, 4, 128, torch.bfloat16, True),
        (9, 16, 64, torch.float16, True),
        (9, 1, 256, torch.bfloat16, True),
        (9, 17, 128, torch.bfloat16, False),
        (9, 4, 32, torch.bfloat16, False),
        (9, 4, 100, torch.bfloat16, False),  # rows of 200 bytes
        (9, 4, 40, torch.bfloat16, True),
        (9, 4, 128, torch.float32, False),
        (8, 4, 128, torch.bfloat16, False),
        (10, 4, 128, torch.bfloat16, False),
    ],
)
def test_which_caches_tma_copies(
    major: int,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    expected: bool,
    gpu: Callable[..., torch.device],
) -> None:
    sizes = (heads_per_kv, head_dim, dtype)
    assert _uses_tma(gpu(major, 232448), *sizes) == expected
    assert not _uses_tma(torch.device("cpu"), *sizes)


def test_attention_leaves_the_spare_sms_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives run on the spare SMs during attention. Without a GPU there are four programs."""
    monkeypatch.setattr(dispatch, "num_sms", lambda _: 132)
    monkeypatch.setattr(LeanWorkspace, "allocate", lambda *sizes: sizes)
    layer = KVLayer(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))
    for device, spare_sms, programs in (("cuda", 0, 132), ("cuda", 20, 112), ("cpu", 20, 4)):
        sizes: Any = attend_workspace(layer, 8, torch.device(device), spare_sms)
        assert sizes == (1, 8, 2, 16, torch.device(device), programs)


@pytest.mark.parametrize(
    ("batch_size", "rows", "programs"),
    [
        (1, 1, 264),
        (1, 3, 256),  # 16 outputs: two bundles of two rows, 8 KV heads
        (1, 9, 240),
        (6, 5, 264),  # 144 outputs would leave 120 programs out
        (32, 5, 264),  # more outputs than programs
    ],
)
def test_programs_of_rows_over_a_quantised_cache(
    batch_size: int, rows: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many for each bundle of rows and KV head, unless that leaves out more than a fifth of them."""
    monkeypatch.setattr(dispatch, "num_sms", lambda _: 132)
    monkeypatch.setattr(dispatch, "quantised_settings", lambda _: GPU_SETTINGS)
    monkeypatch.setattr(LeanWorkspace, "allocate", lambda *sizes: sizes[-1])
    layer = QuantisedCache("turbo4", 1, batch_size, 8, 64, 128, torch.device("cpu")).layer(0)
    assert attend_workspace(layer, 32, torch.device("cuda"), rows=rows) == programs


@pytest.mark.parametrize(
    ("chunk_size", "batch_size", "heads", "kv_heads", "major", "expected"),
    [
        (128, 1, 32, 8, 9, 3),  # each part has a tile of 128 tokens
        (256, 1, 32, 8, 9, 5),
        (512, 1, 32, 8, 9, 5),
        (512, 1, 16, 4, 9, 5),
        (512, 1, 20, 4, 9, 3),
        (512, 1, 64, 8, 9, 3),
        (512, 1, 72, 8, 9, 1),
        (512, 1, 32, 32, 9, 1),  # 44 programs for the predictor of 32 heads
        (512, 2, 32, 8, 9, 1),
        (512, 1, 32, 8, 8, 1),
        (512, 1, 32, 8, 10, 1),
    ],
)
def test_the_number_of_parts(
    chunk_size: int,
    batch_size: int,
    heads: int,
    kv_heads: int,
    major: int,
    expected: int,
    gpu: Callable[[int, int], torch.device],
) -> None:
    sizes = (chunk_size, batch_size, heads, kv_heads, 128, torch.bfloat16)
    assert spec_parts(*sizes, gpu(major, 232448)) == expected
    assert spec_parts(*sizes, torch.device("cpu")) == 1
