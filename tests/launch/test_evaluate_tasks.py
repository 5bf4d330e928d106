"""What `launch/evaluate.py` measures, and the files that it reads."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from alspec.config import EngineConfig, validate
from alspec.errors import UserError
from alspec.launch import evaluate, evaluate_tasks
from alspec.launch.evaluate_tasks import Task
from alspec.runtime.decoded_attention import CacheSetting
from alspec.runtime.engine import Engine
from alspec.runtime.quality import TextScore


def test_hit_rates_of_answers_where_no_guess_leaves_out_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer that reaches position 2 S + 63, only the rest counts: before it, nothing can miss."""
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


def test_texts_hold_every_line_end(tmp_path: Path) -> None:
    """Those that JSON allows inside a string as well; a byte order mark is no text."""
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
