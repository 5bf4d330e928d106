"""Which flags of `launch/evaluate.py` are accepted, and which settings they give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from alspec.config import EvaluateConfig, EvaluatedCodec, Selector, Sketch, ValueQuantiser, validate
from alspec.kernels.kv_codec.flashq.quantize import SELECTORS
from alspec.launch import evaluate
from alspec.runtime.eval.teacher_forced import CODECS, SOFTMAXES, CacheSetting


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The old man walked slowly down the road to the village, where nobody knew him now. " * 40)
    return path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--contexts", "8q"], "--contexts: expected lengths such as 1k,8k or 4096, found '8q'"),
        (["--contexts", "16k"], "16384 is beyond the model's 8192 positions"),
        (["--thresholds", "0,-1"], "--thresholds: expected 0 or more, found '-1'"),
        (["--windows", "100", "--contexts", "1k"], "100 windows of 1024 tokens needed"),
        (
            ["--records", "nowhere.jsonl.gz", "--contexts", "64", "--windows", "1"],
            "--records: cannot read nowhere.jsonl.gz",
        ),
        (["--text", "nowhere.txt"], "--text: cannot read nowhere.txt: No such file or directory"),
        (["--codecs", "bf16,int4"], "--codecs: expected bf16, int8, turbo4, "),
        (["--codecs", "bf16,int4"], "hybrid-k4v2 or hybrid-k3v2, found 'int4'"),
        (["--qjl", "on"], "--qjl: expected off, gaussian or orthogonal, found 'on'"),
        (["--norm-corrections", "x"], "--norm-corrections: expected on or off, found 'x'"),
        (["--protect", "-1", "--codecs", "turbo4"], "--protect: expected 0 or more, found '-1'"),
        (["--softmaxes", "exact,fast"], "--softmaxes: expected exact or sas, found 'fast'"),
        (["--selectors", "size"], "min_max or variation, found 'size'"),
        (["--depths", "0,1.5"], "--depths: expected 1 or less, found '1.5'"),
        (["--low-heads", "0,x"], "--low-heads: expected an integer, found 'x'"),
        (["--recall", "-1"], "--recall: expected 0 or more, found '-1'"),
        (["--speculation", "off"], "--speculation: evaluate is always simulated; leave it out"),
        (["--max-context", "64"], "--max-context: lengths come from --contexts; leave it out"),
        (["--windows", "0"], "nothing to measure"),
        (["--windows", "0", "--recall", "1", "--contexts", "16"], "--contexts: a recall prompt of 8 facts takes "),
        (["--windows", "0", "--recall", "1", "--baselines"], "--baselines takes its fixed layers from bits per byte"),
        (
            ["--codecs", "turbo-mixed", "--low-heads", "5", "--contexts", "64", "--windows", "1"],
            "--low-heads: a rank has 4 KV heads",
        ),
        (
            ["--baselines", "--contexts", "128,575", "--windows", "1", "--chunk", "256"],
            "in 575 tokens A~ leaves out none; give --contexts beyond 575",
        ),
        (["--threshold", "0.3"], "--threshold: only --baselines needs one; give --thresholds, or leave it out"),
        (["--low-heads", "1", "--codecs", "bf16,turbo4"], "--low-heads: only turbo-mixed has heads of 2 bits; add it"),
        (["--selectors", "entropy"], "--selectors: only turbo-mixed has heads of 2 bits; add it to --codecs"),
        (["--block-sizes", "32"], "--block-sizes: a bf16 cache has no blocks; add another one to --codecs"),
        (
            ["--protect", "0,2"],
            "--protect: a bf16 cache has no quantised layers; add another one to --codecs, or leave it",
        ),
        (["--kv-protect", "2"], "--kv-protect: a bf16 cache has no quantised layers; add another one to --codecs"),
        (
            ["--kv-protect", "2", "--protect", "1", "--codecs", "turbo4"],
            "--kv-protect: --protect names the numbers; add it there, or leave it out",
        ),
        (
            ["--codecs", "turbo4", "--protect", "0,5", "--contexts", "64", "--windows", "1"],
            "--protect: expected less than half of the model's 10 layers, found 5",
        ),
        (
            ["--qjl", "gaussian", "--codecs", "turbo4,hybrid-k4v3"],
            "--qjl: only TurboQuant's keys have a sketch; add a turboquant codec to --codecs, or leave it out",
        ),
        (
            ["--norm-corrections", "off", "--codecs", "turbo4"],
            "--norm-corrections: only TurboQuant's codes have a norm",
        ),
        (
            ["--norm-corrections", "on,off", "--codecs", "hybrid-k4v3", "--value-quantisers", "uniform"],
            "--norm-corrections: only TurboQuant's codes have a norm; add a turboquant codec to --codecs, or leave",
        ),
        (
            ["--value-quantisers", "uniform", "--codecs", "turbo4"],
            "--value-quantisers: only for TurboQuant's values; add a turboquant or hybrid codec to --codecs",
        ),
        (["--depths", "0.5", "--recall", "1"], "--depths: only needles have a depth; give --needles"),
        (["--kv-cache", "turbo4", "--codecs", "bf16"], "--kv-cache: --codecs names the caches to measure"),
        (["--softmax", "sas", "--softmaxes", "exact"], "--softmax: --softmaxes names those to measure"),
        (["--draft-tokens", "3"], "--draft-tokens: only --draft has drafts; give one of its drafters, or leave it out"),
        (
            ["--temperatures", "0.5"],
            "--temperatures: only --draft generates at a temperature; give one",
        ),
        (["--draft", "ngram", "--codecs", "turbo4"], "--codecs: not measured with --draft; leave one of them out"),
        (["--draft", "ngram", "--windows", "0"], "--windows: --draft measures windows of the text; give 1 or more"),
        (["--draft", "ngram", "--contexts", "128"], "--contexts: expected more than 128 tokens, as 64 of them are "),
        (["--draft", "ngram", "--contexts", "8k"], "16 windows of 8192 tokens needed"),
        (["--draft", "self", "--speculation", "simulated"], "--speculation: drafts are measured without; leave it out"),
        *(
            (
                ["--recall-blocks", "8", "--predictor", "window", *draft],
                "--recall-blocks: --predictor window recalls no ",
            )
            for draft in ([], ["--draft", "self"])
        ),
        (["--recall-blocks", "8", "--recall-counts", "16"], "--recall-blocks: --recall-counts names the numbers of "),
        (["--draft", "n-gram"], "--draft: expected off, ngram, self or model:DIR, found 'n-gram'"),
        (["--windos", "3"], "unknown flag --windos; the nearest valid name is --windows"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes(text: Path, flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--text", str(text), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("alspec: exit 2: ")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    "settings",
    [
        {"speculation": {"threshold": 0.1}, "block_sizes": [64], "selectors": "gap_std", "kv_cache": "bf16"},
        {"speculation": {"threshold": 0.3}, "baselines": True},
        {"codecs": "bf16,turbo-mixed", "low_heads": 1, "selectors": "entropy", "block_sizes": 32},
        {"kv_cache": "turbo-mixed", "low_heads": 1},
        {"codecs": "int8", "block_sizes": 32},
        {"softmax": "sas", "depths": 0.5, "needles": 1},
        {"codecs": "bf16,turboquant3", "protect": "0,2", "qjl": "gaussian", "norm_corrections": "off"},
        {"codecs": "hybrid-k4v2", "protect": 2, "norm_corrections": "off", "value_quantisers": "codebook,uniform"},
        {"kv_cache": "turbo4", "kv_protect": 2},
    ],
    ids=range(9),
)
def test_settings_with_an_effect_are_accepted(settings: dict[str, Any]) -> None:
    evaluate._check(validate(EvaluateConfig, {"text": "text.txt"} | settings, "test"))


def test_settings_without_effect_are_measured_once() -> None:
    """Each codec meets the values of a flag that change it; the others stay at their defaults."""
    settings = {"codecs": "bf16,int8,turbo4,turboquant2,hybrid-k3v2", "norm_corrections": "on,off"}
    settings |= {"protect": "0,1", "value_quantisers": "codebook,uniform", "qjl": "off,gaussian"}
    caches = evaluate._caches(validate(EvaluateConfig, {"text": "text.txt"} | settings, "test"))
    counts = {codec: sum(cache.codec == codec for cache in caches) for codec in settings["codecs"].split(",")}
    assert counts == {"bf16": 1, "int8": 2, "turbo4": 2, "turboquant2": 16, "hybrid-k3v2": 2 * 3}
    assert all(
        cache.norm_correction for cache in caches if (cache.codec, cache.value_quantiser) == ("hybrid-k3v2", "uniform")
    )


def test_settings_from_a_file(text: Path, tmp_path: Path) -> None:
    """Lists as YAML writes them; flags win."""
    settings = {"text": str(text), "contexts": [200], "windows": 2, "thresholds": [0.1, "inf"], "transport": "gloo"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = tmp_path / "rows.jsonl"
    assert evaluate.main(["--config", str(tmp_path / "config.yaml"), "--windows", "1", "--rows", str(rows)]) == 0
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    found = [(row["case"]["context"], row["case"]["samples"], row["case"]["threshold"]) for row in written]
    assert found == [(200, 1, "0.1"), (200, 1, "inf")]
    assert all(row["command"].startswith("launch/evaluate.py --config ") for row in written)


def test_choices_equal_those_of_the_runtime() -> None:
    config = EvaluateConfig.model_validate(
        {"codecs": list(CODECS), "softmaxes": list(SOFTMAXES), "selectors": list(SELECTORS)}
    )
    assert (config.codecs, config.softmaxes, config.selectors) == (CODECS, SOFTMAXES, SELECTORS)
    assert get_args(EvaluatedCodec) == CODECS
    assert get_args(Selector) == SELECTORS
    assert {get_args(Sketch)[0], get_args(ValueQuantiser)[0]} == {CacheSetting().qjl, CacheSetting().value_quantiser}
    assert EvaluateConfig().block_sizes == (CacheSetting().block_size,)
    assert EvaluateConfig().selectors == (CacheSetting().selector,)
