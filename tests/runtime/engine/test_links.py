"""The composition root chooses the link inside a group and that between the groups of a pair."""

from __future__ import annotations

import pytest
import torch

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.engine import composition
from alspec.runtime.engine.composition import Choices, find_peer_memory


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
    return composition.choose(config, LlamaConfig.from_folder(DEMO_CHECKPOINT), has_trace=False)


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


@pytest.mark.usefixtures("host")
def test_auto_over_several_hosts_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the link."""
    choices = choose(speculation={"mode": "auto"})
    assert choices.mode == "off"
    assert "two all-reduces over the network in each layer" in choices.notices[0]
    assert choose(speculation={"mode": "off"}).notices == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose(speculation={"mode": "auto"}).notices == []


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
