"""The tasks of `launch/evaluate.py`, and the files that it reads."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alspec.config import EngineConfig, EvaluateConfig, validate
from alspec.errors import UserError
from alspec.launch import evaluate
from alspec.launch.evaluation import evaluate_tasks
from alspec.launch.evaluation.evaluate_tasks import Quality, Task
from alspec.launch.terminal.display import StatusLine
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.quality import TextScore
from alspec.runtime.eval.teacher_forced import CacheSetting


def test_hit_rates_of_answers_where_no_spec_output_leaves_out_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tokens of an answer from position 2 S + 63 on count: before it, nothing can miss."""
    engine = Engine(validate(EngineConfig, {"speculation": {"mode": "simulated"}, "transport": "gloo"}, "test"))
    num_layers = engine.model_config.num_layers

    def score(engine: Engine, ids: list[int], thresholds: Any, first: int, cache: CacheSetting) -> list[TextScore]:
        hits = torch.zeros(num_layers, len(ids))
        hits[:, :319] = 1
        return [TextScore(torch.zeros(len(ids) - 1), torch.tensor(ids[1:]), hits)]

    monkeypatch.setattr(evaluate_tasks, "_scores", score)
    for length, expected in ((300, None), (310, None), (313, None), (314, 0.0), (400, 0.0)):
        task = Task("recall", 0, [[0] * length], [list(range(6))])
        (quality,) = task.run(engine, [[0.0] * num_layers], CacheSetting())
        assert quality.value == 1.0
        assert quality.hit_rates == (None if expected is None else [expected] * num_layers), length
    both = Task("recall", 0, [[0] * 310, [0] * 400], [list(range(6))] * 2)
    assert both.run(engine, [[0.0] * num_layers], CacheSetting())[0].hit_rates == [0.0] * num_layers
    engine.close()


def simulated() -> Engine:
    return Engine(validate(EngineConfig, {"speculation": {"mode": "simulated"}, "transport": "gloo"}, "test"))


def test_recall_is_a_share_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulated()
    num_layers = engine.model_config.num_layers

    def score(engine: Engine, ids: list[int], thresholds: Any, first: int, cache: CacheSetting) -> list[TextScore]:
        return [TextScore(torch.zeros(len(ids) - 1), torch.zeros(len(ids) - 1).long(), torch.zeros(num_layers, 9))]

    monkeypatch.setattr(evaluate_tasks, "_scores", score)
    task = Task("recall", 0, [[1] * 5] * 4, [[0, 0], [0, 1], [1, 0], [0, 0]])
    assert task.run(engine, [[0.0] * num_layers], CacheSetting())[0].value == 0.5
    engine.close()


@pytest.mark.parametrize(("begin", "step"), [([7], 10), ([], 11)])
def test_windows_use_all_tokens(begin: list[int], step: int) -> None:
    """Three windows of 11 tokens, BOS included; one token less makes two windows."""
    for num_tokens, count in ((3 * step, 3), (3 * step - 1, 2)):
        ids = list(range(100, 100 + num_tokens))
        windows = [begin + ids[step * at : step * (at + 1)] for at in range(count)]
        assert evaluate_tasks.text_task(begin, ids, 11).texts == windows


def test_a_text_of_exactly_the_needed_tokens_is_enough() -> None:
    engine = simulated()
    assert engine.tokenizer is not None
    text = "The old man walked slowly down the road to the village."
    num_tokens = len(engine.tokenizer.encode(text, add_bos=False))
    (task,) = evaluate._tasks(engine, EvaluateConfig(windows=1), [num_tokens], text)
    assert [len(window) for window in task.texts] == [num_tokens]
    assert task.texts[0][0] == engine.tokenizer.bos_token_id
    with pytest.raises(UserError, match=f"1 windows of {num_tokens + 1} tokens needed, .* has {num_tokens}"):
        evaluate._tasks(engine, EvaluateConfig(windows=1), [num_tokens + 1], text)
    engine.close()


def test_records_fill_a_context_up_to_the_last_position(tmp_path: Path) -> None:
    """All pairs are used if they fit exactly."""
    engine, path = simulated(), tmp_path / "records.jsonl.gz"
    pairs = [[f"key-{i}", f"value-{i}"] for i in range(5)]
    lines = [json.dumps({"ordered_kv_records": pairs, "key": f"key-{i}", "value": f"value-{i}"}) for i in range(3)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert [len(evaluate_tasks._record_cases(path, count)) for count in (1, 2, 9)] == [1, 2, 3]
    (case,) = evaluate_tasks._record_cases(path, 1)
    longest = evaluate_tasks.records_task(engine, path, 1).context
    for context, count in ((longest, 5), (longest - 1, 4)):
        assert len(evaluate_tasks._pairs_within(engine, case, context, 0.5)) == count
    for limit in (longest, longest - 1):
        engine.model_config = engine.model_config.model_copy(update={"max_position_embeddings": limit})
        if limit == longest:
            assert evaluate_tasks.records_task(engine, path, 1).context == longest
        else:
            with pytest.raises(UserError, match=f"prompts of {longest} tokens; the model has {limit} positions"):
                evaluate_tasks.records_task(engine, path, 1)
    engine.close()


def quality_row(
    measure: str, context: int, depth: float | None, value: float, hit_rate: float | None
) -> dict[str, Any]:
    case = {"measure": measure, "context": context, "depth": depth, "cache": "bf16", "threshold": "0.1"}
    return {"case": case, "value": value, "hit_rate": hit_rate}


def test_the_table_averages_over_depths_and_has_the_hit_rate_of_the_longest_text() -> None:
    config = SimpleNamespace(model=None, speculation=SimpleNamespace(chunk_size=128))
    engine: Any = SimpleNamespace(config=config, weights_name="int4 (groups of 64), dequantised to fp32")
    rows = [quality_row("bits per byte", 1024, None, 1.5, 0.25), quality_row("bits per byte", 8192, None, 1.25, 0.75)]
    rows += [quality_row("needle", 8192, depth, value, 0.5) for depth, value in ((0.0, 1.0), (1.0, 0.5))]
    columns = evaluate._table(engine, rows).columns
    assert {str(column.header): list(column.cells) for column in columns} == {
        "cache": ["bf16"],
        "lambda": ["0.1"],
        "bits per byte 1024": ["1.5000"],
        "bits per byte 8192": ["1.2500"],
        "needle 8192": ["0.7500"],
        "hit rate, bits per byte 8192": ["0.750"],
    }


def test_heads_of_two_bits_need_another_head_on_the_rank() -> None:
    model_config, placement = SimpleNamespace(local_heads=lambda tp_size: (8, 4 // tp_size)), SimpleNamespace(tp_size=4)
    engine: Any = SimpleNamespace(model_config=model_config, placement=placement)
    with pytest.raises(UserError, match="turbo-mixed needs two KV heads on each rank; run fewer ranks"):
        evaluate._evaluate(engine, EvaluateConfig(), [], [CacheSetting(), CacheSetting("turbo-mixed")], "command")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_writes_rows(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_row", lambda *_: {"a": 1})
    monkeypatch.setattr(Task, "run", lambda *_: [Quality(1.0, None)])
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(num_layers=2),
        config=SimpleNamespace(speculation=SimpleNamespace(threshold=0.1)),
        placement=SimpleNamespace(rank=rank),
    )
    config = EvaluateConfig(thresholds=(0.1,), rows=tmp_path / "rows.jsonl")
    rows = evaluate._measure(engine, config, [Task("text", 8, [[1]])], [CacheSetting()], "command", StatusLine(False))
    assert rows == [{"a": 1}]
    assert (tmp_path / "rows.jsonl").exists() == (rank == 0)


def test_texts_may_hold_every_line_end(tmp_path: Path) -> None:
    """Also line ends that JSON allows inside a string; a byte order mark is not text."""
    texts = ["a\u2028b", "c\u2029\x85d"]
    path = tmp_path / "text.jsonl"
    path.write_text("\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), "utf-8-sig")
    assert evaluate_tasks.read_text(path) == "\n\n".join(texts)
    (tmp_path / "text.txt").write_text("a\u2028b", "utf-8-sig")
    assert evaluate_tasks.read_text(tmp_path / "text.txt") == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON (Expecting property name"),
        ("[" * 100_000, "not JSON (nested too deeply)"),
        (f'{{"text": {"1" * 5000}}}', "not JSON (Exceeds the limit"),
        ('{"text": 5}', 'expected a text, as in {"text": "..."}, found 5'),
        ('{"txt": "a"}', "expected a text, as in {\"text\": \"...\"}, found {'txt': 'a'}"),
        ('"text"', 'expected a text, as in {"text": "..."}, found \'text\''),
        ('{"text": "\\ud800 hello"}', 'expected a text, as in {"text": "..."}, found \'\\ud800 hello\''),
    ],
    ids=range(7),
)
def test_a_broken_line_is_refused(line: str, fault: str, tmp_path: Path) -> None:
    path, records = tmp_path / "text.jsonl", tmp_path / "records.jsonl.gz"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n', encoding="utf-8")
    records.write_bytes(gzip.compress(line.encode()))
    with pytest.raises(UserError, match=re.escape(f"flags: --text: {path}:3: {fault}")):
        evaluate_tasks.read_text(path)
    with pytest.raises(UserError, match=f"flags: --records: {records}: broken at "):
        evaluate_tasks._record_cases(records, 1)


@pytest.mark.parametrize("value", ["\ud800", 5, None])
def test_records_are_texts(value: object, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl.gz"
    good = {"ordered_kv_records": [["a", "b"]], "key": "a", "value": "b"}
    for change in ({"ordered_kv_records": [["a", value]]}, {"key": value}, {"value": value}):
        path.write_bytes(gzip.compress(json.dumps(good | change).encode()))
        with pytest.raises(UserError, match=f"flags: --records: {path}: broken at .*expected texts as keys and values"):
            evaluate_tasks._record_cases(path, 1)


def test_broken_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.jsonl.xz"
    path.write_bytes(b"not xz")
    assert evaluate.main(["--text", str(path)]) == 2
    assert f"{path}: broken" in capsys.readouterr().err
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9" * 1000)
    with pytest.raises(UserError, match=f"flags: --text: {path}: not UTF-8 at byte 3; give a UTF-8 text file"):
        evaluate_tasks.read_text(path)


def common_tokens(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@pytest.mark.full
def test_answers_agree_as_far_as_greedy_decoding_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The share before the first difference is that of answers which the engine decodes under speculation."""
    monkeypatch.setattr(evaluate_tasks, "ANSWER_TOKENS", 16)
    text = (tmp_path / "text.txt", tmp_path / "rows.jsonl")
    # Without rhyme or reason, so that near and far tokens suggest different ones.
    words = [
        "the",
        "old",
        "man",
        "walked",
        "down",
        "a",
        "road",
        "and",
        "nobody",
        "knew",
        "him",
        "in",
        "village",
        "of",
        "green",
        "hills",
        "7",
        "19",
        "42",
        "when",
        "night",
        "fell",
    ]
    text[0].write_text(" ".join(random.Random(4).choices(words, k=3000)))
    context, count, thresholds = 600, 3, (0.0, 0.3, float("inf"))
    argv = ["--text", str(text[0]), "--contexts", str(context), "--windows", "0", "--answers", str(count)]
    argv += [
        "--predictor",
        "window",
        "--transport",
        "gloo",
        "--thresholds",
        ",".join(map(str, thresholds)),
        "--rows",
        str(text[1]),
    ]
    assert evaluate.main(argv) == 0
    rows = [json.loads(line) for line in text[1].read_text().splitlines()]
    assert [row["case"]["measure"] for row in rows] == ["greedy tokens equal"] * 3

    options = {"transport": "gloo", "speculation": {"mode": "off"}}
    with Engine(validate(EngineConfig, options, "test")) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(text[0].read_text(), add_bos=False)
        (task,) = evaluate_tasks.answer_tasks(engine, ids, [context], count)
        answers = evaluate_tasks.answered(engine, task).answers
    assert answers is not None
    assert all(context - 16 - 8 <= len(prompt) <= context - 16 for prompt in task.texts)
    total = sum(map(len, answers))
    for threshold, row in zip(thresholds, rows, strict=True):
        options["speculation"] = {"mode": "simulated", "threshold": threshold, "predictor": "window"}
        with Engine(validate(EngineConfig, options, "test")) as engine:
            lossy = [engine.generate(prompt, max_new_tokens=16).token_ids for prompt in task.texts]
        common = sum(map(common_tokens, lossy, answers))
        assert row["details"]["share before the first difference"] == pytest.approx(common / total)
        assert row["details"]["share of whole answers"] == sum(map(list.__eq__, lossy, answers)) / count
        assert row["value"] >= common / total
    assert rows[0]["value"] == 1.0
    assert rows[-1]["value"] < 1.0
    assert rows[-1]["hit_rate"] == 1.0


def test_contexts_without_room_for_an_answer_are_refused() -> None:
    engine = simulated()
    with pytest.raises(UserError, match="flags: --contexts: 140 tokens have no room for a prompt and 128 more"):
        evaluate_tasks.answer_tasks(engine, [1] * 999, [140], 1)
    engine.close()
