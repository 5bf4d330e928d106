"""Modes, world sizes, transports and captured graphs agree on real GPUs, on the demo checkpoint in fp32."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alspec.models.config import LlamaConfig
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.tokenizer import Tokenizer

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
MAX_NEW_TOKENS = 24
# The last one ends at the demo checkpoint's last position; all run over one graph, captured at a length of 1.
PROMPT_LENS = (40, 256, 319, 320, 1500, 8192 - MAX_NEW_TOKENS)
THRESHOLDS = ("0", "0.05", "0.1", "0.25", "inf")
LONG = {"threshold": "0.1", "sampling": {"max_new_tokens": 1500, "temperature": 0.8, "top_p": 0.95, "seed": 3}}
MIN_SWAPS = 5000
# (name, mode, transport, captured graph, thresholds) of the jobs with 1, 2 and 4 ranks, one after the other in each.
RUNS: dict[int, list[tuple[str, str, str, str, tuple[str, ...]]]] = {
    1: [
        ("off1", "off", "auto", "on", ("0.1",)),
        ("launched1", "off", "auto", "off", ("0.1",)),
        ("simulated1", "simulated", "nccl", "auto", THRESHOLDS),
    ],
    2: [
        ("off2", "off", "symm", "on", ("0.1",)),
        ("nccl2", "off", "nccl", "on", ("0.1",)),
        ("paired2", "paired", "symm", "on", THRESHOLDS),
        ("launched2", "paired", "symm", "off", ("0.1",)),
        ("swapped2", "paired", "nccl", "on", THRESHOLDS),
        ("eager2", "paired", "nccl", "off", ("0.1",)),
        ("simulated2", "simulated", "nccl", "auto", ("0.1",)),
    ],
    4: [
        ("off4", "off", "symm", "on", ("0.1",)),
        ("nccl4", "off", "nccl", "on", ("0.1",)),
        ("launched4", "off", "symm", "off", ("0.1",)),
        ("paired4", "paired", "symm", "on", THRESHOLDS),
        ("swapped4", "paired", "nccl", "on", THRESHOLDS),
    ],
}
# Jobs of one wave run side by side: ranks -> GPUs.
WAVES = [{1: "2", 2: "0,1"}, {4: "0,1,2,3"}]
WITH_LONG = ("simulated1", "paired2", "paired4", "swapped2", "swapped4")
OFF = [run[0] for runs in RUNS.values() for run in runs if run[1] == "off"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 4, reason=f"needs 4 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(900),
]


def _batches() -> list[list[list[int]]]:
    """Prompts of English, so that the verdicts are those of real text, and one ragged batch."""
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[2].glob("*/*.py")))
    tokenizer = Tokenizer.from_folder(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
    ids = tokenizer.encode(text, add_bos=False)
    starts = random.Random(5)
    cut = [ids[at : at + n] for n in PROMPT_LENS for at in [starts.randrange(len(ids) - n)]]
    return [*([prompt] for prompt in cut), [cut[0], cut[2], cut[4]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("nccl")
    batches = _batches()
    found = {}
    for wave in WAVES:
        jobs = []
        for world_size, gpus in wave.items():
            runs = [
                {
                    "name": name,
                    "engine": {
                        "speculation": {"mode": mode},
                        "dtype": "fp32",
                        "transport": transport,
                        "cuda_graph": graph,
                    },
                    "sampled": mode == "off",
                    "thresholds": thresholds,
                    "long": name in WITH_LONG,
                }
                for name, mode, transport, graph, thresholds in RUNS[world_size]
            ]
            cases = {"runs": runs, "batches": batches, "max_new_tokens": MAX_NEW_TOKENS}
            cases["long"] = LONG | {"prompt": batches[4][0]}
            place = folder / str(world_size)
            place.with_suffix(".json").write_text(json.dumps(cases))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(world_size), str(Path(__file__).with_name("worker.py"))]
            command += [str(place.with_suffix(suffix)) for suffix in (".json", ".out")]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
            log = place.with_suffix(".log").open("w")
            jobs.append((place, subprocess.Popen(command, env=environment, stdout=log, stderr=log)))
        try:
            for place, job in jobs:
                assert job.wait(timeout=400) == 0, place.with_suffix(".log").read_text()[-3000:]
                found |= json.loads(place.with_suffix(".out").read_text())
        finally:
            for _, job in jobs:
                if job.poll() is None:
                    job.terminate()  # torchrun ends its ranks
                    job.wait(timeout=60)
    return found


def short(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["threshold"] != "long"]


def test_every_job_ran_as_asked(results: dict[str, list[dict]]) -> None:
    for world_size, runs in RUNS.items():
        for name, _, transport, graph, thresholds in runs:
            rows = results[name]
            assert len(short(rows)) == (len(PROMPT_LENS) + 1) * len(thresholds)
            assert {row["device"] for row in rows} == {"cuda"}
            if world_size > 1:
                assert {row["transport"] for row in rows} == {transport}
            assert {row["cuda_graph"] for row in rows} == {graph == "on"}


@pytest.mark.parametrize("name", OFF)
def test_off_gives_the_same_tokens_however_it_runs(results: dict[str, list[dict]], name: str) -> None:
    """World sizes 1, 2 and 4, over words and NCCL, launched one by one or captured at a short length and replayed."""
    assert [row["tokens"] for row in results[name]] == [row["tokens"] for row in results["off1"]]
    assert [row["sampled"] for row in results[name]] == [row["sampled"] for row in results["off1"]]
    assert max(sum(row["prompt_lens"]) + MAX_NEW_TOKENS for row in results[name]) == 8192
    assert all(len(tokens) == 12 for row in results[name] for tokens in row["sampled"])


@pytest.mark.parametrize("name", ["paired2", "paired4", "swapped2", "swapped4", "launched2", "eager2", "simulated2"])
def test_paired_equals_simulated(results: dict[str, list[dict]], name: str) -> None:
    """Tokens and hit maps are those of the reference semantics on one GPU, however many ranks a group has."""
    reference = {(row["threshold"], tuple(row["prompt_lens"])): row for row in short(results["simulated1"])}
    for row in short(results[name]):
        where = (row["threshold"], tuple(row["prompt_lens"]))
        assert row["tokens"] == reference[where]["tokens"], where
        assert row["hits"] == reference[where]["hits"], where


@pytest.mark.parametrize("name", ["paired2", "paired4", "swapped2", "swapped4"])
def test_thousands_of_role_swaps(
    results: dict[str, list[dict]], name: str, record_property: Callable[[str, object], None]
) -> None:
    """A pair whose groups swap roles all the time stays the reference, token for token and verdict for verdict."""
    ours, reference = (next(row for row in results[run] if row["threshold"] == "long") for run in (name, "simulated1"))
    hits = [hit for step in ours["hits"] for layer in step for hit in layer]
    swaps = sum(hits)  # each accepted layer makes the receiver the sender
    record_property("swaps", swaps)
    print(f"{name}: {swaps} role swaps, {len(hits) - swaps} rejected guesses")
    assert len(ours["hits"]) == LONG["sampling"]["max_new_tokens"] - 1
    assert ours["tokens"] == reference["tokens"]
    assert ours["hits"] == reference["hits"]
    assert swaps > MIN_SWAPS
    assert len(hits) - swaps > MIN_SWAPS / 5


def test_both_verdicts_occurred(results: dict[str, list[dict]]) -> None:
    rows = [row for row in results["paired4"] if row["threshold"] == "0.1"]
    assert {hit for row in rows for step in row["hits"] for layer in step for hit in layer} == {0, 1}


def test_threshold_zero_gives_the_tokens_of_off(results: dict[str, list[dict]]) -> None:
    for name in ("simulated1", "paired2", "paired4", "swapped2", "swapped4"):
        tokens = [row["tokens"] for row in results[name] if row["threshold"] == "0"]
        assert tokens == [row["tokens"] for row in results["off1"]]
