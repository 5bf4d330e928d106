"""The engine as a library: one model, several prompts, and a process that keeps its own signals and warnings."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from alspec.config import EngineConfig, GenerateConfig, LatencyConfig, SamplingConfig
from alspec.errors import DoesNotFitError, UserError
from alspec.models.checkpoint.source import model_files
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama import Shard
from alspec.runtime.distributed import transport as transport_module
from alspec.runtime.distributed.agreement import fingerprint, shared_settings
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.engine import choices, composition, prompt_pass, resources
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Generation, Token
from alspec.runtime.engine.memory import plan_memory
from alspec.runtime.faults.guard import guarded
from alspec.runtime.faults.heartbeat import Heartbeat

MakePrompt = Callable[[int, int], list[int]]
SAMPLING = SamplingConfig(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    torch.set_num_threads(1)
    return Engine.from_pretrained(transport="gloo", dtype="fp32")


@pytest.mark.parametrize(("kv_cache", "softmax"), [("bf16", "exact"), ("turbo-mixed", "sas")])
def test_a_longer_prompt_replaces_the_cache(kv_cache: str, softmax: str) -> None:
    """A shorter prompt after it reads nothing of it."""
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(transport="gloo", dtype="fp32", kv_cache=kv_cache, softmax=softmax)
    short = [token.token_id for token in engine.stream("The road", SAMPLING)]
    first = engine.memory
    long = [token.token_id for token in engine.stream("The road " * 90, SAMPLING)]
    assert first is not None
    assert engine.memory is not None
    assert engine.memory.cache_bytes == engine.cache.num_bytes > first.cache_bytes
    assert engine.cache.layers.softmax == softmax
    assert [token.token_id for token in engine.stream("The road", SAMPLING)] == short
    assert len(long) == 4
    assert engine.notices == []


def test_growth_is_checked_before_memory_is_taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    list(engine.stream("The road", SAMPLING))
    monkeypatch.setattr(resources, "available_bytes", lambda *_: 10**6)
    with pytest.raises(DoesNotFitError, match="does not fit"):
        engine.load(1, 8192)
    monkeypatch.undo()
    assert len(list(engine.stream("The road", SAMPLING))) == 4, "the engine must stay usable"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("read_weights", KeyboardInterrupt),
        ("build_cache", torch.OutOfMemoryError),
        ("build_decode_step", torch.OutOfMemoryError),
    ],
)
def test_an_engine_that_failed_to_load_loads_at_the_next_attempt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    build_cache = composition.build_cache

    def new_cache_alone(*args: object) -> object:
        assert "cache" not in vars(engine), "there may be no room for both"
        return build_cache(*args)

    monkeypatch.setattr(composition, "build_cache", new_cache_alone)
    for prompt in ("The road", "The road " * 90):  # the second one needs another cache
        with monkeypatch.context() as patch:
            patch.setattr(composition if name.startswith("build") else resources, name, fail)
            if name != "read_weights" or engine.memory is None:
                with pytest.raises(error):
                    list(engine.stream(prompt, SAMPLING))
        assert len(list(engine.stream(prompt, SAMPLING))) == 4


def test_a_cache_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(UserError, match=r"max_context: expected up to .* 8192, found 8193"):
        Engine.from_pretrained(transport="gloo", max_context=8193)
    engine = Engine.from_pretrained(transport="gloo", max_context=100)
    with pytest.raises(UserError, match=r"max_context is 100; .* or raise --max-context \(up to 8192\)"):
        engine.check_prompts([[1] * 90], [11])


def test_stream_takes_texts_ids_and_options(engine: Engine) -> None:
    assert engine.tokenizer is not None
    expected = [token.token_id for token in engine.stream("The road", SAMPLING)]
    assert [token.token_id for token in engine.stream("The road", max_new_tokens=4, ignore_eos=True)] == expected
    ids = engine.tokenizer.encode("The road")
    assert [token.token_id for token in engine.stream(ids, SAMPLING)] == expected
    assert [token.token_id for token in engine.stream(list(np.array(ids)), SAMPLING)] == expected
    for prompt in (
        5,
        ["a", 1],
        None,
        "",
        [1, True],
        [np.True_],
        [1.0],
        [np.float32(1)],
        {1: 2},
        b"hi",
        bytearray(b"hi"),
        memoryview(b"hi"),
        torch.tensor([0, 1]).to_sparse(),
        torch.zeros(2, dtype=torch.int64, device="meta"),
        np.array([[1, 2], [3, 4]]),
    ):
        with pytest.raises(UserError, match=r"^prompt: expected a text[^\n]+$"):
            next(engine.stream(prompt, SAMPLING))  # type: ignore[arg-type]
    # Python does not write an integer of so many digits.
    with pytest.raises(UserError, match="prompt 0: token id an integer too long to show is outside the vocabulary"):
        next(engine.stream([1, 10**5000], SAMPLING))
    with pytest.raises(UserError, match="prompt: expected a text or token ids, found an integer too long to show"):
        next(engine.stream(10**5000, SAMPLING))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"max_new_token.*max_new_tokens"):
        next(engine.stream("The road", max_new_token=4))
    for sampling in ({"max_new_tokens": 2}, 3):
        with pytest.raises(UserError, match="either a SamplingConfig or its fields"):
            next(engine.stream("The road", sampling))  # type: ignore[arg-type]


def test_stream_takes_several_prompts(engine: Engine) -> None:
    """Prompts of any kind and length get the answers that they have alone. A single prompt works after them."""
    prompts = ["The road", list(range(3, 90)), np.array([5, 300, 7])]
    alone = [[(token.token_id, token.text) for token in engine.stream(prompt, SAMPLING)] for prompt in prompts]
    tokens = list(engine.stream(prompts, SAMPLING))
    for index, expected in enumerate(alone):
        assert [(token.token_id, token.text) for token in tokens if token.request == index] == expected
    assert len(tokens) == 3 * 4
    assert len(list(engine.stream(tuple(prompts[:1]), SAMPLING))) == 4
    assert engine.cache.batch_size == 1
    with pytest.raises(UserError, match="prompt 1: expected a text, found an empty one"):
        next(engine.stream(["The road", ""], SAMPLING))
    with pytest.raises(UserError, match="prompt 1: expected a text or token ids, found"):
        next(engine.stream(["The road", [1.5]], SAMPLING))  # type: ignore[list-item]


def test_a_notice_is_a_warning_once(engine: Engine) -> None:
    engine.notices.append("running somewhere else")
    with pytest.warns(UserWarning, match="running somewhere else"):
        list(engine.stream("The road", SAMPLING))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(engine.stream("The road", SAMPLING))


def test_random_weights_take_token_ids_only(tmp_path: Path) -> None:
    """The folder has a config and no weights."""
    torch.set_num_threads(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301}
    (tmp_path / "config.json").write_text(json.dumps(names | sizes), encoding="utf-8")
    engine = Engine(EngineConfig(random_weights=str(tmp_path), transport="gloo"))
    assert engine.model_config.vocab_size == 301
    with pytest.raises(UserError, match="random weights have no tokenizer; give token ids"):
        next(engine.stream("The road"))
    assert len(list(engine.stream([1, 2, 3], SAMPLING))) == 4


def test_fingerprints_of_different_models_differ(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        shutil.copytree(DEMO_CHECKPOINT, folder)
    assert fingerprint(model_files(one)) == fingerprint(model_files(two)) == fingerprint(model_files(DEMO_CHECKPOINT))
    shard = next(two.glob("*.safetensors"))
    tensors = load_file(shard)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, shard)
    assert fingerprint(model_files(two)) != fingerprint(model_files(one))
    (one / "left-over.safetensors").symlink_to("../blobs/1")
    assert fingerprint(model_files(one)) == fingerprint(model_files(DEMO_CHECKPOINT))


def test_out_of_memory_is_exit_3() -> None:
    with pytest.raises(DoesNotFitError) as error, guarded(Heartbeat(Placement()), "Lower --contexts"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")
    assert str(error.value) == "out of memory: CUDA out of memory. Tried to allocate 1 GiB. Lower --contexts"


def test_one_rank_leaves_signals_alone(engine: Engine) -> None:
    before = signal.getsignal(signal.SIGTERM)
    list(engine.stream("The road", SAMPLING))
    engine.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_generation_ends_when_another_one_begins(engine: Engine) -> None:
    """Both would write to one cache."""
    expected = [token.text for token in engine.stream("It was a", SAMPLING)]
    first = engine.stream("The road", SAMPLING)
    next(first)
    assert [token.text for token in engine.stream("It was a", SAMPLING)] == expected
    with pytest.raises(UserError, match="another generation of this engine has begun"):
        next(first)


def test_a_generation_in_another_thread_waits_for_the_current_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would write to one cache: the first one its prompt, while the second one decodes."""
    expected = [token.text for token in engine.stream("It was a", SAMPLING)]
    prefill, has_begun = prompt_pass.prefill, threading.Event()
    found: list[str] = []
    second = threading.Thread(target=lambda: found.extend(token.text for token in engine.stream("It was a", SAMPLING)))

    def slow_prefill(*args: Any, **options: Any) -> object:
        if not has_begun.is_set():
            has_begun.set()
            second.start()
            second.join(timeout=0.5)
        return prefill(*args, **options)

    monkeypatch.setattr(prompt_pass, "prefill", slow_prefill)
    first = engine.stream("The road", SAMPLING)
    next(first)
    second.join(timeout=30)
    assert found == expected
    with pytest.raises(UserError, match="another generation of this engine has begun"):
        next(first)


def test_a_generation_does_not_use_a_cache_that_another_thread_loaded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That cache has the size of the other generation."""
    expected = [token.text for token in engine.stream("It was a", SAMPLING)]
    generate, found = engine._generate, list[str]()
    second = threading.Thread(target=lambda: found.extend(token.text for token in engine.stream("It was a", SAMPLING)))

    def overtaken(number: int, generation: Generation, *rest: Any) -> Iterator[Token]:
        if len(generation.requests) == 2:
            second.start()
            second.join(timeout=30)
        return generate(number, generation, *rest)

    monkeypatch.setattr(engine, "_generate", overtaken)
    with pytest.raises(UserError, match="another generation of this engine has begun"):
        next(engine.stream(["The road", "It was a"], SAMPLING))
    assert found == expected


def test_a_cache_must_fit_every_rank(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine._release()  # no step is launched ahead, of which the ranks would tell each other
    monkeypatch.setattr(engine.agreement, "exchange", lambda own: [own, str(10**6), own] if own.isdigit() else [own])
    with pytest.raises(DoesNotFitError, match=r"a rank needs .* and has 0.00 GiB; .*, or fewer prompts$"):
        engine.load(3, 100)


def test_a_rank_catches_up_with_the_steps_of_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a generation, a new cache and the end. A rank without a decode step takes part and launches nothing."""
    sent: list[str] = []
    found: list[tuple[int, str]] = []

    def exchange(own: str) -> list[str]:
        sent.append(own)
        return [own, '[7, "mam", 3, 9]', '[5, "m", 4, 8]']

    step = SimpleNamespace(launched=5, recent_kinds="m", launch_missing=lambda *most: found.append(most))
    monkeypatch.setattr(engine, "decode_step", step)
    engine._catch_up_with_ranks(exchange)
    monkeypatch.setattr(engine, "decode_step", None)
    engine._catch_up_with_ranks(exchange)
    assert found == [(7, "mam")]
    assert [json.loads(each)[:2] for each in sent] == [[5, "m"], [0, ""]]
    assert (engine._generations, engine._attempts) == (4, 9)
    calls = []
    monkeypatch.setattr(engine, "_catch_up_with_ranks", lambda exchange: calls.append(exchange("3")))
    for _ in engine.stream("The old man", SAMPLING):
        pass
    assert calls == [["3"]] * 2  # for the generation, and for its cache
    for _ in engine.stream("The old man", SAMPLING):
        pass
    assert calls == [["3"]] * 3
    engine.close()
    assert calls == [["3"]] * 4


def test_token_ids_need_no_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    ids = [3, 1, 2]
    with Engine.from_pretrained(tiny_folder, transport="gloo") as engine:
        answer = [token.token_id for token in engine.stream(ids, max_new_tokens=5)]
    folder = shutil.copytree(tiny_folder, tmp_path / "ids")
    (folder / "tokenizer.json").unlink()
    with Engine.from_pretrained(folder, transport="gloo") as engine:
        assert [token.token_id for token in engine.stream(ids, max_new_tokens=5)] == answer
        with pytest.raises(UserError, match=r"tokenizer.json: expected a tokenizer, found none"):
            next(engine.stream("a"))
    (folder / "tokenizer.json").symlink_to("../blobs/1")
    with pytest.raises(UserError, match=r"tokenizer.json: expected a tokenizer, found a broken symbolic link"):
        Engine.from_pretrained(folder, transport="gloo")


@pytest.mark.parametrize(("mode", "heads"), [("auto", 5), ("auto", 4), ("paired", 5)])
def test_a_pair_that_was_not_requested_is_a_notice(
    mode: str, heads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = json.loads((DEMO_CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
    (tmp_path / "config.json").write_text(json.dumps(raw | sizes), encoding="utf-8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(resources, "connect_store", lambda placement: dist.HashStore())
    monkeypatch.setattr(resources.Heartbeat, "start", lambda heartbeat, release: None)
    engine = Engine.from_pretrained(random_weights=str(tmp_path), transport="gloo", speculation=mode)
    assert engine.mode == ("off" if (mode, heads) == ("auto", 4) else "paired")
    line = "a pair, because heads do not divide over 2 ranks; A~ within lambda 0.1 is accepted"
    assert any(line in notice for notice in engine.notices) == ((mode, heads) == ("auto", 5))


def test_a_cache_that_is_loaded_ends_the_generation(engine: Engine) -> None:
    first = engine.stream("The road", SAMPLING)
    next(first)
    engine.load(1, 100)
    with pytest.raises(UserError, match="another generation of this engine has begun"):
        next(first)


def test_a_with_block_closes_the_engine_after_an_error_only_with_one_rank() -> None:
    with Engine.from_pretrained(transport="gloo", dtype="fp32") as engine:
        assert len(list(engine.stream("The road", SAMPLING))) == 4
    with pytest.raises(UserError, match="engine: it is closed"):
        next(engine.stream("The road", SAMPLING))
    engine.close()  # does nothing
    engine = Engine.from_pretrained(transport="gloo", dtype="fp32")
    engine.placement = Placement(0, 2, 0, 2)
    with pytest.raises(KeyError), engine:
        raise KeyError
    assert not engine._is_closed
    engine.placement = Placement()
    engine.load(1, 64)
    with pytest.raises(KeyError), engine:
        raise KeyError
    assert engine._is_closed
    assert "model" not in vars(engine)


@pytest.mark.parametrize("is_fused", [False, True], ids=["eager", "fused"])
def test_a_closed_engine_frees_its_memory(is_fused: bool, tiny_folder: Path) -> None:
    """It does so at once, not at the next garbage collection: the next engine of this process needs the memory."""
    left: list[weakref.ref[object]] = []
    gc.disable()
    try:
        for _ in range(3):
            with Engine.from_pretrained(tiny_folder, transport="gloo") as engine:
                engine._choices = replace(engine._choices, has_fused_step=is_fused)
                engine.load(1, 64)
                assert engine.is_fused == is_fused
                left += [weakref.ref(engine.model.weights), weakref.ref(engine.cache)]
            assert (engine.mode, engine.transport_name, engine.uses_graph) == ("off", "gloo", False)
        assert all(found() is None for found in left)
    finally:
        gc.enable()


def test_tokens_have_a_hit_rate_once_the_predictor_leaves_tokens_out(
    tiny_folder: Path, make_prompt: MakePrompt
) -> None:
    """With S = 128 that is from 320 tokens on. The first decode step reads the prompt and one token."""
    speculation = {"mode": "simulated", "predictor": "window"}
    engine = Engine.from_pretrained(tiny_folder, transport="gloo", speculation=speculation)
    tokens = list(engine.stream(make_prompt(317, 1), max_new_tokens=5, ignore_eos=True))
    assert [token.hit_rate is None for token in tokens] == [True, True, True, False, False]


def test_batches_too_large_for_fused_kernels_run_eagerly_or_are_refused(tiny_folder: Path) -> None:
    engine = Engine.from_pretrained(tiny_folder, transport="gloo")
    engine._choices = replace(engine._choices, has_fused_step=True, uses_graph=False)
    for batch_size in (32, 33, 33):
        engine.load(batch_size, 16)
    assert engine.notices == ["33 requests: operations are launched one by one; captured steps serve up to 32"]
    for name, value in (("cuda_graph", "on"), ("transport", "symm"), ("transport", "host")):
        engine.config = EngineConfig.model_validate({name: value})
        assert engine.check_prompts([[1]] * 32, [4] * 32) == 5
        with pytest.raises(UserError, match=f"{name}: {value} serves up to 32 requests, found 33; use auto, or fewer"):
            engine.check_prompts([[1]] * 33, [4] * 33)


@pytest.mark.parametrize("mode", ["off", "simulated"])
def test_simulated_on_a_gpu_has_a_notice(mode: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "choose_device", lambda *_: (torch.device("cuda", 0), "nccl", ""))
    notices = ["simulated: operations are launched one by one; captured steps serve off and paired"]
    assert Engine.from_pretrained(tiny_folder, speculation=mode).notices == (notices if mode == "simulated" else [])


def test_a_generation_ends_when_its_engine_closes(engine: Engine) -> None:
    text = engine.stream("The road", SAMPLING)
    next(text)
    engine.close()
    with pytest.raises(UserError, match="engine: it is closed"):
        next(text)


def test_ranks_share_all_settings_except_paths_and_what_only_rank_0_reads() -> None:
    given = {"prompt": "The", "json": "out.json", "trace": "t.json", "speculation": {"threshold": float("inf")}}
    settings = shared_settings(GenerateConfig.model_validate(given))
    assert settings["speculation.threshold"] == "inf"
    assert {"seed", "max_new_tokens", "dtype", "kv_cache", "max_context", "stop"} <= set(settings)
    assert not {"prompt", "model", "json_file", "trace", "prompt_file", "color"} & set(settings)
    settings = shared_settings(LatencyConfig.model_validate({"modes": "off,paired", "rows": "rows.jsonl"}))
    assert settings["modes"] == ["off", "paired"]
    assert not {"rows", "plot"} & set(settings)


def test_an_interrupt_is_one_line() -> None:
    program = """
from alspec.runtime.faults.guard import guarded
from alspec.runtime.faults.heartbeat import Heartbeat
from alspec.runtime.distributed.placement import Placement
with guarded(Heartbeat(Placement())):
    print("half a", end="")
    raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "half a", "\nalspec: exit 130: interrupted\n")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE: expected a number in the environment, found 'x'"),
        *(
            (
                {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                "MASTER_PORT: expected a",
            )
            for port in ("y", "-1", "0", "65536", "9" * 5000)
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "taken"},
            "cannot connect to 1 other rank(s) at 127.0.0.1:",
        ),
    ],
    ids=["world", "letter", "negative", "zero", "large", "huge", "taken"],
)
def test_a_wrong_environment_is_one_line(variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for name, value in variables.items():
            monkeypatch.setenv(name, str(other.getsockname()[1]) if value == "taken" else value)
        with pytest.raises(UserError) as error:
            Engine.from_pretrained(transport="gloo", dtype="fp32")
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_rank_reports_that_it_waits_for_ranks_that_do_not_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport_module, "NOTICE_S", 0.1)
    monkeypatch.setattr(transport_module, "TIMEOUT", timedelta(seconds=1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"cannot connect to 1 other rank\(s\) at 127.0.0.1:.*; start them all"):
        Engine.from_pretrained(transport="gloo", dtype="fp32")
    assert f"alspec: waiting for 1 other rank(s) at 127.0.0.1:{port}\n" in capfd.readouterr().err


def test_a_prompt_and_its_answer_may_fill_the_whole_context() -> None:
    torch.set_num_threads(1)
    assert Engine.from_pretrained(transport="gloo").check_prompts([[1] * 8190], [2]) == 8192
    engine = Engine.from_pretrained(transport="gloo", max_context=40)
    assert engine.check_prompts([[1] * 37, [1]], [3, 39]) == 40
    assert len(list(engine.stream([1] * 37, max_new_tokens=3, ignore_eos=True))) == 3


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_fingerprints_depend_on_the_last_byte(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_CHECKPOINT, tmp_path / "other")
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    assert fingerprint(model_files(folder)) != fingerprint(model_files(DEMO_CHECKPOINT))


def test_memory_of_the_engine_counts_as_free_for_its_next_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load(1, 1024)
    assert engine.memory is not None
    held = engine.memory.weights_bytes + engine.cache.num_bytes
    needed = plan_memory(engine.model_config, Shard(), torch.float32, 1, 2048).total_bytes
    for free, fits in ((needed - held - 1, False), (needed - held, True)):
        monkeypatch.setattr(resources, "available_bytes", lambda *_, free=free: free)
        with nullcontext() if fits else pytest.raises(DoesNotFitError):
            engine.load(1, 2048)
    assert engine.cache.max_context == 2048


def test_progress_includes_the_prompts_before(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alspec.runtime.decode.prefill.prefill.__defaults__", (64, None, 0, None, None))
    engine.load(2, 200)
    done: list[int] = []
    next(engine.stream([[1] * 100, [2] * 150], SAMPLING, progress=done.append))
    assert done == [0, 64, 100, 164, 228]


@pytest.mark.parametrize("sizes", [(0, 10), (-1, 10), (1, 0), (1, -5), (1, 2.5), ("a", 5), (True, 5)], ids=str)
def test_sizes_that_are_none_are_refused(sizes: tuple[Any, Any], engine: Engine) -> None:
    with pytest.raises(UserError, match=r"^Engine.load: (batch_size|max_context): expected a whole number from 1 on"):
        engine.load(*sizes)
    with pytest.raises(UserError, match="n: "):
        engine.generate("The road", n=2**33)


def test_a_default_length_fits(tiny_folder: Path) -> None:
    small = Engine.from_pretrained(tiny_folder, transport="gloo", max_context=20)
    with pytest.warns(
        UserWarning, match="max_new_tokens: 5 instead of 128, the default: .* 15 tokens, max_context is 20"
    ):
        found = small.generate([[1] * 15, [2]], ignore_eos=True)
    assert [len(each.token_ids) for each in found] == [5, 19]
    assert [each.finish_reason for each in found] == ["length", "length"]
    assert found[1].token_ids == small.generate([2], ignore_eos=True, max_new_tokens=19).token_ids
    with pytest.raises(UserError, match="21 tokens needed"):
        small.generate([1] * 15, max_new_tokens=6)


def test_times_agree_with_the_clock(engine: Engine) -> None:
    engine.load(1, 400)
    moments = [time.perf_counter()]
    tokens = engine.stream([1] * 300, SAMPLING)
    next(tokens)
    generation = engine.generation
    moments.append(time.perf_counter())
    assert len(list(tokens)) == len(generation.step_us) == 3
    moments.append(time.perf_counter())
    for us, (begun, ended) in zip((generation.prefill_us, sum(generation.step_us)), pairwise(moments), strict=True):
        assert 0.1 * (ended - begun) < us / 1e6 <= ended - begun


def test_only_rank_0_warns(engine: Engine) -> None:
    engine.notices.append("running somewhere else")
    engine.load(1, 64)
    engine.placement = Placement(1, 2, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(engine.stream("The road", SAMPLING))


def test_ranks_compare_their_choices(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` and the default dtype differ if one rank has a GPU and another has none."""
    compared: dict[str, Any] = {}
    monkeypatch.setattr(engine.agreement, "require_same", compared.update)
    engine.load(1, 64)
    chosen = [compared[f"resolved {name}"] for name in ("transport", "mode", "dtype")]
    assert chosen == ["gloo", "off", "fp32"]
    assert compared["the model's num_layers"] == engine.model_config.num_layers
