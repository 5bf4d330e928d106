"""The command line under torchrun: two processes print one text, and all name the same mistake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import ROOT
from tiers import fast

pytestmark = pytest.mark.slow

GENERATE = ROOT / "launch" / "generate.py"

# Longer than 2 S + 64 characters, so that sink and window leave tokens out.
PROMPT = "".join(f"line {number}: the value is {number * 7919 % 997}.\n" for number in range(16))
FLAGS = ("--transport", "gloo", "--max-new-tokens", 12, "--ignore-eos", "--threshold", "0.3")
WINDOW = ("--predictor", "window")

GenerateText = Callable[..., str]


def torchrun(*program: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Two processes of a program on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, *map(str, program)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.full
def test_flags_that_differ_between_ranks_are_refused(checkpoint: Path) -> None:
    """A job on two hosts may be started so. Without the comparison, ranks would wait for each other."""
    generate = f"{sys.executable} {GENERATE} --model {checkpoint} --prompt The"
    done = torchrun("--no-python", "bash", "-c", f"{generate} --max-new-tokens $((3 + RANK)) --transport gloo")
    assert done.returncode != 0
    assert "alspec: exit 2: ranks disagree on max_new_tokens: rank " in done.stderr


@pytest.mark.full
def test_prompts_that_differ_between_ranks_are_refused_and_the_next_ones_run(checkpoint: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import os
from alspec import Engine, SamplingConfig
from alspec.errors import UserError
with Engine.from_pretrained({str(checkpoint)!r}, transport="gloo") as engine:
    sampling = SamplingConfig(max_new_tokens=3, ignore_eos=True)
    for prompt in ("The " + os.environ["RANK"], "The", "The old " * int(os.environ["RANK"]), "The"):
        try:
            print(f"<{{len(list(engine.stream(prompt, sampling)))}} tokens>", flush=True)
        except UserError as error:
            print(f"<{{error}}>", flush=True)
""",
        encoding="utf-8",
    )
    done = torchrun(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<3 tokens>") == 4
    assert done.stdout.count("<ranks disagree on prompt: rank ") == 4


def test_paired_prints_and_writes_what_simulated_does(
    checkpoint: Path, generate_text: GenerateText, tmp_path: Path
) -> None:
    """Text and hit map are the same. Only rank 0 reads the prompt from stdin, prints and writes."""
    expected = generate_text(
        *FLAGS, *WINDOW, "--speculation", "simulated", "--prompt", PROMPT, "--json", tmp_path / "simulated.json"
    )
    outputs = ("--json", tmp_path / "paired.json", "--trace", tmp_path / "trace.json")
    # The last newline is `echo`'s, not the prompt's.
    done = torchrun(
        GENERATE, "--model", checkpoint, *FLAGS, *WINDOW, "--speculation", "paired", *outputs, stdin=PROMPT + "\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
    assert done.stderr.count("mode: paired, 2 rank(s) on CPU, fp32") == 1
    simulated, paired = (json.loads((tmp_path / f"{mode}.json").read_text()) for mode in ("simulated", "paired"))
    assert paired["requests"] == simulated["requests"]
    assert paired["hit_map"] == simulated["hit_map"]
    assert 0 < paired["summary"]["hit_rate"] < 1, "the threshold must both swap and keep the roles"
    assert (paired["summary"]["tp_size"], paired["summary"]["transport"]) == (1, "gloo")
    # Neither rank reads all weights and the whole cache in a step.
    assert (paired["summary"]["gb_per_s"], paired["summary"]["share_of_limit"]) == (None, None)
    assert "GB/s" not in done.stderr
    assert simulated["summary"]["gb_per_s"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


SETTINGS = (
    *("--answers", 2, "--temperature", 1.2, "--min-p", 0.01, "--repetition-penalty", 1.2, "--frequency-penalty", 0.3),
    *("--logit-bias", "20=1.5,30=-100", "--stop-ids", "98,99", "--logprobs", 2),
)


@pytest.mark.parametrize(
    "settings", [pytest.param((), marks=pytest.mark.full), SETTINGS], ids=["greedy", "all settings"]
)
def test_tensor_parallel_prints_what_one_rank_does(
    settings: tuple[object, ...], checkpoint: Path, generate_text: GenerateText
) -> None:
    flags = (*FLAGS, "--speculation", "off", "--prompt", PROMPT, *settings)
    done = torchrun(GENERATE, "--model", checkpoint, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout == generate_text(*flags)


MISTAKES = [
    (("--temperature", "-1"), "flags: --temperature: expected 0 or more, found '-1'"),
    ((), "prompt: none given; give --prompt, --prompt-file, --prompt-ids or text on standard input"),
]


@pytest.mark.parametrize(("flags", "message"), fast(MISTAKES, keep=MISTAKES[:1]), ids=["flags", "empty-stdin"])
def test_every_rank_names_the_mistake(flags: tuple[str, ...], message: str, checkpoint: Path) -> None:
    """Only rank 0 can see the second mistake. torchrun fails, and no rank waits for another."""
    started = time.monotonic()
    done = torchrun(GENERATE, "--model", checkpoint, "--speculation", "paired", "--transport", "gloo", *flags)
    assert time.monotonic() - started < 20
    assert done.returncode != 0
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("alspec: exit")]
    # Once the first rank has failed, torchrun ends the others, perhaps before they print the same line.
    assert lines
    assert set(lines) == {f"alspec: exit 2: {message}"}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("nproc", "mode"), [(1, "simulated"), (2, "paired"), (4, "paired")])
def test_make_generate_speculates_on_any_number_of_processes(nproc: int, mode: str) -> None:
    command = ["make", "--dry-run", "generate", f"NPROC={nproc}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert f"--nproc-per-node {nproc} launch/generate.py" in done.stdout
    assert f"--speculation {mode} " in done.stdout
