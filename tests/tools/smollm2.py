"""SmolLM2: the installed file, transformers' model of it, and runs of generate.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gpu_jobs import NUM_GPUS, environment, gpus, torchrun
from paths import ROOT

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.checkpoint.source import model_path
from alspec.models.tokenizer.tokenizer import Tokenizer

NAME = "smollm2"
# Lengths of prompts out of books, and where each begins. Each of 200 greedy tokens behind them leads the second most
# likely one by 0.03 nats.
BOOKS = {37: 7063, 3000: 0, 7000: 60}


def installed() -> Path:
    """The GGUF file; a test that needs it is skipped if it is not installed."""
    try:
        return model_path(EngineConfig(model=NAME))
    except UserError as error:
        pytest.skip(str(error))


def reference(path: Path) -> Any:
    """transformers' model of the same file in fp32, on a GPU if there is one."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    settings = load_gguf_checkpoint(str(path))["config"]
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    model.load_state_dict(loaded["tensors"], strict=False)
    model.tie_weights()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def from_books(tokenizer: Tokenizer, length: int) -> list[int]:
    """Token ids of a prompt of `BOOKS`."""
    lines = (ROOT / "docs" / "lm_eval" / "book_endings.jsonl").read_text(encoding="utf-8").splitlines()
    text = " ".join(f"{row['context']} {row['endings'][row['answer']]}" for row in map(json.loads, lines))
    ids = tokenizer.encode(text)[BOOKS[length] :][:length]
    assert len(ids) == length
    return ids


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The next `count` tokens of transformers."""
    prompt = torch.tensor([ids], device=model.device)
    generated = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return generated[0, len(ids) :].tolist()


def generate(prompts: list[list[int]], folder: Path, ranks: int, *flags: object) -> dict[str, Any]:
    """What --json writes for a batch of prompts in fp32, on `ranks` ranks."""
    prompt_file, out = folder / "prompts.jsonl", folder / "out.json"
    prompt_file.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts), encoding="utf-8")
    settings = ["--model", NAME, "--dtype", "fp32", "--prompt-file", prompt_file, "--ignore-eos", "--json", out]
    program = list(map(str, [ROOT / "launch" / "generate.py", *settings, *flags]))
    visible = gpus(0, ranks) if NUM_GPUS and "gloo" not in flags else ""
    command = torchrun(ranks, visible, program) if ranks > 1 else [sys.executable, *program]
    done = subprocess.run(
        command, env=environment(visible), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert written["summary"]["world_size"] == ranks
    return written


def texts(found: dict[str, Any]) -> list[list[int]]:
    """The generated ids of each request."""
    return [request["token_ids"] for request in found["requests"]]
