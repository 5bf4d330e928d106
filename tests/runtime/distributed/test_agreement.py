"""Texts that ranks exchange: each arrives, however far ahead a rank is, and old keys are deleted."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from alspec.errors import CannotConnectError, RankFailureError, UserError
from alspec.runtime.distributed import agreement as module
from alspec.runtime.distributed.agreement import Agreement
from alspec.runtime.distributed.placement import Placement

WORLD = 3


def on_ranks(store: dist.Store, work: Callable[[Agreement, int], Any]) -> list[Any]:
    """Run `work` on each rank, all of them threads of this process."""
    store.set_timeout(timedelta(seconds=5))

    def run(rank: int) -> Any:
        return work(Agreement(Placement(rank, WORLD), dist.PrefixStore("job", store)), rank)

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(run, range(WORLD)))


def test_texts_of_all_calls_arrive_and_old_keys_are_deleted() -> None:
    """A fast rank may be several calls ahead of a slow one."""
    store = dist.HashStore()
    kinds = random.Random(0).choices(["exchange", "broadcast"], k=60)

    def work(agreement: Agreement, rank: int) -> None:
        pauses = random.Random(rank)
        for call, kind in enumerate(kinds):
            time.sleep(pauses.choice([0.0, 0.0, 0.003]))
            if kind == "exchange":
                assert agreement.exchange(f"{call} of {rank}") == [f"{call} of {other}" for other in range(WORLD)]
            else:
                assert agreement.broadcast(None if rank else f"{call} of all") == f"{call} of all"
        agreement.exchange("the last one")

    on_ranks(store, work)
    assert store.num_keys() == WORLD


def test_a_call_that_an_interrupt_ends_leaves_its_number_to_the_next() -> None:
    """Other ranks may not have begun it. Later calls meet as before."""
    interrupted = threading.Barrier(WORLD)

    def work(agreement: Agreement, rank: int) -> None:
        if rank == 1:
            with mock.patch.object(agreement, "_wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                agreement.exchange("stopped")
        interrupted.wait(timeout=10)
        first = agreement.exchange(f"0 of {rank}")  # another rank may still find the text of the interrupted call
        assert [first[0], first[2]] == ["0 of 0", "0 of 2"]
        for call in (1, 2):
            assert agreement.exchange(f"{call} of {rank}") == [f"{call} of {other}" for other in range(WORLD)]
        assert agreement.broadcast(None if rank else "all") == "all"

    on_ranks(dist.HashStore(), work)


def test_long_values_are_compared_by_hash() -> None:
    """A value may be a prompt of a hundred thousand tokens."""
    store = dist.HashStore()

    def work(agreement: Agreement, rank: int) -> str:
        same = {"prompt": "long " * 10_000, "ids": repr([1] * 10_000), "seed": 3, "stop": ["a"] * 1000}
        agreement.require_same(same)
        stored = store.get(f"job/alspec/exchange/0/{rank}")
        assert len(stored) < 1000
        with pytest.raises(UserError) as error:
            agreement.require_same(same | {"prompt": "long " * 10_000 + str(rank)})
        return str(error.value)

    for message in on_ranks(store, work):
        beginning = ("long " * 8)[:40]
        value = rf"'{beginning}\.\.\. \(SHA-256 [0-9a-f]{{64}}\)'"
        assert re.match(f"ranks disagree on prompt: rank . has {value}, rank . has {value}; pass the same", message)


def test_short_values_that_differ_are_shown() -> None:
    def work(agreement: Agreement, rank: int) -> None:
        with pytest.raises(
            UserError, match=r"ranks disagree on seed: rank . has ., rank . has .; pass the same to every rank"
        ):
            agreement.require_same({"seed": rank})

    on_ranks(dist.HashStore(), work)


def test_texts_that_arrive_in_time_are_gathered() -> None:
    """One rank is late, and one never comes. Each other rank returns at its own deadline with all texts until then."""

    def work(agreement: Agreement, rank: int) -> tuple[list[str], float]:
        if rank == 2:
            return [], 0.0
        time.sleep(0.2 * rank)
        started = time.monotonic()
        return agreement.gather_within("call/1", f"of {rank}", 1.0), time.monotonic() - started

    (first, first_s), (second, second_s), _ = on_ranks(dist.HashStore(), work)
    assert first == second == ["of 0", "of 1"]
    assert min(first_s, second_s) >= 1.0
    assert max(first_s, second_s) < 2.0


def test_no_rank_waits_after_all_have_come() -> None:
    def work(agreement: Agreement, rank: int) -> list[list[str]]:
        return [agreement.gather_within(f"call/{call}", f"{call} of {rank}", 20.0) for call in range(3)]

    started = time.monotonic()
    for found in on_ranks(dist.HashStore(), work):
        assert found == [[f"{call} of {rank}" for rank in range(WORLD)] for call in range(3)]
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("call", ["exchange", "broadcast"])
def test_ranks_name_one_that_failed_before_it_had_an_engine(call: str) -> None:
    """They wait for it, which is rank 0 as a broadcast needs it."""
    store = dist.HashStore()
    store.set("job/failed_start/cause", "rank 0 ended before it had an engine: no such file")

    def work(agreement: Agreement, rank: int) -> None:
        if rank == 0:
            return
        with pytest.raises(RankFailureError, match=r"^rank 0 ended before it had an engine: no such file$"):
            getattr(agreement, call)("")

    on_ranks(store, work)
    assert store.check(["job/failed_start/1", "job/failed_start/2"]), "the failed rank would wait for its readers"


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", timedelta(seconds=1))

    def work(agreement: Agreement, rank: int) -> None:
        if rank == 1:
            return
        with pytest.raises(RankFailureError, match=r"^rank 1 did not come within 1 s$"):
            agreement.exchange("")

    on_ranks(dist.HashStore(), work)


@pytest.mark.parametrize("call", ["exchange", "broadcast"])
def test_a_lost_store_is_one_line(call: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    line = "^the job's key-value store is gone: rank 0 or torchrun on its host has ended$"
    with pytest.raises(CannotConnectError, match=line):
        getattr(Agreement(Placement(1, WORLD), client), call)("")
