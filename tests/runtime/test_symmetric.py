"""Whether a job can use symmetric memory: what the self-test compares, what all ranks agree on, what a user is told."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from alspec.errors import UserError
from alspec.runtime import symmetric
from alspec.runtime.engine import Engine
from alspec.runtime.placement import Placement

ZERO, LAST_BIT = 0, 1
NEGATIVE_ZERO = torch.tensor(-0.0).view(torch.int32).item()

# Squares of the large numbers, which nobody compares.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.fixture(autouse=True)
def _signed_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter sums begin with NumPy's +0.0, which a GPU does not add: there a sum of -0.0 would be 0.0."""

    def total(reduction: Any, values: Any) -> Any:
        data = values.handle.data
        first = -0.0 if data.dtype.kind == "f" else 0
        sums = np.sum(data, axis=reduction.axis, keepdims=reduction.keep_dims, initial=first)
        return reduction.to_tensor(sums, values.dtype)

    monkeypatch.setattr(interpreter.ReduceOps, "sum", total)


class Job:
    """The self-tests of all ranks in one process, one after the other: memory that all reach, and an all-reduce."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size, self.device = world_size, device
        self.memories: list[Tensor] = []
        self.given: dict[int, Tensor] = {}  # what each rank has put into the all-reduce
        for rank in range(world_size):
            self.self_test(rank)  # in vain: it sends its words, and those of later ranks are not there

    def self_test(self, rank: int) -> str:
        def allocate(num_words: int, _: Any) -> tuple[Tensor, list[int], None]:
            if not self.memories:
                self.memories = [
                    torch.zeros(num_words, dtype=torch.int64, device=self.device) for _ in range(self.world_size)
                ]
            return self.memories[rank], [memory.data_ptr() for memory in self.memories], None

        def all_reduce(values: Tensor) -> None:
            self.given[rank] = values.clone()
            values.copy_(self.sums())

        transport = SimpleNamespace(
            placement=Placement(rank=rank, world_size=self.world_size), device=self.device, synchronize=lambda: None
        )
        with (
            mock.patch.object(symmetric, "_allocate", allocate),
            mock.patch.object(symmetric.dist, "all_reduce", all_reduce),
            mock.patch.object(symmetric, "TEST_PATIENCE_NS", 10**7),
        ):
            return symmetric._differs_from_nccl(transport)

    def sums(self) -> Tensor:
        """Of what has been given, in rank order; not by `torch.sum`, which begins with +0.0."""
        first, *others = (values for _, values in sorted(self.given.items()))
        for values in others:
            first = first + values
        return first

    def words(self, reader: int, writer: int) -> Tensor:
        """[channels, 2] int32, value and epoch: what one rank has sent to another."""
        return self.memories[reader].view(self.world_size, -1)[writer].view(torch.int32).view(-1, 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_right_sums_pass_on_every_rank(device: torch.device, world_size: int) -> None:
    job = Job(world_size, device)
    assert [job.self_test(rank) for rank in range(world_size)] == [""] * world_size
    sums = job.sums()
    is_zero = sums == 0
    assert (is_zero & sums.signbit()).any(), "no -0.0 is compared"
    assert ((sums.abs() < torch.finfo(torch.float32).tiny) & ~is_zero).any(), "no subnormal number is compared"
    assert {-3e38, 3e38} <= {round(value, -37) for value in sums.tolist()}


def places_of(kind: str, values: Tensor) -> Tensor:
    """Channels in which a rank's own values are of this kind."""
    is_subnormal = (values.abs() < torch.finfo(torch.float32).tiny) & (values != 0)
    kinds = {
        "negative zero": (values == 0) & values.signbit(),
        "subnormal": is_subnormal,
        "large": values.abs() > 2e38,
        "integer": (values.abs() >= 1) & (values.abs() <= 1000),
    }
    return kinds[kind].nonzero().flatten()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "flipped"),
    [
        pytest.param("negative zero", NEGATIVE_ZERO, id="-0.0 became 0.0"),
        pytest.param("subnormal", None, id="subnormal flushed to 0.0"),
        pytest.param("large", LAST_BIT, id="large number off by its last bit"),
        pytest.param("integer", LAST_BIT << 23, id="integer off by a factor of two"),
    ],
)
def test_a_value_that_arrives_wrong_is_found(
    device: torch.device, world_size: int, kind: str, flipped: int | None
) -> None:
    """One word, from one rank to one other: that rank says so, and nobody else. Bits are compared, not numbers."""
    for reader, writer in ((0, world_size - 1), (world_size - 1, 0)):
        job = Job(world_size, device)
        place = int(places_of(kind, job.given[writer])[-1])
        word = job.words(reader, writer)[place]
        right = job.sums()[place].item()
        word[0] = ZERO if flipped is None else word[0] ^ flipped
        values = [job.given[rank][place].clone() for rank in range(world_size)]
        values[writer] = word[0].view(torch.float32)
        wrong = sum(values[1:], values[0]).item()
        assert job.self_test(reader) == f"wrong sum: {wrong!r} for {right!r}", (reader, writer)
        assert not any(job.self_test(rank) for rank in range(world_size) if rank != reader), (reader, writer)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_word_that_does_not_arrive_is_found(device: torch.device, world_size: int) -> None:
    job = Job(world_size, device)
    job.words(0, 1)[200] = 0  # as the memory was
    found = [job.self_test(rank) for rank in range(world_size)]
    # The interpreter does not wait, and notes no fault: there the missing value is NaN.
    assert found[0] == ("a word did not arrive" if device.type == "cuda" else "wrong sum: nan for -0.0")
    assert found[1:] == [""] * (world_size - 1)


@pytest.mark.parametrize(
    ("unreachable", "wrong", "others", "expected"),
    [
        pytest.param("", "", [True, True], "", id="all well"),
        pytest.param("no way to GPU 1", None, [True], "no way to GPU 1", id="out of reach"),
        pytest.param("", None, [False], "another rank cannot reach its peers", id="others out of reach"),
        pytest.param("", "wrong sum", [True, True], "wrong sum", id="wrong sum"),
        pytest.param("", "", [True, False], "another rank's self-test failed", id="others' wrong sum"),
        pytest.param(
            "",
            RuntimeError("no fabric handle\nat line 3"),
            [True, True],
            "symmetric memory failed: no fabric handle",
            id="allocation fails",
        ),
    ],
)
def test_every_rank_decides_alike(
    unreachable: str, wrong: str | RuntimeError | None, others: list[bool], expected: str
) -> None:
    """What one finds all obey, after as many questions to each other."""
    answers: Iterator[bool] = iter(others)
    transport: Any = SimpleNamespace(
        placement=Placement(world_size=2), device=torch.device("cpu"), agree=lambda flag: next(answers) and flag
    )
    differs = mock.Mock(side_effect=[wrong])
    with (
        mock.patch.object(symmetric, "_unreachable", return_value=unreachable),
        mock.patch.object(symmetric, "_differs_from_nccl", differs),
    ):
        assert symmetric.symmetric_fault(transport) == expected
    assert differs.called == (wrong is not None)
    assert not list(answers)


def test_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    here = Placement(rank=1, world_size=4, local_rank=1, local_world_size=4)
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, peer: peer != 3)
    assert symmetric._unreachable(here, device) == "GPU 1 cannot reach GPU 3"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: own.index != peer)
    assert symmetric._unreachable(here, device) == ""
    spread = Placement(rank=1, world_size=4, local_rank=1, local_world_size=2)
    assert symmetric._unreachable(spread, device) == "ranks on several hosts"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert symmetric._unreachable(here, device) == "NCCL_P2P_DISABLE=1"


@pytest.mark.parametrize("asked", ["auto", "symm"])
def test_a_job_without_it_says_so_once_or_refuses(asked: str) -> None:
    engine = Engine.from_pretrained(transport="gloo")
    # As on GPUs: there symmetric memory is tried where it is asked for, and where the choice is free.
    engine._uses_symm = True
    engine.config = engine.config.model_copy(update={"transport": asked})
    with mock.patch("alspec.runtime.engine.symmetric_fault", return_value="GPU 0 cannot reach GPU 1"):
        if asked == "symm":
            with pytest.raises(UserError, match="symm does not work here: GPU 0 cannot reach GPU 1; use auto or nccl"):
                engine.load(1, 16)
            return
        engine.load(1, 16)
        engine.load(1, 32)
    assert engine.notices == ["decoding over nccl: no symmetric memory (GPU 0 cannot reach GPU 1)"]
    assert not engine._uses_symm
    engine.close()
