"""Records of the quantised cache: every code and parameter lies where the layout says, and unpacks to itself."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from alspec.kernels.kv_codec.flashq.layout import BlockCodes, code_shift, pack_side, unpack_side
from alspec.kernels.kv_codec.formats import record_words

SHAPES = [(4, 128), (2, 128), (4, 64), (2, 64)]


def pack_record(k: BlockCodes, v: BlockCodes, bits: int) -> Tensor:
    return torch.cat([pack_side(k, bits, is_v=False), pack_side(v, bits, is_v=True)], -1)


def draw(lead: tuple[int, ...], bits: int, head_dim: int, seed: int) -> BlockCodes:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (*lead, *shape), generator=generator)

    return BlockCodes(integers(0, 2**bits, 64, head_dim), integers(1, 256, head_dim), integers(-128, 128, head_dim))


@pytest.mark.parametrize(("bits", "head_dim"), SHAPES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 5)])
def test_a_record_unpacks_to_what_was_packed(bits: int, head_dim: int, lead: tuple[int, ...]) -> None:
    k, v = draw(lead, bits, head_dim, 1), draw(lead, bits, head_dim, 2)
    words = pack_record(k, v, bits)
    assert words.dtype == torch.int32
    assert words.shape == (*lead, record_words("flashq", bits, head_dim))
    for is_v, (side, expected) in enumerate(zip(words.chunk(2, -1), (k, v), strict=True)):
        found = unpack_side(side, bits, head_dim, bool(is_v))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("bits", "head_dim"), SHAPES)
def test_every_lane_loads_its_operand_registers(bits: int, head_dim: int) -> None:
    """Checks each code by the index formulas of the instruction's operand tiles."""
    k, v = draw((), bits, head_dim, 3), draw((), bits, head_dim, 4)
    words = [word & 0xFFFFFFFF for word in pack_record(k, v, bits).tolist()]
    shift = code_shift(bits, head_dim).tolist()
    tiles = head_dim // 16
    per_half = min(16 // bits, tiles)
    over_words, in_half = tiles // per_half, 16 // bits // per_half
    places = set()
    for token_tile, channel_tile, lane, register, i in product(range(4), range(tiles), range(32), range(4), range(2)):
        load = token_tile // in_half * over_words + channel_tile % over_words
        bit = 16 * i + bits * (token_tile % in_half * per_half + channel_tile // over_words)
        places.add((load, lane, register, bit))
        token = 16 * token_tile + 8 * (register % 2) + lane // 4
        channel = 16 * channel_tile + 8 * (register // 2) + 2 * (lane % 4) + i
        code = words[(load * 32 + lane) * 4 + register] >> bit & 2**bits - 1
        assert code == k.codes[token, channel]
        assert bit % 8 == shift[channel]
    assert len(places) == 64 * head_dim
    begin = 2 * head_dim * bits + head_dim // 2
    places.clear()
    for token_tile, channel_tile, lane, register, i in product(range(2), range(tiles), range(32), range(4), range(4)):
        load = 2 * (channel_tile // (8 // bits)) + token_tile
        bit = 8 * i + bits * (channel_tile % (8 // bits))
        places.add((load, lane, register, bit))
        token = 32 * token_tile + 16 * (register // 2) + 8 * (i % 2) + 2 * (lane % 4) + i // 2
        channel = 16 * channel_tile + 8 * (register % 2) + lane // 4
        assert words[begin + (load * 32 + lane) * 4 + register] >> bit & 2**bits - 1 == v.codes[token, channel]
    assert len(places) == 64 * head_dim


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


def test_the_size_of_a_record() -> None:
    assert [record_words("flashq", bits, head_dim) for bits, head_dim in SHAPES] == [2176, 1152, 1088, 576]
    with pytest.raises(ValueError, match="head_dim"):
        record_words("flashq", 4, 96)
    with pytest.raises(ValueError, match="bits"):
        record_words("flashq", 3, 128)
