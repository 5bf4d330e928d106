"""Records of the quantised cache: every code and parameter lies where the layout says, and comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alspec.kernels.flashq_layout import BlockCodes, code_shift, pack_record, record_words, unpack_record

SHAPES = [(4, 128), (2, 128), (4, 64), (2, 64)]


def draw(lead: tuple[int, ...], bits: int, head_dim: int, seed: int) -> BlockCodes:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (*lead, *shape), generator=generator)

    return BlockCodes(integers(0, 2**bits, 64, head_dim), integers(1, 256, head_dim), integers(-128, 128, head_dim))


@pytest.mark.parametrize(("bits", "head_dim"), SHAPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 5)])
def test_records_come_back(bits: int, head_dim: int, lead: tuple[int, ...]) -> None:
    k, v = draw(lead, bits, head_dim, 1), draw(lead, bits, head_dim, 2)
    words = pack_record(k, v, bits)
    assert words.dtype == torch.int32
    assert words.shape == (*lead, record_words(bits, head_dim))
    for found, expected in zip(unpack_record(words, bits, head_dim), (k, v), strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("bits", "head_dim"), SHAPES)
def test_every_lane_loads_its_operand_registers(bits: int, head_dim: int) -> None:
    """Word by word, with the tile shape of the instruction spelt out index by index."""
    k, v = draw((), bits, head_dim, 3), draw((), bits, head_dim, 4)
    words = [word & 0xFFFFFFFF for word in pack_record(k, v, bits).tolist()]
    shift = code_shift(bits, head_dim).tolist()
    tiles = head_dim // 16
    rows, columns = {"k": 4, "v": tiles}, {"k": tiles, "v": 4}
    size = 2 * head_dim * bits
    for side, codes, begin in (("k", k.codes, 0), ("v", v.codes.T, size + head_dim // 2)):
        loads: dict[tuple[int, int], set[int]] = {}
        for row_tile in range(rows[side]):
            for column_tile in range(columns[side]):
                channel_tile, token_tile = (column_tile, row_tile) if side == "k" else (row_tile, column_tile)
                per_half = min(16 // bits, tiles)
                over_words, in_half = tiles // per_half, 16 // bits // per_half
                load = (
                    token_tile // in_half * over_words + channel_tile % over_words
                    if side == "k"
                    else channel_tile % over_words * (4 // in_half) + token_tile // in_half
                )
                field = token_tile % in_half * per_half + channel_tile // over_words
                loads.setdefault((load, field), set()).add(row_tile * 100 + column_tile)
                for lane in range(32):
                    g, t = lane // 4, lane % 4
                    for register in range(4):
                        word = words[begin + (load * 32 + lane) * 4 + register]
                        for i in range(2):
                            row = 16 * row_tile + 8 * (register % 2) + g
                            column = 16 * column_tile + 8 * (register // 2) + 2 * t + i
                            code = word >> 16 * i + bits * field & 2**bits - 1
                            assert code == codes[row, column]
                            channel = column if side == "k" else row
                            assert bits * field % 8 == shift[channel]
        assert all(len(places) == 1 for places in loads.values())
        assert len(loads) == rows[side] * columns[side]


@pytest.mark.parametrize(("bits", "head_dim"), SHAPES)
def test_parameters_lie_where_lanes_use_them(bits: int, head_dim: int) -> None:
    k, v = draw((), bits, head_dim, 5), draw((), bits, head_dim, 6)
    k_part, v_part = pack_record(k, v, bits).chunk(2)
    k_params, v_params = (part[2 * head_dim * bits :].view(torch.uint8).tolist() for part in (k_part, v_part))
    tiles = head_dim // 16
    for channel in range(head_dim):
        tile, rest = divmod(channel, 16)
        at_k = ((rest % 8 // 2 * tiles + tile) * 2 + rest // 8) * 2 + rest % 2
        at_v = (rest % 8 * tiles + tile) * 2 + rest // 8
        assert k_params[at_k] == k.s_int[channel]
        assert k_params[head_dim + at_k] == k.z[channel] + 128
        assert v_params[at_v] == v.s_int[channel]
        assert v_params[head_dim + at_v] == v.z[channel] + 128


def test_sizes() -> None:
    assert [record_words(bits, head_dim) for bits, head_dim in SHAPES] == [2176, 1152, 1088, 576]
    with pytest.raises(ValueError, match="head_dim"):
        record_words(4, 96)
    with pytest.raises(ValueError, match="bits"):
        record_words(3, 128)
