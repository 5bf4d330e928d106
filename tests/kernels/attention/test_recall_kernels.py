"""Recalled blocks in decode attention: A~ over lists, weights of blocks, and the choice of lists, against fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import flashq_launch
import lean_launch
import pytest
import torch
from attention_launch import HAS_CUDA, AttentionLaunch, S
from tiers import fast
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import RecallBuffers
from alspec.kernels.attention.recall import (
    RecallState,
    choose_recall_lists,
    launch_list_choice,
    recall_lists_ref,
    take_recall_lists,
)
from alspec.kernels.attention.torch_attention import combine_partials, predictor_attention
from alspec.kernels.attention.torch_recall import recalled_attention, rest_block_lse
from alspec.predictor import block_masses, predictor_ranges, recall_lists

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The kernel runs in the interpreter, or compiled on a GPU."""
    return torch.device(request.param)


def random_lists(launch: AttentionLaunch, count: int, chunk_size: int) -> Tensor:
    """Some blocks between sink and window for each KV head: all of `count`, fewer, or none."""
    generator = torch.Generator().manual_seed(count)
    batch, num_kv_heads = launch.k.shape[:2]
    lists = torch.full((batch, num_kv_heads, count), -1, dtype=torch.int32)
    for request, n in enumerate(launch.seq_lens.tolist()):
        # As chosen one token before: the first of these blocks may have left a sliding window.
        before = torch.tensor(max(1, n - 1))
        sink, window = (int(end) for end in predictor_ranges(before, chunk_size, launch.sliding_window))
        for head in range(num_kv_heads):
            between = torch.arange(sink, window, 64) // 64 if sink < window else torch.arange(0)
            wanted = count if head % 2 == 0 else int(torch.randint(count + 1, (), generator=generator))
            chosen = between[torch.randperm(len(between), generator=generator)[:wanted]].sort().values
            lists[request, head, : len(chosen)] = chosen.int()
    return lists


def recalling(launch: AttentionLaunch, count: int, parts: int = 1) -> None:
    """Give the launch random lists, and `A~` in parts."""
    spec, q = launch.speculation, launch.q
    assert spec is not None
    batch, num_kv_heads, num_tokens = launch.k.shape[:3]
    recall = min(count, 3)
    total = parts + recall
    lists = random_lists(launch, count, spec.chunk_size).to(q.device)
    block_lse = torch.full(
        (batch, num_kv_heads, -(-num_tokens // 64), 4, q.shape[1] // num_kv_heads), -math.inf, device=q.device
    )
    launch.speculation = replace(
        spec,
        spec_out=torch.empty(total, *q.shape, dtype=torch.int64, device=q.device),
        spec_lse=torch.empty(total, *q.shape[:2], dtype=torch.int64, device=q.device),
        recall=RecallBuffers(lists, block_lse, recall),
    )


def scores_of(launch: AttentionLaunch) -> tuple[Tensor, Tensor]:
    """Scores [B, Hkv, G, N] in fp64, base 2, -inf behind each length; and which tokens are there."""
    q, k = launch.q.double().cpu(), launch.k.double().cpu()
    token, n = torch.arange(k.shape[2]), launch.seq_lens.cpu()[:, None]
    there = (token < n) & (token >= n - (launch.sliding_window or k.shape[2]))
    rows = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bhgd,bhtd->bhgt", rows, k.nan_to_num()) * launch.sm_scale * math.log2(math.e)
    return scores.masked_fill(~there[:, None, None], -math.inf), there


def check(launch: AttentionLaunch, tolerance: float) -> None:
    """Compare `A`, `A~`, the sums and the weights of blocks with masked attention in fp64."""
    spec = launch.speculation
    assert spec is not None
    assert spec.recall is not None
    scores, there = scores_of(launch)
    values = launch.v.double().cpu().nan_to_num()[:, :, None]
    lists = spec.recall.lists.cpu()
    batch, num_tokens = launch.k.shape[0], launch.k.shape[2]
    sink, window = predictor_ranges(launch.seq_lens.cpu(), spec.chunk_size, launch.sliding_window)
    token = torch.arange(num_tokens)
    near = (token < sink[:, None]) | (token >= window[:, None])
    is_listed = (lists[..., None] == token // 64).any(2)
    read = (near[:, None] | is_listed) & there[:, None]

    def attend(scores: Tensor) -> Tensor:
        weights = (scores * math.log(2)).softmax(-1)
        return (weights[..., None] * values).sum(-2).flatten(1, 2)

    spec_out, out = attend(scores.masked_fill(~read[:, :, None], -math.inf)), attend(scores)
    size = out.abs().max()
    assert (launch.out.cpu().double() - out).abs().max() < tolerance * size
    assert (launch.spec_out.cpu().double() - spec_out).abs().max() < tolerance * size
    dist, norm = ((spec_out - out) ** 2).sum((1, 2)).sqrt(), (out**2).sum((1, 2)).sqrt()
    found = spec.sums.sum(1).cpu().double().sqrt()
    torch.testing.assert_close(found[:, 1], norm, rtol=2 * tolerance, atol=1e-6)
    torch.testing.assert_close(found[:, 0], dist, rtol=8 * tolerance, atol=float(tolerance * norm.max()))

    block_lse = torch.logsumexp(spec.recall.block_lse.cpu().double() * math.log(2), -2) / math.log(2)
    padded = torch.nn.functional.pad(scores, (0, -num_tokens % 64), value=-math.inf).unflatten(-1, (-1, 64))
    expected = (torch.logsumexp(padded * math.log(2), -1) / math.log(2)).transpose(2, 3)  # [B, Hkv, NB, G]
    block = torch.arange(expected.shape[2])
    is_rest = (block * 64 >= sink[:, None]) & (block * 64 + 64 <= window[:, None])
    for request in range(batch):
        inside = is_rest[request]
        if inside.any():
            difference = block_lse[request, :, inside] - expected[request, :, inside]
            assert difference.abs().max() < 64 * tolerance


SHAPES = [
    ((700,), 4, 2, 64, 3), ((1024,), 3, 1, 128, 5), ((64, 385, 900), 2, 2, 64, 2), ((321,), 1, 3, 64, 7),
    ((1500, 500), 8, 1, 128, 16), ((257,), 2, 2, 80, 1),
]  # fmt: skip


@pytest.mark.parametrize("num_programs", fast([1, 7, 40], keep=[7]))
@pytest.mark.parametrize("shape", fast(list(range(6)), keep=[0, 1, 2, 3]))
def test_lean_attention(device: torch.device, shape: int, num_programs: int) -> None:
    lengths, ratio, num_kv_heads, head_dim, count = SHAPES[shape]
    dtypes = [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]
    for dtype in dtypes:
        launch = lean_launch.Launch.draw(lengths, ratio, num_kv_heads, head_dim, device, num_programs, S, dtype)
        recalling(launch, count, parts=2 if len(lengths) == 1 and num_programs > 1 else 1)
        launch.run()
        check(launch, TOLERANCE[dtype])


@pytest.mark.parametrize("num_programs", fast([1, 7, 60], keep=[60]))
@pytest.mark.parametrize("codec", fast(["turbo4", "turbo-mixed", "turboquant3", "hybrid-k4v2"], keep=["turbo-mixed"]))
@pytest.mark.parametrize("shape", fast(list(range(5)), keep=[0, 1, 2]))
def test_quantised_attention(device: torch.device, shape: int, codec: str, num_programs: int) -> None:
    lengths, ratio, num_kv_heads, head_dim, count = SHAPES[shape]
    for num_warps in (1, 4):
        launch = flashq_launch.draw(
            lengths, ratio, num_kv_heads, head_dim, device, num_programs, S, codec, num_warps=num_warps
        )
        recalling(launch, count, parts=2 if len(lengths) == 1 and ratio <= 4 else 1)
        launch.run()
        check(launch, 2e-3)


# The window begins at token 192: a block that may be in the lists has just left it; one token earlier and later; within
# the sink, within the recent window, and in a batch at different places.
SLIDING = [
    ((900,), 708), ((900,), 709), ((900,), 707), ((700,), 650), ((700,), 130), ((1100, 385, 900), 513), ((900, 64), 385)
]  # fmt: skip


@pytest.mark.parametrize("num_programs", fast([1, 9], keep=[9]))
@pytest.mark.parametrize(("lengths", "sliding_window"), fast(SLIDING, keep=[SLIDING[i] for i in (0, 1, 4, 5)]))
@pytest.mark.parametrize("kind", ["lean", "turbo-mixed"])
def test_a_sliding_window(
    device: torch.device, kind: str, lengths: tuple[int, ...], sliding_window: int, num_programs: int
) -> None:
    launch: flashq_launch.Launch | lean_launch.Launch
    if kind == "lean":
        launch = lean_launch.Launch.draw(lengths, 3, 2, 64, device, num_programs, S)
    else:
        launch = flashq_launch.draw(lengths, 3, 2, 64, device, num_programs, S, kind)
    launch.slide(sliding_window)
    recalling(launch, 5, parts=2 if len(lengths) == 1 and num_programs > 1 else 1)
    launch.run()
    check(launch, TOLERANCE[torch.float32] if kind == "lean" else 2e-3)


@pytest.mark.parametrize("is_quantised", [False, True])
def test_two_launches_give_the_result_of_one(device: torch.device, is_quantised: bool) -> None:
    """The predictor alone writes A~ as one tensor, from its parts."""
    launch: flashq_launch.Launch | lean_launch.Launch
    if is_quantised:
        launch = flashq_launch.draw((65, 700, 319, 1), 2, 2, 64, device, 9, S)
    else:
        launch = lean_launch.Launch.draw((65, 700, 319, 1), 2, 2, 64, device, 9, S)
    recalling(launch, 3)
    launch.run()
    assert launch.speculation is not None
    one = [output.clone() for output in (launch.out, launch.lse, launch.spec_out, launch.speculation.sums)]
    spec_out = torch.empty_like(launch.out)
    launch.speculation = replace(launch.speculation, spec_out=spec_out, epoch=None, spec_lse=None)
    if isinstance(launch, flashq_launch.Launch):
        launch.run("predictor", "rest")
    else:
        launch.in_two = True
        launch.run()
    check(launch, 2e-3)
    for found, expected in zip(launch.outputs(), one, strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(HAS_CUDA, reason="compares with the interpreted kernel")
@pytest.mark.parametrize("sliding_window", [None, 300, 315, 130])
def test_torch_operators(sliding_window: int | None) -> None:
    launch = lean_launch.Launch.draw((700, 385, 64), 3, 2, 80, torch.device("cpu"), 4, S)
    if sliding_window is not None:
        launch.slide(sliding_window)
    recalling(launch, 3)
    spec = launch.speculation
    assert spec is not None
    assert spec.recall is not None
    args = launch.q, launch.k, launch.v, launch.seq_lens
    how = launch.sm_scale, "exact", sliding_window
    window = predictor_attention(*args, S, *how)
    recalled = recalled_attention(*args, spec.recall.lists, *how)
    spec_out, lse = combine_partials(*(torch.stack(part) for part in zip(window, recalled, strict=True)))
    rest_block_lse(*args[:2], launch.seq_lens, S, launch.sm_scale, "exact", spec.recall.block_lse, sliding_window)
    by_operators = spec.recall.block_lse.clone()
    launch.run()
    by_kernel = torch.logsumexp(spec.recall.block_lse * math.log(2), -2)
    torch.testing.assert_close(torch.logsumexp(by_operators * math.log(2), -2), by_kernel, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(launch.spec_out, spec_out.double(), rtol=1e-5, atol=1e-6)
    check(launch, 1e-5)
    assert lse.isfinite().all()


@pytest.mark.parametrize("windows", [(), (None, 333), (129, 600)])
@pytest.mark.parametrize("seed", range(6))
def test_choice_of_lists(device: torch.device, seed: int, windows: tuple[int | None, ...]) -> None:
    """The kernel agrees with its oracle, also on ties, short and empty rests, and lists longer than the rest."""
    generator = torch.Generator().manual_seed(seed)
    num_layers, batch, num_kv_heads, heads = 2, 3, 2, (1, 3, 4, 8)[seed % 4]
    capacity, count = int(torch.randint(400, 2000, (), generator=generator)), (1, 3, 16, 5)[seed % 4]
    lengths = torch.randint(1, capacity + 1, (batch,), generator=generator)
    state = RecallState.allocate(
        num_layers, batch, num_kv_heads * heads, num_kv_heads, capacity, count, 1, device, windows
    )
    assert (state.lists == -1).all()
    coarse = torch.randint(-6, 1, state.block_lse.shape, generator=generator).float()
    state.block_lse.copy_(coarse if seed % 2 else coarse + torch.rand(coarse.shape, generator=generator))
    state.lse.copy_(torch.randint(0, 3, state.lse.shape, generator=generator).float())
    choose_recall_lists(state, lengths.int().to(device), S)
    own_windows = None if state.windows is None else state.windows.cpu()
    expected = recall_lists_ref(state.block_lse.cpu(), state.lse.cpu(), lengths, S, count, own_windows)
    assert torch.equal(state.lists.cpu(), expected)
    launched, peer = torch.full_like(state.lists, -7), torch.full_like(state.lists, -7)
    launch_list_choice(
        state.block_lse, state.lse, lengths.int().to(device), S, launched, peer, None, windows=state.windows
    )
    assert torch.equal(launched.cpu(), expected)
    assert torch.equal(peer.cpu(), expected)
    for layer in range(num_layers):
        for request, n in enumerate(lengths.tolist()):
            sliding_window = windows[layer] if windows else None
            sink, window = (int(end) for end in predictor_ranges(torch.tensor(n), S, sliding_window))
            blocks = range(sink // 64, window // 64) if sink < window else range(0)
            for head in range(num_kv_heads):
                own = slice(head * heads, (head + 1) * heads)
                mass = torch.exp2(state.block_lse[layer, request, head].cpu() - state.lse[layer, request, own].cpu())
                of_block = mass.sum(1).amax(1)
                best = sorted(blocks, key=lambda block: (-float(of_block[block]), block))[:count]
                assert expected[layer, request, head].tolist() == sorted(best) + [-1] * (count - len(best))


@pytest.mark.parametrize(("rows", "together"), [(5, 5), (5, 2), (5, 1), (16, 4), (7, 3)])
def test_one_row_of_each_request_chooses(rows: int, together: int, device: torch.device) -> None:
    """Wherever it is: in a whole bundle, or in the last one, which may have fewer rows. Others choose other blocks."""
    generator = torch.Generator().manual_seed(rows + together)
    num_layers, batch, kv_heads, heads, capacity, count = 2, 3, 2, 3, 1500, 4
    blocks, bundles = -(-capacity // 64), -(-rows // together)

    def random(*shape: int) -> torch.Tensor:
        return 6 * torch.rand(shape, generator=generator)

    by_row = random(num_layers, batch, bundles * together, kv_heads, blocks, 4, heads)
    lse = random(num_layers, batch, rows, kv_heads * heads)
    lengths = torch.randint(600, capacity + 1, (batch,), generator=generator)
    stored = by_row.unflatten(2, (bundles, together)).permute(0, 1, 2, 4, 5, 6, 3, 7).flatten(6).flatten(1, 2)
    for chosen in (torch.tensor([0, rows - 1, 1]), torch.tensor([rows - 1, rows // 2, rows - 2])):
        lists = torch.full((num_layers, batch, kv_heads, count), -7, dtype=torch.int32, device=device)
        launch_list_choice(
            stored.contiguous().to(device), lse.flatten(1, 2).to(device), lengths.int().to(device), S, lists,
            chosen_rows=chosen.int().to(device), rows=rows, together=together,
        )  # fmt: skip
        requests = torch.arange(batch)
        expected = recall_lists_ref(by_row[:, requests, chosen], lse[:, requests, chosen], lengths, S, count)
        assert torch.equal(lists.cpu(), expected)


def test_lists_follow_from_the_attention(device: torch.device) -> None:
    """What attention leaves gives the lists of the softmax weights themselves."""
    launch = lean_launch.Launch.draw((1200, 777), 3, 2, 64, device, 9, S)
    recalling(launch, 4)
    launch.run()
    assert launch.speculation is not None
    assert launch.speculation.recall is not None
    found = recall_lists_ref(launch.speculation.recall.block_lse.cpu(), launch.lse.cpu(), launch.seq_lens.cpu(), S, 4)
    scores, _ = scores_of(launch)
    weights = (scores * math.log(2)).softmax(-1)
    masses = block_masses(weights, torch.arange(weights.shape[-1]) // 64, -(-weights.shape[-1] // 64))
    sink_end, window_start = predictor_ranges(launch.seq_lens.cpu(), S)
    assert torch.equal(found, recall_lists(masses, sink_end[:, None], window_start[:, None], 4))


def test_lists_of_the_senders_go_to_both(device: torch.device) -> None:
    state = RecallState.allocate(3, 1, 4, 2, 900, 4, 1, device)
    state.block_lse.copy_(torch.rand(state.block_lse.shape))
    peer, senders = torch.full_like(state.lists, -7), torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    choose_recall_lists(
        state, torch.tensor([900], dtype=torch.int32, device=device), S, peer_lists=peer, senders=senders
    )
    assert torch.equal(peer[::2], state.lists[::2])
    assert (state.lists[1] == -1).all()
    assert (peer[1] == -7).all()


@pytest.mark.parametrize("epoch", [6, 7, -1, 2**31 - 1, -(2**31)])
def test_lists_alternate_between_two_halves(epoch: int, device: torch.device) -> None:
    """A step reads what the step before has written, also when the counter of steps has wrapped."""
    batch, recall = 3, 5
    state = RecallState.allocate(9, batch, 16, 16, 900, recall, 1, device)
    halves = torch.randint(0, 99, (2, *state.lists.shape), dtype=torch.int32, device=device)
    state.block_lse.copy_(torch.rand(state.block_lse.shape))
    seq_lens = torch.tensor([900, 643, 777], dtype=torch.int32, device=device)
    number, next_half, kept = seq_lens.new_full((1,), epoch), seq_lens.new_full((1,), -7), torch.zeros_like(seq_lens)
    before = halves.clone()
    take_recall_lists(halves, number, seq_lens, state.lists, next_half, kept)
    assert torch.equal(state.lists, before[epoch % 2])
    assert torch.equal(kept, seq_lens)
    peer = torch.full_like(halves, -7)
    taken = state.lists.clone()
    choose_recall_lists(state, kept, S, lists=halves, peer_lists=peer, half=next_half)
    launched = torch.full_like(halves, -7)
    launch_list_choice(state.block_lse, state.lse, kept, S, launched, half=next_half)
    expected = recall_lists_ref(state.block_lse.cpu(), state.lse.cpu(), seq_lens.cpu(), S, recall)
    for written in (halves, peer, launched):
        assert torch.equal(written[(epoch + 1) % 2].cpu(), expected)
    assert torch.equal(halves[epoch % 2], before[epoch % 2])
    assert (peer[epoch % 2] == -7).all()
    assert (launched[epoch % 2] == -7).all()
    assert torch.equal(state.lists, taken)
