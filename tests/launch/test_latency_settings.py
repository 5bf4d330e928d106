"""Settings, notices, rows and headings of latency.py, without a measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alspec.config import LatencyConfig, validate
from alspec.errors import UserError
from alspec.kernels.common.limits import MAX_BATCH
from alspec.launch import latency
from alspec.runtime.engine.engine import Engine
from alspec.runtime.profiling.profile import Profile, cache_tokens


def config_of(**settings: Any) -> LatencyConfig:
    return validate(LatencyConfig, settings, "test")


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`as_rank(rank, world size)`: set what torchrun sets for this rank."""

    def pretend(rank: int, world_size: int) -> None:
        for name, value in {"RANK": rank, "WORLD_SIZE": world_size}.items():
            monkeypatch.setenv(name, str(value))
            monkeypatch.setenv(f"LOCAL_{name}", str(value))

    return pretend


def test_each_mode_and_cache_is_measured_once() -> None:
    found = latency._configs(config_of(modes=["off", "paired", "off"], codecs=["turbo4", "bf16", "turbo4"]))
    assert [(one.kv_cache, one.speculation.mode) for one in found] == [
        (codec, mode) for codec in ("turbo4", "bf16") for mode in ("off", "paired")
    ]


def test_a_batch_may_be_as_large_as_a_captured_step_serves() -> None:
    latency._check(config_of(batch=MAX_BATCH))
    with pytest.raises(UserError, match="--batch"):
        latency._check(config_of(batch=MAX_BATCH + 1))


def test_a_cache_is_checked_for_the_heads_of_a_rank(as_rank: Callable[[int, int], None]) -> None:
    """The demo checkpoint has four KV heads: on four ranks, a pair has two on each rank, one group has one."""
    as_rank(0, 4)
    latency._check_modes(config_of(modes=["paired"], codecs=["turbo-mixed"], transport="gloo"))
    with pytest.raises(UserError, match="turbo-mixed needs two KV heads on a rank, found 1"):
        latency._check_modes(config_of(modes=["paired", "off"], codecs=["turbo-mixed"], transport="gloo"))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_prints_notices(
    rank: int,
    as_rank: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_rank(rank, 2)
    monkeypatch.setattr(latency, "_measure", lambda *_: None)
    monkeypatch.setattr(latency, "_write", lambda *_: None)
    assert latency.main(["--transport", "gloo", "--top-k", "5"]) == 0
    told = "alspec: --top-k without effect: temperature 0 takes the most likely token\n"
    assert capsys.readouterr().err == ("" if rank else told)


@pytest.mark.parametrize("flags", [["--modes", "paired"], ["--draft", "self"], []], ids=" ".join)
def test_blocks_that_no_predictor_recalls(
    flags: list[str],
    as_rank: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_rank(0, 2)
    monkeypatch.setattr(latency, "_measure", lambda *_: None)
    monkeypatch.setattr(latency, "_write", lambda *_: None)
    given = ["--transport", "gloo", "--predictor", "window", "--recall-blocks", "8", *flags]
    assert latency.main(given) == 0
    told = "--recall-blocks without effect: --predictor window recalls no blocks"
    off = "--predictor and --recall-blocks without effect: mode off does not speculate; add --modes paired"
    assert capsys.readouterr().err == f"alspec: {told if flags else off}\n"


def test_contexts_without_hit_rate_are_named() -> None:
    """Those whose last measured step reads fewer tokens than `A~` does."""
    steps = 1344 - cache_tokens(1000, 0) + 1  # the last one reads 1344 tokens, from 1000 on
    notice = "no hit rate at 999 tokens: counted from 1344 tokens on; A~ leaves out hardly anything before"
    assert latency._without_hit_rate(config_of(steps=steps), [999, 1000, 2000]) == [notice]
    assert latency._without_hit_rate(config_of(steps=steps, speculation={"predictor": "window"}), [999]) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5, "top_k": 0, "top_p": 1.0}),
        ({"temperature": 1, "min_p": 0.1}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1}),
        (
            {"seed": 3, "presence_penalty": 0.5, "logit_bias": {7: 2}},
            {"presence_penalty": 0.5, "logit_bias": {"7": 2.0}},
        ),
    ],
    ids=str,
)
def test_a_row_names_the_settings_in_use(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert latency._sampling_of(config_of(**settings).sampling) == expected


def test_the_cache_has_the_requested_room(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that is needed is enough."""
    loaded: list[int] = []
    load = Engine.load

    def record(engine: Engine, batch_size: int, max_context: int) -> None:
        loaded.append(max_context)
        load(engine, batch_size, max_context)

    monkeypatch.setattr(Engine, "load", record)
    flags = ["--model", str(checkpoint), "--transport", "gloo", "--contexts", "16", "--steps", "1"]
    needed = cache_tokens(16, 1)
    for given in (needed, needed + 50):
        assert latency.main([*flags, "--max-context", str(given)]) == 0
    assert loaded == [needed, needed + 50]


def engine_of(mode: str, transport_name: str, is_linked: bool = False) -> Any:
    """An engine of two ranks, as far as a row describes it."""
    return SimpleNamespace(
        placement=SimpleNamespace(world_size=2, local_world_size=2, is_linked=is_linked),
        mode=mode,
        model_config=SimpleNamespace(weights_in_rows=None),
        transport_name=transport_name,
        uses_graph=True,
        dtype_name="bf16",
        device=torch.device("cpu"),
        decode_step=None,
    )


def test_a_row_of_a_linked_pair_says_how_often_it_paused() -> None:
    """Its time is then that of steps of one group alone, and its hit rate that of the other steps."""
    profile = Profile(1024, 1, [[100.0], [90.0]], 0.5, 10**6, alone_share=0.75)
    linked, other = (
        latency._row(config_of(), engine_of("paired", "gloo", is_linked), profile, "real", 5e10, "command")
        for is_linked in (True, False)
    )
    assert linked["alone_share"] == 0.75
    assert "alone_share" not in other


def test_a_row_of_a_pair_that_always_paused_says_what_was_forced() -> None:
    """It has no verdicts, so no hit rate; the rate that was asked for is there all the same."""
    profile = Profile(1024, 1, [[100.0], [90.0]], None, 10**6, alone_share=1.0)
    linked = engine_of("paired", "gloo", is_linked=True)
    row, by_layer, real = (
        latency._row(config_of(), linked, profile, rate, 5e10, "command") for rate in (0.94, Path("h.jsonl"), "real")
    )
    assert (row["alone_share"], row["case"]["hit_rate"], row["case"]["forced"]) == (1.0, None, True)
    assert row["case"]["forced_rate"] == 0.94
    assert by_layer["case"]["layer_rates"] == "h.jsonl"
    assert not {"forced_rate"} & {*by_layer["case"], *real["case"]}


def test_a_row_of_a_pair_has_no_share_of_a_limit() -> None:
    """Its steps do not read all bytes. Steps of `off` do: here 10^6 in 100 us, a fifth of a copy's rate."""
    profile = Profile(1024, 1, [[100.0], [90.0]], None, 10**6)
    shares = [
        latency._row(config_of(), engine_of(mode, "symm"), profile, "real", 5e10, "command")["share_of_limit"]
        for mode in ("off", "paired")
    ]
    assert shares == [0.2, None]


@pytest.mark.parametrize(("given", "written"), [(0.1, 0.1), (math.inf, "inf")])
def test_a_row_of_a_pair_has_lambda_and_s(given: float, written: float | str) -> None:
    """In values that JSON can hold; mode off has neither."""
    config = config_of(speculation={"threshold": given, "chunk_size": 256})
    profile = Profile(1024, 1, [[100.0], [90.0]], None, 10**6)
    pair, off = (
        json.loads(json.dumps(latency._row(config, engine_of(mode, "symm"), profile, "real", 5e10, "c")["case"]))
        for mode in ("paired", "off")
    )
    assert pair == off | {"mode": "paired", "threshold": written, "chunk_size": 256, "recall_blocks": 16}
    assert not {"threshold", "chunk_size", "recall_blocks"} & set(off)


@pytest.mark.parametrize(
    ("transport", "disabled", "reaches", "expected"),
    [
        ("nccl", "1", True, "nccl without peer access"),
        ("nccl", None, True, "nccl"),
        ("nccl", "0", True, "nccl"),
        ("nccl", None, False, "nccl without peer access"),
        ("gloo", "1", False, "gloo"),
        ("host", "1", False, "host"),
    ],
)
def test_rows_say_that_nccl_had_no_peer_access(
    transport: str, disabled: str | None, reaches: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reaches)
    if disabled is not None:
        monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
    profile = Profile(1024, 1, [[100.0], [90.0]], None, 10**6)
    row = latency._row(config_of(), engine_of("off", transport), profile, "real", 5e10, "command")
    assert row["case"]["transport"] == expected


def test_the_table_says_how_a_pair_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    case = {"shape": "tiny", "world": 2, "mode": "paired", "transport": "symm", "cuda_graph": True, "dtype": "bf16"}
    case |= {"batch": 1, "context": 1024, "text": None, "kv_cache": "bf16", "hit_rate": 0.5, "forced": True}
    row = {"case": case, "us": dict.fromkeys(("p20", "p50", "p80", "p99"), 100.0), "share_of_limit": None}
    row |= {"gpu": "one", "num_gpus": 2}
    profile = Profile(1024, 1, [[100.0]], 0.5, 10**6)
    latency._show([(row, profile), (row | {"case": case | {"forced": False}}, profile)], latency.LatencyConfig())
    out = capsys.readouterr().out
    assert "tiny, 2 x one, bf16, batch 1, symm, captured graph" in out
    assert out.count("50.0%") == 2
    assert out.count("50.0% forced") == 1
