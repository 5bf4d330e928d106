"""`--draft` on the command line: the same text, reports, measurements, and what does not go together with it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import fast

from alspec import Engine
from alspec.config import EngineConfig, SamplingConfig, validate
from alspec.errors import UserError
from alspec.launch import evaluate, latency, plot_trace
from alspec.launch.evaluation import evaluate_drafts
from alspec.runtime.profiling.stats import spread

Run = Callable[..., tuple[int, str, str]]
PROMPT = "One two three four. One two three four. One two three "
LENGTH = ("--max-new-tokens", 30, "--ignore-eos")
# A text of few characters repeats itself.
FEW = ("--logit-bias", ",".join(f"{token}=60" for token in (1, 66, 67, 68)))


def test_drafters() -> None:
    """YAML reads off as false."""
    for value, expected in ((False, "off"), ("off", "off"), ("self", "self"), ("model:a/b", "model:a/b")):
        assert EngineConfig.model_validate({"draft": value}).draft == expected
    for wrong in (True, "on", "model:", "model", 4, ["ngram"], {}, None):
        with pytest.raises(UserError, match=r"^Engine: draft: expected off, ngram, self or model:DIR, found "):
            validate(EngineConfig, {"draft": wrong}, "Engine")


def test_json_says_which_tokens_were_drafts(generate_json: Callable[..., Any]) -> None:
    plain = generate_json("--prompt", PROMPT, *LENGTH, *FEW)
    found = generate_json("--prompt", PROMPT, *LENGTH, *FEW, "--draft", "ngram", "--draft-tokens", 3, "--draft-always")
    (request,), (expected,) = found["requests"], plain["requests"]
    assert request["token_ids"] == expected["token_ids"]
    assert "drafted" not in expected
    assert plain["rounds"] == []
    assert plain["summary"]["drafts"] is None
    rounds = [each for step in found["rounds"] for each in step]
    drafted: list[bool] = []
    for _, accepted in rounds:
        drafted += [True] * accepted + [False]
    assert request["drafted"] == [False, *drafted][: len(request["token_ids"])]
    drafts = found["summary"]["drafts"]
    assert sum(drafts["accepted_histogram"]) == drafts["rounds"] == sum(count > 0 for count, _ in rounds) > 0
    assert sum(accepted for _, accepted in rounds) > 0
    assert len(found["step_us"]) == len(rounds) < len(plain["step_us"])
    assert found["config"]["draft"] == "ngram"


def rounds_in(trace: Path) -> list[dict[str, Any]]:
    """The rounds of rank 0 in a trace, none of which begins before the end of the one before."""
    found = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "round"]
    for event, following in itertools.pairwise(found):
        assert event["ts"] + event["dur"] <= following["ts"] + 1e-2
    return found


def test_a_trace_has_the_drafts_of_each_round(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Beside the operations of eager rounds. An ended request has no entry."""
    lines = [json.dumps({"prompt": text}) for text in (PROMPT, "One")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    trace, stop = tmp_path / "trace.json", ("--stop-ids", "67", "--temperature", 1.5, "--seed", 7)
    flags = ("--prompt-file", tmp_path / "prompts.jsonl", *LENGTH, *FEW, *stop, "--json", tmp_path / "out.json")
    flags = ("--model", checkpoint, "--transport", "gloo", *flags, "--draft", "ngram", "--draft-always")
    assert run(*flags, "--trace", trace)[0] == 0
    written = json.loads((tmp_path / "out.json").read_text())
    found = rounds_in(trace)
    assert [
        [list(pair) for pair in zip(event["args"]["drafts"], event["args"]["accepted"], strict=True)] for event in found
    ] == written["rounds"]
    assert {len(step) for step in written["rounds"]} == {1, 2}
    assert any(taken for step in written["rounds"] for _, taken in step)
    assert [event["args"]["step_us"] for event in found] == pytest.approx(written["step_us"], abs=1e-3)
    assert [event["args"]["step"] for event in found] == list(range(1, len(found) + 1))
    assert all(event["dur"] == pytest.approx(event["args"]["step_us"], abs=1e-2) for event in found)
    attention = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "attention"]
    for event in found:
        inside = [each for each in attention if each["args"]["step"] == event["args"]["step"]]
        assert inside
        assert all(event["ts"] < each["ts"] + each["dur"] / 2 < event["ts"] + event["dur"] for each in inside)


def test_color_shades_accepted_drafts(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    flags = ("--model", checkpoint, "--transport", "gloo", "--prompt", PROMPT, *LENGTH, *FEW, "--draft", "self")
    code, out, err = run(*flags, "--draft-always", "--color", "--json", tmp_path / "out.json")
    assert code == 0
    assert "self, up to 4: " in err
    (request,) = json.loads((tmp_path / "out.json").read_text())["requests"]
    pieces = re.findall(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", out, re.DOTALL)
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == request["text"] + "\n"
    assert len(pieces) == sum(request["drafted"]) > 10


@pytest.mark.parametrize("draft", ["self", "model"])
def test_the_format_of_quantised_drafters(run: Run, checkpoint: Path, tmp_path: Path, draft: str) -> None:
    """In the panel and in JSON, of a copy or of a smaller model; on the CPU values are dequantised. Texts are equal."""
    flags = ("--model", checkpoint, "--transport", "gloo", "--prompt", PROMPT, "--max-new-tokens", 8)
    code, text, _ = run(*flags)
    assert code == 0
    name = draft if draft == "self" else f"model:{checkpoint}"
    for given, expected in (
        (("--draft-weights", "fp8"), "fp8 (a scale for each row), dequantised to fp32"),
        ((), None),
    ):
        code, out, err = run(*flags, "--draft", name, *given, "--draft-always", "--json", tmp_path / "out.json")
        assert (code, out) == (0, text)
        written = json.loads((tmp_path / "out.json").read_text())
        assert written["summary"]["draft_weights"] == expected
        panel = re.sub(r"\s+", "", err)
        assert re.sub(r"\s+", "", f"drafts: {name}{', weights ' + expected if expected else ''}, up to 4: ") in panel
    code, _, err = run(*flags, "--draft", name, "--draft-weights", "int4")
    assert (code, err.count("\n")) == (2, 1)
    assert "draft_weights: int4 needs inputs in groups of 32, a rank has" in err


def test_a_batch_in_a_small_model_with_a_draft_model(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": text}) for text in ("One", "Two three", "Go")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = ("--model", checkpoint, "--transport", "gloo", "--prompt-file", tmp_path / "prompts.jsonl", *LENGTH)
    flags = (*flags, "--answers", 2, "--temperature", 1)
    code, expected, _ = run(*flags)
    assert code == 0
    code, found, err = run(*flags, "--draft", f"model:{checkpoint}")
    assert (code, found) == (0, expected)
    assert "no drafts: none to make, none that pay" in err, "drafts cost as much as the model itself"
    code, found, err = run(*flags, "--draft", f"model:{checkpoint}", "--draft-always")
    assert (code, found) == (0, expected)
    assert re.search(r"model:\S+, up to 4: 4\.\d\d tokens a step", re.sub(r"\s+", " ", err))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--draft", "ngram", "--speculation", "simulated"), "draft: ngram needs --speculation off, found simulated"),
        (("--draft", "ngram", "--speculation", "paired"), "draft: ngram needs --speculation off, found paired"),
        (("--draft", "4"), "flags: --draft: expected off, ngram, self or model:DIR, found '4'"),
        (("--draft", "model:"), "flags: --draft: expected off, ngram, self or model:DIR, found 'model:'"),
        (("--draft", "ngram", "--draft-tokens", 0), "flags: --draft-tokens: expected 1 or more, found '0'"),
        (("--draft", "ngram", "--draft-tokens", 16), "flags: --draft-tokens: expected 15 or less, found '16'"),
        (("--draft-always",), "draft_always without effect: draft is off"),
        (("--draft", "ngram", "--draft-weights", "int4"), "draft_weights without effect: no model drafts with ngram"),
        (
            ("--draft", "self", "--weights", "fp8", "--draft-weights", "fp8"),
            "draft_weights: fp8 copies weights of more",
        ),
        (("--draft", "model:a\0b"), "draft: model: expected a path, found 'a\\x00b'"),
        (("--draft", "model:nowhere"), "draft: nowhere: expected a model folder, found nothing"),
        (("--draft", "self", "--cuda-graph", "on"), "cuda_graph: on needs a GPU"),
        (("--draft", "self", "--transport", "symm"), "symm"),
    ],
)
def test_refusals(run: Run, checkpoint: Path, flags: tuple[Any, ...], expected: str) -> None:
    code, _, err = run("--model", checkpoint, "--prompt", PROMPT, *flags)
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1


def test_drafts_where_auto_takes_a_pair(
    run: Run, checkpoint: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message does not blame a setting that was not given, and names the numbers of ranks that work."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    path = make_checkpoint() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 50}))
    for draft, ranks in (("ngram", "1, 2, 4"), (f"model:{path.parent}", "1, 2")):
        code, _, err = run("--model", checkpoint, "--prompt", PROMPT, "--draft", draft)
        assert (code, err) == (
            2,
            f"alspec: exit 2: draft: {draft} needs mode off, and --speculation auto takes a pair here, because heads "
            f"do not divide over 8 ranks; numbers of ranks that work: {ranks}\n",
        )


def test_a_number_of_drafts_without_a_drafter(run: Run, checkpoint: Path) -> None:
    flags = ("--model", checkpoint, "--transport", "gloo", "--prompt", PROMPT, "--max-new-tokens", 2)
    assert "alspec: --draft-tokens without effect: --draft is off\n" in run(*flags, "--draft-tokens", 5)[2]
    assert "without effect" not in run(*flags, "--draft-tokens", 5, "--draft", "ngram")[2]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--draft", "ngram", "--modes", "off,paired"), "flags: --modes: --draft needs off, found off,paired"),
        (("--acceptances", "0.5"), "flags: --acceptances: only drafts are accepted; add --draft"),
        (("--draft", "ngram", "--codecs", "bf16,turbo4", "--trace", "t.json"), "flags: --trace: records one mode over"),
        (("--draft", "ngram", "--acceptances", "0.5"), "flags: --acceptances: forced shares need captured rounds"),
    ],
)
def test_what_latency_refuses_of_rounds(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, flags: tuple[str, ...], expected: str
) -> None:
    assert latency.main(["--model", str(checkpoint), "--transport", "gloo", "--contexts", "32", *flags]) == 2
    assert expected in capsys.readouterr().err


def test_latency_of_rounds(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real acceptance behind a text that repeats itself; rows, samples and trace have what was accepted."""
    (tmp_path / "text.txt").write_text("One two three. " * 20)
    flags = ["--model", checkpoint, "--transport", "gloo", "--contexts", "40", "--steps", "5", "--draft", "ngram"]
    flags += ["--prompt-file", tmp_path / "text.txt", "--rows", tmp_path / "rows.jsonl", "--draft-always"]
    flags += ["--json", tmp_path / "out.json", "--trace", tmp_path / "trace.json"]
    assert latency.main([str(flag) for flag in flags]) == 0
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["bench"], row["case"]["draft"], row["case"]["acceptance"]) == ("decode_round", "ngram", "real")
    assert (row["case"]["draft_weights"], row["case"]["weights"]) == ("auto", "fp32")
    assert 1.0 <= row["tokens_per_step"] <= 5.0
    assert sum(row["accepted"]) <= 5
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"] == [row]
    (sample,) = written["samples"]
    assert sample["case"] == row["case"]
    assert row["us"] == pytest.approx(spread(sample["round_us"][0]), abs=1e-3)
    accepted = [taken for ((made, taken),) in sample["rounds"] if made]
    drafting = [us for us, ((made, _),) in zip(sample["round_us"][0], sample["rounds"], strict=True) if made]
    assert row["drafting_us"] == (pytest.approx(spread(drafting), abs=1e-3) if drafting else None)
    assert [accepted.count(number) for number in range(5)] == row["accepted"]
    assert len(sample["rounds"]) * row["tokens_per_step"] == 5 + sum(taken for ((_, taken),) in sample["rounds"])
    found = rounds_in(tmp_path / "trace.json")
    assert [[[*event["args"]["drafts"], *event["args"]["accepted"]]] for event in found] == sample["rounds"]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == row
    assert plot_trace.main([str(tmp_path / "trace.json"), str(tmp_path / "trace.svg"), "--step", "1"]) == 2
    assert "trace.json has no pair: " in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_latency_draws_rounds_over_each_cache(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", checkpoint, "--transport", "gloo", "--contexts", "40,20", "--steps", "2", "--draft", "ngram"]
    flags += ["--codecs", "bf16,turbo4", "--plot", tmp_path / "plot.svg"]
    assert latency.main([str(flag) for flag in flags]) == 0
    out = capsys.readouterr().out
    assert out.count("ms/step p50") == 1, "one table"
    assert len(re.findall(r"(bf16|turbo4) +\S+ +real", out)) == 4
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for text in ("bf16, real drafts", "turbo4, real drafts", "ms/step", "tokens/s"):
        assert text in drawn


def test_plan_counts_the_draft_model(run: Run, checkpoint: Path) -> None:
    """Weights and cache of the model itself, twice; pairs do not draft."""

    def sizes(*flags: object) -> dict[tuple[str, str], list[float]]:
        code, out, _ = run("--plan", *flags)
        assert code == 0
        assert ("latency of plain steps" in out) == ("--draft" in flags)
        rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in out.splitlines() if re.match(r"│\s*\d", line)]
        return {(row[0], row[1]): [float(cell) for cell in row[3:6]] for row in rows}

    plain, drafted = sizes(), sizes("--draft", "model:models/demo/checkpoint")
    assert {key for key in plain if key[1] == "off"} == set(drafted)
    for key, (weights, cache, buffers) in drafted.items():
        assert weights == pytest.approx(2 * plain[key][0], abs=0.011)
        assert cache == pytest.approx(2 * plain[key][1], abs=0.011)
        assert buffers >= plain[key][2]


def test_a_draft_model_with_fewer_positions(
    run: Run, checkpoint: Path, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """It drafts as far as its positions go; the text is the same."""
    path, longest, num_rows = make_checkpoint() / "config.json", 80, 4
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": longest}))
    flags = ("--model", checkpoint, "--transport", "gloo", "--prompt", PROMPT, "--max-new-tokens", 60, "--ignore-eos")
    drafts = ("--draft", f"model:{path.parent}", "--draft-tokens", num_rows - 1, "--draft-always")
    code, text, err = run(*flags, *drafts, "--json", tmp_path / "out.json")
    assert (code, text) == (0, run(*flags)[1])
    notice = f"alspec: draft: model:{path.parent} has 80 positions: longer texts go on without drafts\n"
    assert err.count(notice) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    length, drafted = len(found["requests"][0]["prompt_ids"]) + 1, []
    for ((count, accepted),) in found["rounds"]:
        drafted.append(count > 0)
        assert drafted[-1] == (length <= longest - 2 * num_rows)
        length += accepted + 1
    assert sum(drafted) > 2
    assert length > longest + 20
    shorter = run(*flags[:-2], 20, *drafts)  # all of it within the positions
    assert shorter[0] == 0
    assert "positions" not in shorter[2]


def test_plan_refuses_the_tokenizers_that_a_run_refuses(
    run: Run, checkpoint: Path, make_checkpoint: Callable[..., Path]
) -> None:
    """A plan needs no tokenizers: it compares those that are there."""
    path = make_checkpoint() / "tokenizer.json"
    flags = ("--model", checkpoint, "--draft", f"model:{path.parent}")
    assert run("--plan", *flags)[0] == 0
    path.write_text(path.read_text().replace("<user>", "<other>"))
    code, out, err = run("--plan", *flags)
    assert (code, out) == (2, "")
    assert err == run("--prompt", PROMPT, *flags)[2]
    assert "expected the model's tokenizer, whose id 98 is '<user>', found '<other>'" in err
    path.write_text("{}")
    code, _, err = run("--plan", *flags)
    assert code == 2
    assert err.startswith(f"alspec: exit 2: draft: {path}: unreadable tokenizer: ")
    path.unlink()
    assert run("--plan", *flags)[0] == 0
    assert run("--plan", "--random-weights", checkpoint, "--draft", f"model:{checkpoint}")[0] == 0


@pytest.mark.parametrize("drafter", fast(["ngram", "self"], keep=["self"]))
def test_evaluate_measures_drafts(
    checkpoint: Path, tmp_path: Path, drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, rows = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_text("The old man walked slowly down the road. " * 30)
    flags = ["--model", checkpoint, "--transport", "gloo", "--text", text, "--draft", drafter, "--draft-tokens", 2]
    flags += ["--contexts", "130,200", "--windows", 2, "--temperatures", "0,1.5", "--rows", rows]
    assert evaluate.main(list(map(str, flags))) == 0
    assert "tokens a step" in capsys.readouterr().out
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["case"]["context"], row["case"]["temperature"]) for row in found] == [
        (130, 0.0), (130, 1.5), (200, 0.0), (200, 1.5),
    ]  # fmt: skip
    for row in found:
        details = row["details"]
        assert (details["differing_tokens"], details["parted_by"]) == (0, [])
        assert row["value"] == details["tokens_per_step"] >= 1.0
        if drafter == "self":  # sink and window are everything: all drafts are right
            # 63 tokens behind the first: 21 rounds of three, in each of two windows.
            assert (row["value"], details["accepted_histogram"]) == (3.0, [0, 0, 42])
            assert details["accepted_by_place"] == [1.0, 1.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_forced_acceptance(tmp_path: Path) -> None:
    """The bundled model, captured: of 0, 0.5 and 1 of the drafts, so many tokens are kept, and rows say so."""
    rows, flags = tmp_path / "rows.jsonl", ("--draft", "self", "--draft-tokens", 3, "--draft-always")
    measured = ("--contexts", 600, "--steps", 100, "--acceptances", "0,0.5,1", "--rows", rows)
    assert latency.main([str(flag) for flag in (*flags, *measured)]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["case"]["acceptance"] for row in found] == [0.0, 0.5, 1.0]
    for row, least, most in zip(found, (1.0, 1.5, 3.8), (1.0, 2.3, 4.0), strict=True):
        # At 0.5: 1 + 1/2 + 1/4 + 1/8 tokens a round on average.
        assert least <= row["tokens_per_step"] <= most
        assert row["case"]["cuda_graph"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["us"]["p50"] * 1e6, rel=0.2)


def test_texts_that_part_from_plain_steps_are_counted(checkpoint: Path) -> None:
    with Engine.from_pretrained(checkpoint, transport="gloo") as engine:
        prompts, texts, near = [[3, 4, 5], [9, 8]], [], []
        for seed, prompt in enumerate(prompts):
            how = SamplingConfig(max_new_tokens=evaluate_drafts.NEW_TOKENS, ignore_eos=True, seed=seed, logprobs=2)
            answer = engine.generate(prompt, how)
            assert answer.logprobs is not None
            texts.append(list(answer.token_ids))
            near.append(answer.logprobs[60].top)
        case = {"temperature": 0.0}
        assert evaluate_drafts._differences(engine, case, prompts, texts) == {"differing_tokens": 0, "parted_by": []}
        texts[1][60:63] = [(token + 1) % 100 for token in texts[1][60:63]]
        found = evaluate_drafts._differences(engine, case, prompts, texts)
        assert found["differing_tokens"] == 3
        assert found["parted_by"] == [round(near[1][0][1] - near[1][1][1], 4)]
