"""The composition root chooses the link inside a group and that between the groups of a pair."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.latency_model import LinkCosts
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.engine import choices as engine_choices
from alspec.runtime.engine import composition
from alspec.runtime.engine.choices import Choices
from alspec.runtime.engine.composition import find_peer_memory
from alspec.runtime.profiling.predicted_costs import BESIDE_KERNELS, STREAM_BYTES_PER_S


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of 4, the first one on the second of two hosts with two GPUs each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name, value in {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def choose(**options: object) -> Choices:
    config = EngineConfig.model_validate({"speculation": {"mode": "paired"}} | options)
    return engine_choices.choose(config, LlamaConfig.from_folder(DEMO_CHECKPOINT), has_trace=False)


@pytest.mark.usefixtures("host")
def test_groups_on_a_host_each_try_peer_memory_and_are_linked_over_nccl() -> None:
    choices = choose()
    assert choices.placement.is_linked
    assert (choices.placement.peers, choices.candidates, choices.backend) == (range(2, 4), ("symm", "host"), "nccl")
    assert choose(transport="nccl").candidates == ()
    with pytest.raises(UserError, match=r"^pair_transport: symm works inside one host, found several hosts"):
        choose(pair_transport="symm")
    with pytest.raises(
        UserError, match=r"^transport: symm works inside one host, and the 4 ranks that exchange results"
    ):
        choose(speculation={"mode": "off"}, transport="symm")


class Network:
    """A transport whose slowest rank needs `link_us` for an all-reduce of a hidden state, or a message."""

    device = torch.device("cpu")

    def __init__(self, link_us: float, slowest: float = math.inf) -> None:
        self.link_us, self.slowest = link_us, slowest

    def message_us(self, message: torch.Tensor) -> float:
        return self.link_us

    def all_gather_world(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, torch.full_like(own, self.slowest)])

    def all_reduce_us(self, num_values: int) -> float:
        return self.link_us if num_values == 4096 else 0.0


def notices(link_us: float, device: str = "cpu", slowest: float = math.inf, **options: object) -> list[str]:
    config = EngineConfig.model_validate({"speculation": {"mode": "auto"}} | options)
    model = LlamaConfig.from_shape("llama-3.1-8b")
    choices = replace(engine_choices.choose(config, model, has_trace=False), device=torch.device(device))
    network = Network(link_us, slowest)
    return composition.network_notices(choices, config, model, network, 8192)  # type: ignore[arg-type]


@pytest.mark.usefixtures("host")
def test_auto_over_several_hosts_says_what_the_network_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two GPUs over TCP: an all-reduce takes 90 us; four GPUs without it 1.27 ms, two 2.14 ms at 8K tokens."""
    assert choose(speculation={"mode": "auto"}).mode == "off"
    (notice,) = notices(90.0)
    found = re.search(r"takes 90 us: .* 8192 tokens are ([\d.]+) ms a token, and ([\d.]+) ms on one", notice)
    assert found is not None
    split, alone = map(float, found.groups())
    assert split == pytest.approx(1.27 + 64 * 0.09, rel=0.1)
    assert alone == pytest.approx(2.14, rel=0.1)
    assert notices(5.0) == []  # over RDMA
    assert notices(90.0, speculation={"mode": "off"}) == notices(90.0, draft="ngram") == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert notices(90.0) == []


@pytest.mark.usefixtures("host")
def test_kernels_are_predicted_for_the_copy_rate_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the rate of an H200 doubles the times of kernels, and leaves those of messages."""
    monkeypatch.setattr(composition, "device_bandwidth", lambda _: STREAM_BYTES_PER_S)

    def split_and_alone(device: str, slowest: float) -> tuple[float, ...]:
        (notice,) = notices(90.0, device, slowest)
        return tuple(map(float, re.findall(r"([\d.]+) ms", notice)))

    plain, slow = split_and_alone("cuda", math.inf), split_and_alone("cuda", STREAM_BYTES_PER_S / 2)
    assert plain == split_and_alone("cpu", STREAM_BYTES_PER_S / 2)
    assert slow[1] == pytest.approx(2 * plain[1], abs=0.1)
    assert slow[0] - 64 * 0.09 == pytest.approx(2 * (plain[0] - 64 * 0.09), abs=0.2)

    def pair_and_alone(slowest: float) -> tuple[float, LinkCosts]:
        config = EngineConfig.model_validate({"speculation": {"mode": "paired"}})
        model, network = LlamaConfig.from_shape("llama-3.1-8b"), Network(90.0, slowest)
        policy = composition.choose_pair_policy(choose(), config, model, network, 1)  # type: ignore[arg-type]
        assert policy is not None
        return policy._costs(8192)

    (alone_us, parts), (slow_us, slow_parts) = pair_and_alone(math.inf), pair_and_alone(STREAM_BYTES_PER_S / 2)
    assert slow_us == pytest.approx(2 * alone_us)
    assert slow_parts.verifier_us == pytest.approx(2 * parts.verifier_us)
    assert slow_parts.link_us == parts.link_us == BESIDE_KERNELS * 90.0


@pytest.mark.usefixtures("host")
def test_auto_over_several_hosts_without_gpus_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "two all-reduces over the network in each layer" in choose(speculation={"mode": "auto"}).notices[-1]
    assert not any("network" in notice for notice in choose(speculation={"mode": "off"}).notices)


@pytest.mark.usefixtures("host")
def test_a_linked_group_without_peer_memory_uses_nccl_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair on one host without such memory has no link that was asked for."""
    reason = "GPU 0 cannot reach GPU 1"
    monkeypatch.setattr(composition, "probe_peer_memory", lambda *_: (None, reason))
    notice = f"transport: nccl, because symm does not work here ({reason})"
    assert find_peer_memory(choose(), "auto", None) == (None, [notice])  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=rf"no memory that both groups reach: {reason}; use --pair-transport nccl"):
        find_peer_memory(choose(), "auto", None)  # type: ignore[arg-type]


def test_a_notice_says_when_rounds_are_too_large_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a step has, or than attention has columns for the query heads of a KV head."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    cases = (
        ("llama-3.1-70b", 7, 1, None), ("llama-3.1-70b", 8, 1, 8),
        ("llama-3.1-8b", 15, 8, None), ("llama-3.1-8b", 15, 9, 14),
    )  # fmt: skip
    for shape, drafts, batch_size, most in cases:
        config = EngineConfig(random_weights=shape, draft="ngram", draft_tokens=drafts)
        model = LlamaConfig.from_shape(shape)
        choices = engine_choices.choose(config, model, has_trace=False)
        (*found,) = composition.eager_notices(choices, batch_size, config, model, [])
        assert len(found) == (0 if most is None else 1)
        if most is not None:
            assert f"up to {most} rows of each request here (--draft-tokens {most - 1})" in found[0]
