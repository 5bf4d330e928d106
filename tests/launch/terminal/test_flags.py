"""Each mistake on the command line gives one line, exit 2 (or 3) and advice."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from generated import read_json

from alspec.config import GenerateConfig, nearest_name
from alspec.launch import generate
from alspec.launch.terminal.flags import _flag, check_writable
from alspec.runtime.engine.engine import Engine

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]


@pytest.fixture
def refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """`refused("--flag", ...)`: the message of a mistake, found before any memory is taken."""

    def no_memory(*args: object) -> None:
        raise AssertionError("memory was taken before the mistake was found")

    def call(*argv: object, exit_code: int = 2) -> str:
        monkeypatch.setattr(Engine, "load", no_memory if exit_code == 2 else Engine.load)
        code, out, err = run(*argv)
        assert code == exit_code
        assert out == ""
        prefix = f"alspec: exit {exit_code}: "
        assert err.startswith(prefix), err
        assert err.count("\n") == 1, err
        assert err.endswith("\n")
        assert "Traceback" not in err
        return err.removeprefix(prefix).rstrip("\n")

    return call


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--promt", "--prompt"),
        ("--max-tokens", "--max-new-tokens"),
        ("--temprature=1", "--temperature"),
        ("--treshold", "--threshold"),
        ("--chunk-size", "--chunk"),
        ("--stpo", "--stop"),
    ],
)
def test_unknown_flag(flag: str, nearest: str, refused: Refused) -> None:
    message = refused(flag)
    assert message == f"flags: unknown flag {flag}; the nearest valid name is {nearest}"


def test_unknown_flag_without_a_near_name(refused: Refused) -> None:
    assert refused("--quantize=4") == "flags: unknown flag --quantize=4; see --help"


def test_flags_are_not_abbreviated(refused: Refused) -> None:
    assert "unknown flag --max-new;" in refused("--max-new", "4")


def test_stray_word(refused: Refused) -> None:
    assert "stray" in refused("--prompt", "a", "stray")


def test_flag_without_its_value(refused: Refused) -> None:
    message = refused("--prompt")
    assert "--prompt" in message
    assert "expected one argument" in message


# A wrong value for every flag with a value, and what the line must say besides flag and value.
BAD_VALUES = [
    ("--random-weights", "llama-9", "llama-3.1-8b"),
    ("--speculation", "pared", "expected auto, off, paired or simulated, found"),
    ("--threshold", "-0.1", "expected 0 or more, found"),
    ("--threshold", "nan", "expected 0 or more, found"),
    ("--threshold", "high", "number"),
    ("--chunk", "64", "128, 256, 512"),
    ("--chunk", "200", "128, 256, 512"),
    ("--draft", "n-gram", "off, ngram, self or model:DIR, found"),
    ("--draft-tokens", "16", "expected 15 or less, found"),
    ("--draft-weights", "int8", "expected auto, fp8, int4 or int4-g32, found"),
    ("--kv-cache", "int8", "hybrid-k4v2 or hybrid-k3v2, found"),
    ("--kv-protect", "-1", "expected 0 or more, found"),
    ("--weights", "int8", "expected auto, fp8, int4 or int4-g32, found"),
    ("--lm-head", "int4", "expected auto or fp8, found"),
    ("--softmax", "fast", "expected exact or sas, found"),
    ("--transport", "mpi", "nccl or gloo, found"),
    ("--pair-transport", "tcp", "nccl or gloo, found"),
    ("--cuda-graph", "yes", "expected auto, on or off, found"),
    ("--dtype", "int8", "expected bf16, fp16 or fp32, found"),
    ("--max-context", "0", "expected 1 or more, found"),
    ("--max-context", "8m", "number of tokens such as 4096 or 128k"),
    ("--max-new-tokens", "0", "expected 1 or more, found"),
    ("--max-new-tokens", "many", "expected an integer, found 'many'"),
    ("--temperature", "-1", "expected 0 or more, found"),
    ("--temperature", "inf", "finite"),
    ("--temperature", "warm", "expected a number, found 'warm'"),
    ("--top-k", "-1", "expected 0 or more, found"),
    ("--top-k", "few", "integer"),
    ("--top-p", "0", "expected more than 0, found"),
    ("--top-p", "1.5", "expected 1 or less, found"),
    ("--top-p", "most", "number"),
    ("--min-p", "1.5", "expected 1 or less, found"),
    ("--repetition-penalty", "0", "expected more than 0, found"),
    ("--frequency-penalty", "2.5", "expected 2 or less, found"),
    ("--presence-penalty", "-3", "expected -2 or more, found"),
    ("--logit-bias", "5", "such as 50=-100,17=2.5"),
    ("--logit-bias", "5=101", "numbers from -100 to 100"),
    ("--logit-bias", "-5=1", "such as 50=-100,17=2.5"),
    ("--logit-bias", "5=1,5=2", "5 occurs twice"),
    ("--stop-ids", "2,x", "1,2,3"),
    ("--answers", "0", "expected 1 or more, found"),
    ("--logprobs", "21", "expected 20 or less, found"),
    ("--seed", "-1", "expected 0 or more, found"),
    ("--seed", str(2**63), f"expected less than {2**63}, found"),
    ("--seed", "x", "integer"),
    ("--prompt-ids", "1,a", "1,2,3"),
    ("--prompt-ids", "", "1,2,3"),
]


@pytest.mark.parametrize(("flag", "value", "remedy"), BAD_VALUES, ids=lambda text: str(text)[:20])
def test_bad_value(flag: str, value: str, remedy: str, refused: Refused) -> None:
    message = refused(f"{flag}={value}")
    # The name of a shape is looked up later, beside the shapes, under the field's name.
    assert flag in message or flag.removeprefix("--").replace("-", "_") in message
    assert repr(value) in message
    assert remedy in message


def test_empty_stop_text(refused: Refused) -> None:
    assert "stop: expected a text" in refused("--stop", "", "--prompt", "a")


def test_model_and_random_weights(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--random-weights", "llama-3.1-8b")
    assert "model and random_weights exclude each other; give one of them" in message


# Prompts.

NO_PROMPT = "prompt: none given; give --prompt, --prompt-file, --prompt-ids or text on standard input"


@pytest.mark.parametrize(
    "flags",
    [
        ("--prompt", "a", "--prompt-file", "f"),
        ("--prompt", "a", "--prompt-ids", "1"),
        ("--prompt-file", "f", "--prompt-ids", "1"),
    ],
    ids=str,
)
def test_two_prompts(flags: tuple[str, ...], refused: Refused) -> None:
    assert "exclude each other; give exactly one prompt" in refused(*flags)


def test_empty_prompt(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "")
    assert message == "prompt: expected a text, found an empty one"


@pytest.mark.parametrize("text", ["", "\n"], ids=repr)
def test_empty_stdin(text: str, refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert refused("--model", checkpoint) == NO_PROMPT


def test_no_prompt_at_a_terminal(refused: Refused, checkpoint: Path) -> None:
    assert refused("--model", checkpoint) == NO_PROMPT


def test_no_prompt_without_stdin(refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert refused("--model", checkpoint) == NO_PROMPT


def test_prompt_file_missing(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.txt"
    message = refused("--model", checkpoint, "--prompt-file", path)
    assert message.startswith(f"prompt_file: cannot read {path}: No such file")
    assert "give an existing text file" in message


def test_prompt_file_is_a_folder(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    assert f"cannot read {tmp_path}: Is a directory" in refused("--model", checkpoint, "--prompt-file", tmp_path)


def test_prompt_file_empty(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n")
    message = refused("--model", checkpoint, "--prompt-file", path)
    assert message == f"prompt_file: {path} is empty; give a file with a text"


@pytest.mark.parametrize("name", ["prompt.txt", "prompts.jsonl"])
def test_prompt_file_not_utf8(name: str, refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"abc\xff\xfe")
    message = refused("--model", checkpoint, "--prompt-file", path)
    assert message == f"prompt_file: {path} is not UTF-8 at byte 3; give a UTF-8 text file"


@pytest.mark.parametrize(
    "line",
    [
        "plain text",
        '"a string"',
        "[1, 2]",
        "{}",
        '{"text": "a"}',
        '{"prompt": 3}',
        '{"prompt": ""}',
        '{"prompt": "a", "prompt_ids": [1]}',
        '{"messages": []}',
        '{"messages": "a"}',
        '{"messages": [{"content": "a"}]}',
        '{"messages": [{"role": 1, "content": "a"}]}',
        '{"prompt_ids": []}',
        '{"prompt_ids": "1,2"}',
        '{"prompt_ids": [true]}',
        '{"prompt_ids": [1.0]}',
        '{"prompt": "a"',
        pytest.param("[" * 100_000, id="nested"),
        pytest.param(f'{{"prompt_ids": [{"1" * 5000}]}}', id="digits"),
    ],
)
def test_bad_jsonl_line(line: str, refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n{{"prompt": "fine"}}\n')
    message = refused("--model", checkpoint, "--prompt-file", path)
    assert message.startswith(f"prompt_file: {path}:3: ")
    assert 'expected {"prompt": "..."}, {"prompt_ids": [1, 2, 3]} or {"messages": [{"role": "user", ' in message


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (r'{"prompt": "a\ud800"}', "expected UTF-8 text, found '\\ud800' at character 1; "),
        (f'{{"prompt_ids": [{"1" * 5000}]}}', "an integer of that size is no token id; "),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "tools: expected a list of JSON schemas, "),
    ],
    ids=["surrogate", "digits", "tools"],
)
def test_value_that_is_not_a_prompt(line: str, fault: str, refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"\n{line}\n")
    message = refused("--model", checkpoint, "--prompt-file", path)
    assert message.startswith(f"prompt_file: {path}:2: {fault}")
    assert "int_max_str_digits" not in message


@pytest.mark.parametrize("text", ["", "\n \n"], ids=repr)
def test_empty_jsonl(text: str, refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    message = refused("--model", checkpoint, "--prompt-file", path)
    assert message == f"prompt_file: {path} holds no request; write one JSON object a line"


@pytest.mark.parametrize("token_id", [100, 2**63 - 1], ids=["first", "huge"])
def test_token_id_outside_the_vocabulary(token_id: int, refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt-ids", f"1,{token_id}")
    assert message.startswith(f"prompt 0: token id {token_id} is outside the vocabulary of 100")


def test_negative_token_id_in_jsonl(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [2, -1]}\n')
    message = refused("--model", checkpoint, "--prompt-file", path)
    assert message.startswith(f"prompt_file: {path}:2: token id -1 is outside the vocabulary of 100")


def test_a_flag_of_another_command_is_near_to_none() -> None:
    flags = ["--kv-protect", "--stop", "--draft-tokens"]
    assert nearest_name("--prompt", flags) is None
    assert nearest_name("--json", flags) is None
    assert nearest_name("--kv-protct", flags) == "--kv-protect"


def test_prompt_too_long_for_the_model(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "a" * 1020, "--max-new-tokens", "4")
    assert "1025 tokens needed (1021 of prompt, 4 new)" in message
    assert "the model's max_position_embeddings is 1024" in message
    assert "shorten the prompt or lower --max-new-tokens" in message


def test_linear_scaling_stretches_the_models_positions(
    run: Run, refused: Refused, make_checkpoint: Callable[..., Path]
) -> None:
    path = make_checkpoint() / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 64}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(config))
    flags = ("--model", path.parent, "--max-new-tokens", "8", "--transport", "gloo", "--prompt-ids")
    assert run(*flags, ",".join(["5"] * 120))[0] == 0
    message = refused(*flags, ",".join(["5"] * 121))
    stretched = "the model's max_position_embeddings times 2 (linear RoPE scaling)"
    assert f"129 tokens needed (121 of prompt, 8 new), {stretched} is 128; shorten the prompt" in message
    message = refused(*flags, "5", "--max-context", "129")
    assert message == f"max_context: expected up to {stretched}, 128, found 129"


def test_prompt_too_long_for_max_context(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "abc", "--max-new-tokens", "5", "--max-context", "8")
    assert "9 tokens needed (4 of prompt, 5 new), max_context is 8" in message


def test_a_default_length_fits_the_model(run: Run, refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    """A number that was given is refused; the default generates what fits, and says so."""
    ids, flags = ",".join(["5"] * 1000), ("--model", checkpoint, "--transport", "gloo", "--ignore-eos")
    code, _, err = run(*flags, "--prompt-ids", ids, "--json", tmp_path / "out.json")
    assert code == 0
    assert err.startswith(
        "alspec: max_new_tokens: 24 instead of 128, the default: the prompt has 1000 tokens, the model's "
        "max_position_embeddings is 1024\n"
    )
    assert len(read_json(tmp_path / "out.json")["requests"][0]["token_ids"]) == 24
    code, _, err = run(*flags, "--prompt-ids", "5,5,5", "--max-context", "10", "--max-new-tokens", "7")
    assert code == 0
    assert "max_new_tokens" not in err
    message = refused(*flags, "--prompt-ids", ids, "--max-new-tokens", "128")
    assert "1128 tokens needed (1000 of prompt, 128 new)" in message
    (tmp_path / "given.yaml").write_text("max_new_tokens: 128\n")
    assert refused(*flags, "--prompt-ids", ids, "--config", tmp_path / "given.yaml") == message
    assert "lower --max-new-tokens" in message
    too_long = refused(*flags, "--prompt-ids", f"{ids}{',5' * 24}")
    assert "1152 tokens needed (1024 of prompt, 128 new)" in too_long
    assert "lower" not in too_long


# Chat.


def test_chat_without_template(refused: Refused, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(chat_template=None)
    message = refused("--model", folder, "--prompt", "a", "--chat")
    assert str(folder) in message
    assert "chat template" in message
    assert "leave out --chat" in message


def test_system_without_chat(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "a", "--system", "be brief")
    assert message == "flags: system needs chat: a plain prompt has no system message"


@pytest.mark.parametrize(("flag", "named"), [("--prompt", "prompt"), ("--system", "--system")])
def test_chat_that_is_not_utf8(flag: str, named: str, refused: Refused, checkpoint: Path) -> None:
    texts = {"--prompt": "a", "--system": "be brief"} | {flag: "caf\udce9"}
    message = refused("--model", checkpoint, "--chat", *(word for given in texts.items() for word in given))
    assert message == f"{named}: expected UTF-8 text, found '\\udce9' at character 3; convert it to UTF-8"


def test_chat_with_prompt_ids(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    expected = "chat needs a text prompt: prompt_ids are used as they are"
    assert expected in refused("--model", checkpoint, "--prompt-ids", "1", "--chat")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1]}')
    assert expected in refused("--model", checkpoint, "--prompt-file", path, "--chat")


def test_text_prompt_without_a_tokenizer(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "ids"))
    (folder / "tokenizer.json").unlink()
    found = f"{folder / 'tokenizer.json'}: expected a tokenizer, found none"
    assert refused("--model", folder, "--prompt", "a").startswith(found)


def test_text_prompt_for_random_weights(refused: Refused) -> None:
    message = refused("--random-weights", "llama-3.2-1b", "--prompt", "a")
    assert "random weights have no tokenizer; use --prompt-ids" in message


# Execution.


@pytest.mark.parametrize("plan", [(), ("--plan",)], ids=["run", "plan"])
def test_sas_without_a_quantised_cache(plan: tuple[str, ...], refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "a", "--softmax", "sas", *plan)
    assert message == "softmax: sas needs a quantised cache; use --kv-cache turbo4 or another quantised codec"


def test_captured_steps_need_a_gpu(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "a", "--transport", "gloo", "--cuda-graph", "on")
    assert message == "cuda_graph: on needs a GPU, and this runs on the CPU; use auto or off"


def test_nccl_without_gpus(refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused("--model", checkpoint, "--prompt", "a", "--transport", "nccl")
    assert message.startswith("transport: nccl needs one GPU for each rank, found 0 for 1 ranks")
    assert "--transport gloo" in message


def test_a_link_between_groups_needs_two_groups(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "a", "--transport", "gloo", "--pair-transport", "gloo")
    assert message == "pair_transport: gloo needs --speculation paired, found off; leave it out"


@pytest.mark.parametrize("world_size", [1, 3])
def test_paired_with_an_odd_number_of_ranks(
    world_size: int, refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    message = refused("--model", checkpoint, "--prompt", "a", "--speculation", "paired")
    assert message.startswith(f"speculation: paired needs an even number of ranks, found {world_size}; ")
    assert "--nproc-per-node 2" in message


def test_world_size_that_does_not_divide_the_model(
    refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = refused("--model", checkpoint, "--prompt", "a", "--speculation", "off")
    assert "3 ranks must divide" in message
    assert "valid sizes of one group: 1, 2, 4" in message


@pytest.fixture
def long_position_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint with positions for every context."""
    folder = make_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**15}))
    return folder


@pytest.mark.parametrize("context", [10**6, 10**15], ids=str)
def test_context_that_does_not_fit(
    context: int, refused: Refused, long_position_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 3, with the largest context that fits: one tile more does not."""
    # Much more than the tiny model and its buffers, much less than the requested cache.
    monkeypatch.setattr("alspec.runtime.engine.resources.available_bytes", lambda *_: 64 * 2**20)
    flags = ("--model", long_position_checkpoint, "--prompt", "a", "--max-new-tokens", "2", "--transport", "gloo")
    flags += ("--max-context",)
    message = refused(*flags, context, exit_code=3)
    assert message.startswith("does not fit: a rank needs ")
    assert "and has 0.06 GiB" in message
    largest = int(message.rsplit("the largest context that fits is ", 1)[1].removesuffix(" tokens"))
    assert largest % 64 == 0
    assert 0 < largest < context
    assert generate.main([str(flag) for flag in (*flags, largest)]) == 0
    assert refused(*flags, largest + 64, exit_code=3)


def test_context_beyond_the_models_positions(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "a", "--max-context", 10**6)
    assert message.startswith("max_context: expected up to the model's max_position_embeddings, ")
    assert refused("--model", checkpoint, "--plan", "--max-context", 10**6) == message


def test_enormous_context_on_this_machine(refused: Refused, long_position_checkpoint: Path) -> None:
    message = refused("--model", long_position_checkpoint, "--prompt", "a", "--max-context", 10**15, exit_code=3)
    assert "the largest context that fits is " in message


# Files.


def test_model_folder_missing(refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    message = refused("--model", folder, "--prompt", "a")
    assert message.startswith(f"{folder}: expected a model folder, found nothing; give the folder")


def test_model_is_a_name_on_a_hub(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused("--model", "meta-llama/Llama-3.1-8B", "--prompt", "a")
    assert "models are not downloaded from a hub; run `hf download meta-llama/Llama-3.1-8B --local-dir DIR`" in message


def test_model_is_empty(refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint)
    assert refused("--model", "", "--prompt", "a") == "flags: --model: expected a folder, found ''"


def test_model_is_a_file(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint / "config.json", "--prompt", "a")
    assert "expected a model folder, found a file" in message


def test_checksums_without_manifest(refused: Refused, checkpoint: Path) -> None:
    message = refused("--model", checkpoint, "--prompt", "a", "--verify-checksums")
    assert f"{checkpoint / 'SHA256SUMS'}: expected a manifest, found none" in message


def test_flipped_bit(refused: Refused, run: Run, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    flags = ("--model", folder, "--prompt", "a", "--max-new-tokens", "2", "--transport", "gloo", "--verify-checksums")
    assert run(*flags)[0] == 0
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    message = refused(*flags)
    assert "'model.safetensors'" in message
    assert "differing" in message
    assert "download" in message


@pytest.mark.parametrize("flag", ["--json", "--trace"])
def test_output_that_cannot_be_written(flag: str, refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    """The mistake is found before a generation that would be lost."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "none" / "out.json")
    for path, reason in (
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "dangling", "No such file or directory"),
        (tmp_path / "none" / "out.json", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "out.json", "Not a directory"),
    ):
        message = refused("--model", checkpoint, "--prompt", "a", flag, path)
        assert message.startswith(f"{flag.removeprefix('--')}: cannot write {path}: {reason}; give a file in a folder")


def test_refused_run_leaves_its_output_files_alone(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("kept")
    refused("--model", checkpoint, "--prompt", "", "--json", tmp_path / "new.json", "--trace", tmp_path / "old.json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "kept"


def test_config_file_missing(refused: Refused, tmp_path: Path) -> None:
    message = refused("--config", tmp_path / "none.yaml")
    assert message.startswith(f"config: cannot read {tmp_path / 'none.yaml'}: No such file")


def test_config_file_with_an_unknown_key(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("temprature: 1\n")
    assert refused("--config", path) == (
        f"config: {path}: unknown key 'temprature'; the nearest valid name is 'temperature'"
    )


# Tracebacks.


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--model", tmp_path / "none", "--prompt", "a", "--debug")
    assert code == 2
    assert out == ""
    assert err.startswith("Traceback")
    assert "from_folder" in err
    assert err.splitlines()[-1].startswith(f"alspec: exit 2: {tmp_path / 'none'}: expected a model folder")


def test_every_flag_with_a_value_has_a_bad_value_here() -> None:
    """A flag that is added to the schema needs its test."""
    covered = {flag.removeprefix("--").replace("-", "_") for flag, _, _ in BAD_VALUES}
    free_text_or_switch = {"model", "prompt", "prompt_file", "system", "stop", "json_file", "trace"} | {
        name for name, field in GenerateConfig.model_fields.items() if field.annotation is bool
    }
    left = set(GenerateConfig.model_fields) - free_text_or_switch - covered
    assert {_flag((name,), GenerateConfig.model_fields[name]) for name in left} <= {flag for flag, _, _ in BAD_VALUES}


def test_stdin_that_is_not_utf8(refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 ")))
    assert refused("--model", checkpoint) == "prompt: standard input is not UTF-8 at byte 3; give UTF-8 text"


@pytest.mark.parametrize("flag", ["--json", "--trace"])
def test_a_plan_writes_no_file(flag: str, refused: Refused, tmp_path: Path) -> None:
    message = f"flags: {flag}: --plan generates nothing to write there; leave one of them out"
    assert refused("--plan", flag, tmp_path / "out.json") == message
    assert not list(tmp_path.iterdir())


def test_a_file_may_need_a_flag(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    """`system` alone is refused, also from a file; with --chat the next mistake is reported."""
    path = tmp_path / "config.yaml"
    path.write_text("system: be brief\n")
    assert "system needs chat" in refused("--config", path, "--model", checkpoint, "--prompt", "a")
    assert "system needs chat" not in refused(
        "--config", path, "--model", checkpoint, "--chat", "--prompt", "a", "--transport", "symm"
    )


def test_a_mistake_in_a_file_names_the_file(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("prompt: a\nstop: [end, '']\n")
    assert refused("--config", path) == f"config: {path}: stop: expected a text, found ''"
    assert refused("--stop", "", "--prompt", "a") == "flags: --stop: expected a text, found ''"
    path.write_text("prompt: a\nprompt_ids: 1,2\n")
    message = "prompt and prompt_ids exclude each other; give exactly one prompt"
    for flags in ((), ("--model", checkpoint, "--seed", 3)):
        assert refused("--config", path, *flags) == f"config: {path}: {message}"
    path.write_text("seed: 3\n")
    assert refused("--config", path, "--prompt", "a", "--prompt-ids", "1,2") == f"flags: {message}"
    path.write_text("prompt_ids: 1,2\n")
    message = "chat needs a text prompt: prompt_ids are used as they are"
    assert refused("--config", path, "--chat") == f"flags and config: {path}: {message}"


def test_world_without_torchrun(refused: Refused, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "use torchrun" in refused("--model", checkpoint, "--prompt", "a", "--transport", "gloo")


def test_ranks_that_check_whether_a_file_is_writable_leave_none_behind(tmp_path: Path) -> None:
    """All ranks check at once: creating and removing the file would race with another rank's check."""
    path = tmp_path / "rows.jsonl"
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda _: check_writable("flags: --rows", path), range(400)):
            assert not path.exists()
    assert not list(tmp_path.iterdir())
