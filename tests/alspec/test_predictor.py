"""The predictor reads sink and window, each token once."""

import pytest
import torch

from alspec.predictor import CHUNK_SIZES, KV_TILE, first_visible, predictor_ranges


def read_tokens(n: int, chunk_size: int) -> list[int]:
    sink_end, window_start = predictor_ranges(torch.tensor([n]), chunk_size)
    return [*range(int(sink_end)), *range(int(window_start), n)]


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_every_length_reads_sink_and_widened_window_once(chunk_size: int) -> None:
    for n in range(1, 3 * chunk_size + 2 * KV_TILE + 2):
        expected = [t for t in range(n) if t < chunk_size or t // KV_TILE >= (n - chunk_size) // KV_TILE]
        assert read_tokens(n, chunk_size) == expected, n


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("offset", [-1, 0, 1, KV_TILE - 1])
def test_everything_is_read_up_to_two_chunks_and_a_tile(chunk_size: int, offset: int) -> None:
    n = 2 * chunk_size + offset
    assert read_tokens(n, chunk_size) == list(range(n))


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_a_gap_opens_at_two_chunks_and_a_tile(chunk_size: int) -> None:
    n = 2 * chunk_size + KV_TILE
    assert len(read_tokens(n, chunk_size)) == n - KV_TILE


def test_window_holds_s_to_s_plus_63_tokens() -> None:
    seq_lens = torch.arange(2 * 256 + KV_TILE, 5000)
    _, window_start = predictor_ranges(seq_lens, 256)
    size = seq_lens - window_start
    assert int(size.min()) == 256
    assert int(size.max()) == 256 + KV_TILE - 1
    assert bool((window_start % KV_TILE == 0).all())


@pytest.mark.parametrize("n", [0, 1, 63, 64, 127, 128])
def test_up_to_one_chunk_the_window_is_empty(n: int) -> None:
    sink_end, window_start = predictor_ranges(torch.tensor(n), 128)
    assert int(sink_end) == int(window_start) == n


@pytest.mark.parametrize("sliding_window", [1, 63, 64, 65, 127, 128, 129, 200, 320, 321, 500])
def test_ranges_of_a_sliding_window(sliding_window: int) -> None:
    """The ranges divide the visible tokens into sink, window and the rest; the rest is whole blocks."""
    for n in range(1, 800):
        sink_end, window_start = (int(end) for end in predictor_ranges(torch.tensor(n), 128, sliding_window))
        start = int(first_visible(torch.tensor(n), sliding_window))
        assert start == max(0, n - sliding_window)
        for t in range(start, n):
            near = t < 128 or t // KV_TILE >= (n - 128) // KV_TILE
            assert (t < sink_end or t >= window_start) == near, (n, t)
        if sink_end < window_start:
            assert sink_end % KV_TILE == window_start % KV_TILE == 0
            assert sink_end + KV_TILE > start, "each block between has a visible token"


def test_each_layer_has_its_own_sliding_window() -> None:
    seq_lens, windows = torch.tensor([100, 700]), torch.tensor([[130], [10**6]])
    found = predictor_ranges(seq_lens, 128, windows)
    for layer, window in enumerate((130, None)):
        for ends, expected in zip(found, predictor_ranges(seq_lens, 128, window), strict=True):
            assert torch.equal(ends[layer], expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_shape_and_dtype_are_kept_and_the_input_is_not_changed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    seq_lens = torch.randint(1, 131072, shape, dtype=dtype)
    before = seq_lens.clone()
    for result in predictor_ranges(seq_lens, 512):
        assert result.shape == seq_lens.shape
        assert result.dtype == dtype
    assert torch.equal(seq_lens, before)


@pytest.mark.parametrize("chunk_size", [0, -64, 65, 100])
def test_chunk_size_must_be_whole_tiles(chunk_size: int) -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        predictor_ranges(torch.tensor([10]), chunk_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_seq_lens_must_be_int32_or_int64(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="seq_lens"):
        predictor_ranges(torch.ones(3, dtype=dtype), 128)
