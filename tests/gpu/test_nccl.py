"""Modes, world sizes, transports and captured graphs agree on real GPUs, on the demo checkpoint in fp32."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alspec.models.config import LlamaConfig
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.tokenizer import Tokenizer

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
PROMPT_LENS = (40, 256, 319, 320, 1500)
THRESHOLDS = ("0", "0.05", "0.1", "0.25", "inf")
# (name, mode, world size, GPUs, transport, captured graph): jobs of one wave run side by side.
WAVES = [
    [
        ("off1", "off", 1, "0", "auto", "on"),
        ("simulated1", "simulated", 1, "1", "nccl", "auto"),
        ("off2", "off", 2, "2,3", "symm", "on"),
    ],
    [
        ("launched1", "off", 1, "0", "auto", "off"),
        ("simulated2", "simulated", 2, "1,2", "nccl", "auto"),
    ],
    [("nccl2", "off", 2, "0,1", "nccl", "on"), ("paired2", "paired", 2, "2,3", "symm", "on")],
    [("eager2", "paired", 2, "0,1", "nccl", "off"), ("launched2", "paired", 2, "2,3", "symm", "off")],
    [("off4", "off", 4, "0,1,2,3", "symm", "on")],
    [("nccl4", "off", 4, "0,1,2,3", "nccl", "on")],
    [("launched4", "off", 4, "0,1,2,3", "symm", "off")],
    [("paired4", "paired", 4, "0,1,2,3", "symm", "on")],
]
OFF = [job[0] for wave in WAVES for job in wave if job[1] == "off"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 4, reason=f"needs 4 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(600),
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
    found = {}
    for wave in WAVES:
        jobs = []
        for name, mode, world_size, gpus, transport, graph in wave:
            cases = {
                "engine": {
                    "speculation": {"mode": mode},
                    "dtype": "fp32",
                    "transport": transport,
                    "cuda_graph": graph,
                },
                "sampled": mode == "off",
                "batches": _batches(),
                "thresholds": THRESHOLDS if mode != "off" else ["0.1"],
                "max_new_tokens": 24,
            }
            (folder / f"{name}.json").write_text(json.dumps(cases))
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)),
                *(
                    str(Path(__file__).with_name("worker.py")),
                    str(folder / f"{name}.json"),
                    str(folder / f"{name}.out"),
                ),
            ]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
            log = (folder / f"{name}.log").open("w")
            jobs.append((name, subprocess.Popen(command, env=environment, stdout=log, stderr=log)))
        for name, job in jobs:
            assert job.wait(timeout=300) == 0, (folder / f"{name}.log").read_text()[-3000:]
            found[name] = json.loads((folder / f"{name}.out").read_text())
    return found


def test_every_job_ran_as_asked(results: dict[str, list[dict]]) -> None:
    for name, _, world_size, _, transport, graph in [job for wave in WAVES for job in wave]:
        rows = results[name]
        assert {row["device"] for row in rows} == {"cuda"}
        if world_size > 1:
            assert {row["transport"] for row in rows} == {transport}
        assert {row["cuda_graph"] for row in rows} == {graph == "on"}


@pytest.mark.parametrize("name", OFF)
def test_off_gives_the_same_tokens_however_it_runs(results: dict[str, list[dict]], name: str) -> None:
    """World sizes 1, 2 and 4, over words and NCCL, captured at a short length and replayed, or launched one by one."""
    assert [row["tokens"] for row in results[name]] == [row["tokens"] for row in results["off1"]]
    assert [row["sampled"] for row in results[name]] == [row["sampled"] for row in results["off1"]]


@pytest.mark.parametrize(
    ("paired", "simulated"),
    [("paired2", "simulated1"), ("paired4", "simulated2"), ("eager2", "simulated1"), ("launched2", "simulated1")],
)
def test_paired_equals_simulated(results: dict[str, list[dict]], paired: str, simulated: str) -> None:
    assert len(results[paired]) == len(results[simulated]) == (len(PROMPT_LENS) + 1) * len(THRESHOLDS)
    for ours, reference in zip(results[paired], results[simulated], strict=True):
        where = (ours["threshold"], ours["prompt_lens"])
        assert ours["tokens"] == reference["tokens"], where
        assert ours["hits"] == reference["hits"], where


def test_both_verdicts_occurred(results: dict[str, list[dict]]) -> None:
    verdicts = {
        hit
        for row in results["paired4"]
        if row["threshold"] == "0.1"
        for step in row["hits"]
        for layer in step
        for hit in layer
    }
    assert verdicts == {0, 1}


def test_threshold_zero_gives_the_tokens_of_off(results: dict[str, list[dict]]) -> None:
    simulated = [row["tokens"] for row in results["simulated1"] if row["threshold"] == "0"]
    assert simulated == [row["tokens"] for row in results["off1"]]
