"""Groups, pairs and shards of ranks; the choice of mode, device and links (runtime/engine/choices.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.engine.choices import (
    check_links,
    choose_device,
    choose_graph,
    choose_mode,
    is_linked,
    peer_memory_candidates,
)
from alspec.runtime.engine.loading import take_device


def model(num_qo_heads: int = 8, num_kv_heads: int = 4) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        vocab_size=301,
    )


def ranks(world_size: int, num_groups: int) -> list[Placement]:
    return [Placement(rank, world_size, rank, world_size, num_groups) for rank in range(world_size)]


def test_two_groups_of_two_ranks() -> None:
    placements = ranks(4, 2)
    assert [placement.tp_size for placement in placements] == [2, 2, 2, 2]
    assert [placement.group for placement in placements] == [0, 0, 1, 1]
    assert [placement.tp_rank for placement in placements] == [0, 1, 0, 1]
    assert [placement.paired_rank for placement in placements] == [2, 3, 0, 1]


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_paired_ranks_are_mutual_and_have_the_same_slices(world_size: int) -> None:
    """A paired rank is in the other group."""
    placements = ranks(world_size, 2)
    for placement in placements:
        other = placements[placement.paired_rank]
        assert other.paired_rank == placement.rank
        assert other.group == 1 - placement.group
        assert (other.shard.tp_rank, other.shard.tp_size) == (placement.shard.tp_rank, placement.shard.tp_size)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_vocabulary_is_split_over_all_ranks(num_groups: int) -> None:
    shards = [placement.shard for placement in ranks(4, num_groups)]
    assert [(shard.vocab_rank, shard.vocab_shards) for shard in shards] == [(rank, 4) for rank in range(4)]
    assert shards[3] == (Shard(3, 4, 3, 4) if num_groups == 1 else Shard(1, 2, 3, 4))


def test_ranks_of_linked_groups_are_peers_of_their_own_group() -> None:
    linked = [Placement(rank, 6, rank % 3, 3, 2, is_linked=True) for rank in range(6)]
    assert [placement.peers for placement in linked] == [range(3)] * 3 + [range(3, 6)] * 3
    assert [placement.peer_rank for placement in linked] == [0, 1, 2, 0, 1, 2]
    assert [placement.peer_gpus for placement in linked] == [[0, 1, 2]] * 6
    assert [(placement.shard.vocab_rank, placement.shard.vocab_shards) for placement in linked] == [
        (rank % 3, 3) for rank in range(6)
    ]
    for placement in ranks(6, 2):
        assert (placement.peers, placement.peer_rank) == (range(6), placement.rank)


# Ranks of each host, and the ranks of a group: whether each group lies inside one host. Hosts may differ in size.
HOSTS: list[tuple[list[int], bool]] = [([4], True), ([2, 2], True), ([1, 3], False), ([2, 1, 1], False)]


def on_hosts(sizes: list[int], linked: bool = True) -> list[Placement]:
    """The ranks of two groups over hosts of these sizes."""
    places = [(local, size) for size in sizes for local in range(size)]
    return [Placement(rank, len(places), *place, 2, is_linked=linked) for rank, place in enumerate(places)]


@pytest.mark.parametrize(("sizes", "expected"), HOSTS)
def test_a_group_inside_one_host_is_found_by_its_ranks(sizes: list[int], expected: bool) -> None:
    found = on_hosts(sizes)
    assert all(placement.is_inside_host(placement.peers) for placement in found) == expected
    assert all(placement.is_inside_host(range(4)) for placement in found) == (len(sizes) == 1)
    assert [placement.host_ranks for placement in on_hosts([1, 3])] == [range(1), *[range(1, 4)] * 3]


# --transport, --pair-transport, several hosts -> the groups are linked over NCCL; peer memories to try.
LINKS = [
    ("auto", "auto", False, False, ("symm", "host")),
    ("auto", "auto", True, True, ("symm", "host")),
    ("symm", "auto", False, False, ("symm",)),
    ("symm", "auto", True, True, ("symm",)),
    ("host", "auto", False, False, ("host",)),
    ("nccl", "auto", False, True, ()),
    ("nccl", "nccl", True, True, ()),
    ("auto", "nccl", False, True, ("symm", "host")),
    ("host", "nccl", False, True, ("host",)),
    ("auto", "symm", False, False, ("symm",)),
    ("auto", "host", False, False, ("host",)),
    ("symm", "symm", False, False, ("symm",)),
]


@pytest.mark.parametrize(("inside", "between", "has_hosts", "linked", "candidates"), LINKS)
def test_the_two_links_are_chosen_separately(
    inside: str, between: str, has_hosts: bool, linked: bool, candidates: tuple[str, ...]
) -> None:
    config = EngineConfig.model_validate({"transport": inside, "pair_transport": between})
    sizes = [2, 2] if has_hosts else [4]
    for placement in on_hosts(sizes, linked=False):
        assert is_linked(config, placement) == linked
    for placement in on_hosts(sizes, linked):
        check_links(config, "paired", placement, torch.device("cuda", 0))
        assert peer_memory_candidates(config, "paired", len(placement.peers), True) == candidates


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# --transport, --pair-transport, mode, ranks of each host, device -> what is refused.
REFUSED_LINKS = [
    ("auto", "nccl", "off", [4], GPU, "pair_transport: nccl needs --speculation paired, found off; leave it out"),
    ("auto", "gloo", "simulated", [4], CPU, "pair_transport: gloo needs --speculation paired, found simulated"),
    ("auto", "gloo", "paired", [4], GPU, "pair_transport: gloo is for the CPU, and this runs on GPUs; use nccl, or"),
    ("gloo", "nccl", "paired", [4], CPU, "pair_transport: nccl needs GPUs, and this runs on the CPU; use auto or gloo"),
    ("auto", "symm", "paired", [4], CPU, "pair_transport: symm needs GPUs, and this runs on the CPU"),
    ("auto", "symm", "paired", [2, 2], GPU, "pair_transport: symm works inside one host, found several hosts; use"),
    (
        "nccl",
        "host",
        "paired",
        [4],
        GPU,
        "pair_transport: host needs the same memory inside a group, found --transport",
    ),
    (
        "symm",
        "host",
        "paired",
        [4],
        GPU,
        "pair_transport: host needs the same memory inside a group, found --transport",
    ),
    ("symm", "auto", "paired", [1, 3], GPU, "transport: symm works inside one host, and the 2 ranks that exchange"),
    ("host", "nccl", "paired", [1, 1, 2], GPU, "transport: host works inside one host, and the 2 ranks that exchange"),
]


@pytest.mark.parametrize(("inside", "between", "mode", "sizes", "device", "message"), REFUSED_LINKS)
def test_links_without_sense_are_refused(
    inside: str, between: str, mode: str, sizes: list[int], device: torch.device, message: str
) -> None:
    config = EngineConfig.model_validate({"transport": inside, "pair_transport": between})
    placement = on_hosts(sizes, linked=False)[0]
    placement = replace(placement, is_linked=is_linked(config, placement))
    with pytest.raises(UserError, match=f"^{message}"):
        check_links(config, mode, placement, device)


def test_a_group_of_one_rank_may_name_any_memory() -> None:
    """It has nothing to exchange with itself."""
    config = EngineConfig.model_validate({"transport": "symm", "pair_transport": "nccl"})
    for placement in (Placement(rank, 2, 0, 1, 2, is_linked=True) for rank in range(2)):
        check_links(config, "paired", placement, GPU)
        assert peer_memory_candidates(config, "paired", len(placement.peers), True) == ()


def test_the_default_placement_is_one_rank() -> None:
    assert Placement() == Placement(0, 1, 0, 1, 1)
    assert Placement().shard == Shard()


def test_placement_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Placement.from_environment() == Placement()
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert Placement.from_environment() == Placement(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ("RANK=2 WORLD_SIZE=2", "RANK: expected at most 1 with WORLD_SIZE 2"),
        ("RANK=1", "RANK: expected at most 0 with WORLD_SIZE 1"),
        ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK: expected at most 1"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE: expected at most 2"),
        ("WORLD_SIZE=0", "WORLD_SIZE: expected a number in the environment, found '0'"),
        ("WORLD_SIZE=-1", "WORLD_SIZE: expected a number in the environment, found '-1'"),
        ("RANK=" + 5000 * "9", "RANK: expected a number in the environment, found '999"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    variables: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise this rank would wait for one that never comes."""
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(UserError, match=named) as error:
        Placement.from_environment()
    assert len(str(error.value)) < 200


# Query heads, KV heads, world size -> mode and number of groups that `auto` chooses.
AUTO = [
    (8, 4, 1, ("off", 1)),
    (8, 4, 2, ("off", 1)),
    (8, 4, 4, ("off", 1)),
    (8, 4, 8, ("off", 1)),  # two ranks have the same KV head
    (8, 1, 2, ("off", 1)),
    (6, 3, 3, ("off", 1)),
    (6, 3, 6, ("off", 1)),
    (12, 6, 4, ("paired", 2)),  # 6 KV heads do not divide over 4 ranks, but over each half of them
    (9, 3, 6, ("paired", 2)),
]


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads", "world_size", "expected"), AUTO)
def test_auto_chooses_a_pair_only_where_heads_do_not_divide(
    num_qo_heads: int, num_kv_heads: int, world_size: int, expected: tuple[str, int]
) -> None:
    assert choose_mode("auto", model(num_qo_heads, num_kv_heads), world_size) == expected


@pytest.mark.parametrize(("world_size", "num_kv_heads"), [(3, 4), (32, 4)])
def test_auto_refuses_a_model_that_does_not_divide(world_size: int, num_kv_heads: int) -> None:
    with pytest.raises(UserError):
        choose_mode("auto", model(8, num_kv_heads), world_size)


def test_a_requested_mode_is_chosen() -> None:
    assert choose_mode("off", model(), 4) == ("off", 1)
    assert choose_mode("simulated", model(), 2) == ("simulated", 1)
    assert choose_mode("paired", model(), 2) == ("paired", 2)
    assert choose_mode("paired", model(), 8) == ("paired", 2)


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_paired_needs_an_even_number_of_ranks(world_size: int) -> None:
    with pytest.raises(UserError, match=f"paired needs an even number of ranks, found {world_size}"):
        choose_mode("paired", model(), world_size)


@pytest.mark.parametrize(("mode", "world_size"), [("off", 16), ("simulated", 3), ("paired", 6), ("paired", 32)])
def test_a_model_that_does_not_divide_is_refused(mode: str, world_size: int) -> None:
    """The message lists the possible sizes."""
    with pytest.raises(UserError, match=r"valid sizes of one group: 1, 2, 4, 8$"):
        choose_mode(mode, model(), world_size)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Pretend that the machine has this many GPUs."""
    count: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return count


def chosen(transport: str, local_world_size: int) -> tuple[str, str, str]:
    """Device, backend and notice of the last local rank."""
    local_rank = local_world_size - 1
    placement = Placement(local_rank, local_world_size, local_rank, local_world_size)
    device, backend, notice = choose_device(EngineConfig.model_validate({"transport": transport}), placement)
    return str(device), backend, notice


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_without_gpus_the_cpu_is_chosen(gpus: int, transport: str) -> None:
    assert chosen(transport, 4) == ("cpu", "gloo", "")


@pytest.mark.parametrize("gpus", [4], indirect=True)
@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_each_local_rank_gets_a_gpu(gpus: int, transport: str) -> None:
    assert chosen(transport, 4) == ("cuda:3", "nccl", "")
    assert chosen(transport, 1) == ("cuda:0", "nccl", "")


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_with_too_few_gpus_auto_takes_the_cpu_and_nccl_refuses(gpus: int) -> None:
    """`auto` says so in a notice. `gloo` asks for the CPU."""
    device, backend, notice = chosen("auto", 4)
    assert (device, backend) == ("cpu", "gloo")
    assert "2 GPU(s) for 4 ranks" in notice
    with pytest.raises(UserError, match="nccl needs one GPU for each rank, found 2 for 4 ranks"):
        chosen("nccl", 4)
    assert chosen("gloo", 4) == ("cpu", "gloo", "")


@pytest.mark.parametrize("transport", ["symm", "host"])
@pytest.mark.parametrize("gpus", [0, 4], indirect=True)
def test_packets_need_a_gpu_for_each_rank(gpus: int, transport: str) -> None:
    """Whether the GPUs reach each other is checked later, when they are connected."""
    if gpus:
        assert chosen(transport, 4) == ("cuda:3", "nccl", "")
    else:
        with pytest.raises(UserError, match=f"{transport} needs one GPU for each rank, found 0 for 1 ranks"):
            chosen(transport, 1)


@pytest.mark.parametrize(
    ("cuda_graph", "trace", "expected"),
    [("auto", False, True), ("auto", True, False), ("on", False, True), ("off", False, False), ("off", True, False)],
)
def test_steps_are_captured_unless_they_are_traced(cuda_graph: str, trace: bool, expected: bool) -> None:
    config = EngineConfig.model_validate({"cuda_graph": cuda_graph})
    assert choose_graph(config, "off", torch.device("cuda", 0), True, trace) == expected


@pytest.mark.parametrize(
    ("transport", "world_size", "has_fused_step", "expected"),
    [
        ("auto", 2, True, ("symm", "host")),
        ("symm", 2, True, ("symm",)),
        ("host", 2, True, ("host",)),
        ("nccl", 2, True, ()),
        ("auto", 1, True, ()),
        ("symm", 1, True, ()),
        ("host", 1, True, ()),
        ("auto", 2, False, ()),
    ],
)
def test_packets_need_several_ranks_and_fused_kernels(
    transport: str, world_size: int, has_fused_step: bool, expected: tuple[str, ...]
) -> None:
    config = EngineConfig.model_validate({"transport": transport})
    assert peer_memory_candidates(config, "off", world_size, has_fused_step) == expected


@pytest.mark.parametrize("transport", ["symm", "host"])
def test_a_requested_peer_memory_without_fused_kernels_is_refused(transport: str) -> None:
    config = EngineConfig.model_validate({"transport": transport})
    with pytest.raises(UserError, match=f"transport: {transport} is not available with speculation simulated; use "):
        peer_memory_candidates(config, "simulated", 2, False)


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    threads = torch.get_num_threads()
    try:
        for placement, expected in ((Placement(0, 2, 0, 2), 3), (Placement(0, 8, 0, 8), 1), (Placement(), 1)):
            take_device(torch.device("cpu"), placement)  # one rank keeps the number
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)
