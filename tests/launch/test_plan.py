"""`--plan` predicts the measured rows in docs/results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from paths import ROOT

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.latency_model import StepCosts, linked_step_us, linked_tp_step_us, speculative_step_us, tp_step_us
from alspec.launch import generate
from alspec.launch.terminal.plan import PREDICTED_HIT_RATE
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import cache_bytes
from alspec.runtime.engine.memory import GIB, plan_memory
from alspec.runtime.engine.weight_settings import config_with_weights
from alspec.runtime.profiling.forced_verdicts import drawn_verdicts, forced_verdicts, read_layer_rates
from alspec.runtime.profiling.predicted_costs import BESIDE_KERNELS, LINK_US, link_costs, message_us, step_costs
from alspec.runtime.profiling.predicted_costs import step_us as predicted_step_us

PART_NAMES = ("fixed", "layer", "attention", "sender", "receiver")
STEP_TOLERANCE = 0.10  # for a whole step
PART_TOLERANCE = 0.03  # for a part, against the row that its constant comes from
ROWS = [json.loads(line) for line in (ROOT / "docs" / "results" / "decode_step.jsonl").read_text().splitlines()]
# The plan is for captured steps of one request over peer memory.
STEPS = [
    row
    for row in ROWS
    if row["bench"] == "decode_step"
    and row["case"]["cuda_graph"]
    and row["case"]["batch"] == 1
    and row["case"]["transport"] in (None, "symm")
    and row["case"]["shape"] not in ("half", "slice4", "smollm2")  # folders and files: rows have their names only
]
WEIGHTS = [json.loads(line) for line in (ROOT / "docs" / "results" / "weights.jsonl").read_text().splitlines()]
RECALL = [json.loads(line) for line in (ROOT / "docs" / "results" / "recall_attention.jsonl").read_text().splitlines()]
LINKED = [json.loads(line) for line in (ROOT / "docs" / "results" / "linked_pair.jsonl").read_text().splitlines()]
# The commits of the runs that constants come from, and a layer of another shape.
PARTS = [
    row
    for row in ROWS
    if row["bench"] == "decode_parts"
    and row["case"]["context"] == 131072
    and row["case"]["kv_cache"] == ("turbo4" if row["case"]["part"] == "receiver" else "bf16")
    and row["case"]["part"] in (("layer",) if row["case"]["shape"] == "llama-3.1-70b" else PART_NAMES)
]


def predicted(case: dict[str, Any]) -> StepCosts:
    shape = case["shape"]
    config = LlamaConfig.from_folder(DEMO_CHECKPOINT) if shape == "checkpoint" else LlamaConfig.from_shape(shape)
    num_groups = 2 if case["mode"] == "paired" else 1
    assert case["dtype"] == "bf16"
    return step_costs(config, case["world"], num_groups, torch.bfloat16, case["context"], case["kv_cache"])


def name_of(row: dict[str, Any]) -> str:
    names = ("shape", "world", "mode", "kv_cache", "context", "hit_rate")
    return "-".join(str(row["case"][name]) for name in names if row["case"][name] is not None)


def test_rows_cover_what_is_planned() -> None:
    found = {(row["case"]["world"], row["case"]["mode"]) for row in STEPS}
    assert found == {(1, "off"), (2, "off"), (4, "off"), (2, "paired"), (4, "paired")}
    assert {row["case"]["kv_cache"] for row in STEPS} == {"bf16", "turbo4", "turbo-mixed", "turboquant4", "turboquant3"}


@pytest.mark.parametrize("row", STEPS, ids=name_of)
def test_predicted_step_is_near_the_measured_one(row: dict[str, Any]) -> None:
    costs, hit_rate = predicted(row["case"]), row["case"]["hit_rate"]
    step_us = tp_step_us(costs) if row["case"]["mode"] == "off" else speculative_step_us(costs, hit_rate)
    assert step_us == pytest.approx(row["us"]["p50"], rel=STEP_TOLERANCE)


@pytest.mark.parametrize("row", [row for row in LINKED if "--pair-always" in row["command"]], ids=name_of)
def test_predicted_step_over_a_link_is_near_the_measured_one(row: dict[str, Any]) -> None:
    config = LlamaConfig.from_shape(row["case"]["shape"])
    costs = link_costs(
        config, row["case"]["world"] // 2, torch.bfloat16, row["case"]["context"], recalled=row["case"]["recall_blocks"]
    )
    steps = [forced_verdicts(config.num_layers, row["case"]["hit_rate"])]
    if "layer_rates" in row["case"]:
        rates = read_layer_rates(ROOT / "docs" / "results" / row["case"]["layer_rates"])
        steps = drawn_verdicts(config.num_layers, rates, num_steps=256).tolist()
    step_us = median(linked_step_us(costs, [bool(hit) for hit in accepted]) for accepted in steps)
    assert step_us == pytest.approx(row["us"]["p50"], rel=STEP_TOLERANCE)


@pytest.mark.parametrize("row", [row for row in LINKED if row["case"]["mode"] == "off"], ids=name_of)
def test_predicted_tensor_parallelism_over_a_link_is_near_the_measured_one(row: dict[str, Any]) -> None:
    costs = predicted(row["case"])
    step_us = linked_tp_step_us(costs, BESIDE_KERNELS * LINK_US) if row["case"]["world"] > 1 else tp_step_us(costs)
    assert step_us == pytest.approx(row["us"]["p50"], rel=STEP_TOLERANCE)


@pytest.mark.parametrize(
    "row", [row for row in WEIGHTS if row["bench"] == "decode_step"],
    ids=lambda row: "-".join(str(row["case"].get(name)) for name in ("shape", "world", "batch", "weights", "lm_head")),
)  # fmt: skip
def test_predicted_step_of_quantised_weights_is_near_the_measured_one(row: dict[str, Any]) -> None:
    case = row["case"]
    config = EngineConfig(
        random_weights=case["shape"], weights=case["weights"], lm_head=case.get("lm_head", "auto")
    )  # fmt: skip
    model = config_with_weights(config, LlamaConfig.from_shape(case["shape"]), case["world"], packs=True)
    lengths = [case["context"]] * case["batch"]
    found = predicted_step_us(model, case["world"], torch.bfloat16, lengths, case["kv_cache"], 0)
    assert found == pytest.approx(row["us"]["p50"], rel=STEP_TOLERANCE)


@pytest.mark.parametrize("row", PARTS, ids=lambda row: f"{row['case']['shape']}-{row['case']['part']}")
def test_predicted_part_is_near_the_measured_one(row: dict[str, Any]) -> None:
    part_us = getattr(predicted(row["case"]), f"{row['case']['part']}_us")
    assert part_us == pytest.approx(row["us"]["p50"], rel=PART_TOLERANCE)


def test_spec_output_comes_no_later_than_attention_ends() -> None:
    config = LlamaConfig.from_shape("llama-3.1-8b")
    short, long = (step_costs(config, 2, 2, torch.bfloat16, context) for context in (1024, 131072))
    assert short.receiver_us == short.attention_us < long.receiver_us < long.attention_us


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ((9, 3, 1536), ["1 off 1", "2 paired 1", "3 off 3", "6 paired 3"]),
        (
            (32, 32, 11008),
            ["1 off 1", *(f"{n} {mode}" for n in (2, 4, 8, 16) for mode in (f"off {n}", f"paired {n // 2}"))],
        ),
    ],
    ids=["3 KV heads", "32 KV heads"],
)
def test_a_plan_lists_the_ranks_that_can_run(
    heads: tuple[int, int, int], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One group of as many ranks as can share the heads, or two groups; up to 16 ranks."""
    raw = json.loads((DEMO_CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    (tmp_path / "config.json").write_text(json.dumps(raw | dict(zip(names, heads, strict=True))), encoding="utf-8")
    assert generate.main(["--random-weights", str(tmp_path), "--plan"]) == 0
    rows = [line.strip("│| ").replace("│", " ").split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(row) for row in rows if row and row[0].isdigit() and row[1] in ("off", "paired")] == expected


def test_a_plan_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """70B in bf16 takes 131 GiB: with a long cache one group needs two ranks, a pair needs four."""
    for context, expected in (("8k", {("1", "off"): False}), ("128k", {("1", "off"): True, ("2", "off"): False})):
        assert generate.main(["--random-weights", "llama-3.1-70b", "--max-context", context, "--plan"]) == 0
        rows = [line.strip("│| ").replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
        found = {tuple(row[:2]): "fit" in row for row in rows if row and row[0].isdigit()}
        assert expected.items() <= found.items()
        assert found["2", "paired"] == found["1", "off"]
        assert not found["4", "paired"]


@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_a_plan_of_a_model_with_a_sliding_window(
    codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain steps over bf16 take rings; a pair, drafts and quantised caches keep the whole context."""
    raw = json.loads((DEMO_CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    raw |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 131072}), encoding="utf-8")
    config, flags = LlamaConfig.from_folder(tmp_path), ["--random-weights", str(tmp_path), "--kv-cache", codec]
    whole, ring = (
        f"{cache_bytes(codec, config, 1, 1, 131072, torch.bfloat16, keeps_context=keeps) / GIB:.2f}"
        for keeps in (True, False)
    )
    assert (whole == ring) == (codec != "bf16")
    for drafts, expected in (([], {"off": ring, "paired": whole}), (["--draft", "self"], {"off": whole})):
        assert generate.main([*flags, *drafts, "--max-context", "128k", "--plan"]) == 0
        rows = [line.strip("│| ").replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
        found = {row[1]: row[4] for row in rows if row and row[0].isdigit() and row[2] == "1"}
        assert found == expected


def test_a_plan_has_the_bytes_and_milliseconds_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """In the requested dtype. Ranks of a pair hold whole layers, and half of the LM head's rows."""
    flags = ["--random-weights", "llama-3.1-8b", "--dtype", "fp32", "--max-context", "4k", "--plan"]
    assert generate.main(flags) == 0
    out = capsys.readouterr().out
    assert "4096 tokens, fp32" in out
    assert "if every layer accepts A~ and the errors are independent" in " ".join(out.split())
    assert "norms of an attention output at most, with probability 0.99" in " ".join(out.split())
    config, found = LlamaConfig.from_shape("llama-3.1-8b"), {}
    for line in out.splitlines():
        cells = line.strip("│| ").replace("│", " ").split()
        if cells and cells[0].isdigit() and cells[1] in ("off", "paired"):
            found[cells[0], cells[1]] = cells[3:7]
    for world, mode, num_groups in ((1, "off", 1), (2, "off", 1), (2, "paired", 2)):
        shard = Shard(0, world // num_groups, 0, world)
        plan = plan_memory(config, shard, torch.float32, 1, 4096, device_type="cuda")
        costs = step_costs(config, world, num_groups, torch.float32, 4096, recalled=16)
        us = tp_step_us(costs) if mode == "off" else speculative_step_us(costs, PREDICTED_HIT_RATE)
        sizes = (plan.weights_bytes, plan.cache_bytes, plan.buffer_bytes)
        assert found[str(world), mode] == [*(f"{size / GIB:.2f}" for size in sizes), f"{us / 1e3:.2f}"]


def test_a_plan_compares_two_hosts_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A pair two hosts pauses where it does not pay: with few hits, or in a short context."""
    gains = {}
    for context in ("8k", "128k"):
        assert generate.main(["--random-weights", "llama-3.1-8b", "--max-context", context, "--plan"]) == 0
        cells = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
        gains[context] = {row[2]: float(row[-2].removesuffix("x of 1")) for row in cells if "x of 1" in row[-2:][0]}
    names = ["two hosts, off", *(f"two hosts, paired, {rate} hits" for rate in ("80%", "95%", "100%"))]
    assert list(gains["8k"]) == list(gains["128k"]) == names
    assert gains["8k"]["two hosts, off"] < 0.55 < 0.7 < gains["128k"]["two hosts, off"] < 0.85
    assert [gains["8k"][name] for name in names[1:]] == [1.0, 1.0, 1.0]
    assert gains["128k"][names[1]] == 1.0 < gains["128k"][names[2]] < gains["128k"][names[3]]


def test_a_plan_takes_the_time_of_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A pair over a fast link pays with fewer hits; over one whose 33 messages take longer than a step, never."""
    gains = []
    for link_us in ("15", "400"):
        flags = ["--random-weights", "llama-3.1-8b", "--max-context", "128k", "--plan", "--link-us", link_us]
        assert generate.main(flags) == 0
        shown = capsys.readouterr().out
        assert f"{link_us} us a message" in " ".join(shown.split())
        gains.append([float(cell.split("x")[0]) for cell in shown.split("│") if "x of 1" in cell])
    assert all(near > far for near, far in zip(gains[0], gains[1], strict=True))
    assert gains[0][1] > 1.1
    assert gains[1][1:] == [1.0, 1.0, 1.0]


def plan_cells(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, dict[str, str]]:
    """Title and caption in one line, and ms/token of two ranks by mode, at 128K tokens of the 8B shape."""
    shape = () if "--random-weights" in flags else ("--random-weights", "llama-3.1-8b")
    assert generate.main([*shape, "--max-context", "128k", "--plan", *flags]) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    return " ".join(out.split()), {row[2]: row[-3] for row in rows if row[1:2] == ["2"]}


def test_a_message_takes_longer_the_larger_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """That of the 8B shape has 48 KB, that of the 70B shape 80 KB: 32 KB more at 1 GB/s take 33 us."""
    plain = plan_cells(capsys)
    assert "77 us a message, 90.1 us an all-reduce" in plain[0]
    assert plan_cells(capsys, "--link-gbs", "0.1") == plain
    large = "--random-weights", "llama-3.1-70b", "--weights", "int4"
    assert "109.8 us a message, 90.1 us an all-reduce" in plan_cells(capsys, *large, "--link-gbs", "1")[0]
    assert "88.3 us a message, 90.1 us an all-reduce" in plan_cells(capsys, *large)[0]  # at 2.9 GB/s
    config = LlamaConfig.from_shape("llama-3.2-1b")
    assert message_us(config, 1, 1.0, 0.5) == 0.0  # smaller, by more than the time of 48 KB


def test_an_all_reduce_over_hosts_has_a_time_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    (_, plain), (title, fast), (_, both) = (
        plan_cells(capsys, *flags) for flags in ((), ("--all-reduce-us", "15"), ("--link-us", "15"))
    )
    assert "77 us a message, 15 us an all-reduce" in title
    assert float(plain["two hosts, off"]) - float(fast["two hosts, off"]) == pytest.approx(64 * 0.0751, abs=0.02)
    assert fast | {"two hosts, off": plain["two hosts, off"]} == plain
    assert float(both["two hosts, off"]) - float(fast["two hosts, off"]) == pytest.approx(64 * 0.17 * 0.015, abs=0.02)


def test_a_plan_with_drafts_speaks_of_no_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--random-weights", "llama-3.1-8b", "--max-context", "8k", "--plan", "--draft", "ngram"]) == 0
    shown = capsys.readouterr().out
    assert "latency of plain steps" in shown
    assert "pair" not in shown
    assert "two hosts" not in shown


def test_a_pair_that_never_pauses_may_be_slower(capsys: pytest.CaptureFixture[str]) -> None:
    """At 8K tokens, where rows of a pair that always speculates are 0.83 to 0.92 times as fast as one GPU."""
    flags = ("--max-context", "8k", "--hit-rate", "0.5")
    (paused, with_pauses), (always, without) = plan_cells(capsys, *flags), plan_cells(capsys, *flags, "--pair-always")
    assert "a pair that does not pay pauses" in paused
    assert "a pair never pauses" in always
    mode = "two hosts, paired, 50% hits"
    assert with_pauses["two hosts, off"] == without["two hosts, off"]
    assert 0.82 < float(with_pauses[mode]) / float(without[mode]) < 0.93


def test_a_plan_takes_a_hit_rate_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A rate of all layers, or SmolLM2's of each layer, with which rows are 1.03 and 1.22 times one GPU at 128K."""
    _, plain = plan_cells(capsys)
    title, found = plan_cells(capsys, "--hit-rate", "0.95")
    assert "paired at a hit rate of 0.95" in title
    assert list(found) == ["off", "paired", "two hosts, off", "two hosts, paired, 95% hits"]
    assert found["two hosts, paired, 95% hits"] == plain["two hosts, paired, 95% hits"]
    assert float(found["paired"]) < float(plain["paired"])
    one = next(row for row in LINKED if row["case"]["world"] == 1 and row["case"]["context"] == 131072)
    for blocks, mean, gain in (("16", "80.4", 1.03), ("32", "96.5", 1.22)):
        file = str(ROOT / "docs" / "results" / f"hits_recall{blocks}.jsonl")
        title, found = plan_cells(capsys, "--hit-rate", file, "--recall-blocks", blocks)
        assert f"paired at a hit rate of 0.{mean[0]}" in title
        pair = found[f"two hosts, paired, {mean}% hits by layer"]
        assert one["us"]["p50"] / 1e3 / float(pair) == pytest.approx(gain, rel=0.03)


def test_recalled_blocks_count_in_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A~ comes later and attention takes longer; tensor parallelism has no A~."""
    few, many, none = (
        plan_cells(capsys, *flags)[1]
        for flags in (("--recall-blocks", "16"), ("--recall-blocks", "64"), ("--predictor", "window"))
    )
    for name in ("paired", "two hosts, paired, 95% hits", "two hosts, paired, 100% hits"):
        assert float(none[name]) < float(few[name]) < float(many[name])
    assert few["off"] == many["off"] == none["off"]


@pytest.mark.parametrize(
    "row",
    [row for row in RECALL if row["bench"] in ("speculative_decode", "spec_ready") and row["case"]["context"] > 2**16],
    ids=lambda row: f"{row['bench']}-{row['case'].get('codec')}-{row['case']['recall_blocks']}",
)
def test_predicted_attention_with_recalled_blocks_is_near_the_measured_one(row: dict[str, Any]) -> None:
    """The kernel alone, relative to the row without recalled blocks."""
    config, case = LlamaConfig.from_shape("llama-3.1-8b"), row["case"]
    codec, field = case.get("codec") or "bf16", "receiver_us" if row["bench"] == "spec_ready" else "sender_us"
    none, found = (
        getattr(step_costs(config, 2, 2, torch.bfloat16, case["context"], codec, recalled=blocks), field)
        for blocks in (0, case["recall_blocks"])
    )
    base = next(
        each["us"]["p50"]
        for each in RECALL
        if each["bench"] == row["bench"] and each["case"] == case | {"recall_blocks": 0}
    )
    assert base + found - none == pytest.approx(row["us"]["p50"], rel=STEP_TOLERANCE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--link-us 9", "--link-us: expected beside --plan, found 9 without it"),
        (
            "--plan --hit-rate=",
            "--hit-rate: expected a number from 0 to 1, or a file of evaluate's rows, found no",
        ),
        ("--plan --link-us -1", "--link-us: expected a number of microseconds"),
        ("--plan --link-us nan", "--link-us: expected a number of microseconds"),
        ("--plan --link-us fast", "--link-us: invalid float value: 'fast'"),
        ("--link-gbs 9", "--link-gbs: expected beside --plan, found 9 without it"),
        ("--plan --link-gbs 0", "--link-gbs: expected a number of GB/s"),
        ("--all-reduce-us 9", "--all-reduce-us: expected beside --plan, found 9 without it"),
        ("--plan --all-reduce-us inf", "--all-reduce-us: expected a number of microseconds"),
        ("--hit-rate 0.5", "--hit-rate: expected beside --plan, found '0.5'"),
        ("--plan --hit-rate 1.5", "--hit-rate: expected a number from 0 to 1, or a file of evaluate's rows, found 1.5"),
        ("--plan --hit-rate nan", "--hit-rate: expected a number from 0 to 1"),
        (
            "--plan --hit-rate none.jsonl",
            "--hit-rate: none.jsonl: No such file or directory; give a number from 0 to 1",
        ),
        ("--plan --hit-rate README.md", "--hit-rate: README.md: "),
    ],
)
def test_wrong_settings_of_a_plan_are_named(wrong: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--random-weights", "llama-3.1-8b", *wrong.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("flags", [["--weights", "int4"], ["--draft", "self", "--draft-weights", "int4"]])
def test_a_plan_leaves_out_ranks_whose_inputs_do_not_divide_into_groups(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight ranks of the bundled model have 112 inputs each of one matrix; a drafting copy of it, too."""
    assert generate.main([*flags, "--plan"]) == 0
    rows = [line.strip("│| ").replace("│", " ").split()[:3] for line in capsys.readouterr().out.splitlines()]
    found = {row[2] for row in rows if len(row) == 3 and row[0].isdigit()}
    assert {"1", "2", "4"} <= found
    assert "8" not in found
    config = EngineConfig(weights="int4")
    with pytest.raises(
        UserError, match=r"each of 8 ranks has 112 of down; valid sizes of one group: 1, 2, 4; or use fp8"
    ):
        config_with_weights(config, LlamaConfig.from_folder(DEMO_CHECKPOINT), 8, packs=True)


def test_a_plan_names_a_drafting_copy_and_refuses_one_of_as_many_bits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--random-weights", "llama-3.1-8b", "--max-context", "4k", "--draft", "self", "--plan"]
    assert generate.main([*flags, "--draft-weights", "int4"]) == 0
    assert "memory with --draft self and its int4 copy, latency of plain steps" in capsys.readouterr().out
    assert generate.main([*flags, "--weights", "int4", "--draft-weights", "int4"]) == 2
    assert "draft_weights: int4 copies weights of more than 4 bits, found int4" in capsys.readouterr().err


def test_a_plan_compares_only_with_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """The 70B shape does not fit one GPU, with which two hosts would be compared."""
    assert generate.main(["--random-weights", "llama-3.1-70b", "--max-context", "32k", "--plan"]) == 0
    rows = [line.strip("│| ").replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    hosts = [row for row in rows if row[1:4] == ["two", "hosts,", "off"]]
    assert hosts
    assert all(row[-1] == "-" for row in hosts)
    assert any(row[-1].endswith("x") for row in rows if "paired" in row)


def test_a_plan_lists_caches_that_ranks_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """turbo-mixed needs two KV heads on each rank, so up to four ranks share eight. 16 ranks have each of them twice.

    Long heads have no codec.
    """
    flags = ["--random-weights", "llama-3.1-8b", "--max-context", "4k", "--plan", "--kv-cache"]
    for codec, expected in (("turbo4", {"1", "2", "4", "8", "16"}), ("turbo-mixed", {"1", "2", "4"})):
        assert generate.main([*flags, codec]) == 0
        rows = [line.strip("│| ").replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
        assert {row[2] for row in rows if row and row[0].isdigit() and row[1] in ("off", "paired")} == expected
    raw = json.loads((DEMO_CHECKPOINT / "config.json").read_text(encoding="utf-8")) | {"head_dim": 160}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert generate.main(["--random-weights", str(tmp_path), "--plan", "--kv-cache", "turbo4"]) == 2
    out, err = capsys.readouterr()
    assert (out, "turbo4 needs a head_dim of up to 128, the model has 160" in err) == ("", True)


def test_a_plan_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--random-weights", "llama-3.2-1b", "--plan", "--max-context", "4k"]
    assert generate.main(flags) == 0
    plan = capsys.readouterr()
    assert "without effect" not in plan.err
    assert generate.main([*flags, "--prompt-ids", "1,2", "--max-new-tokens", "9", "--speculation", "off"]) == 0
    found = capsys.readouterr()
    assert found.out == plan.out
    assert found.err.startswith("alspec: without effect: --max-new-tokens, --prompt-ids, --speculation; --plan shows")
    assert generate.main([*flags, "--answers", "8", "--chat", "--stop", "x"]) == 0
    assert capsys.readouterr().err.startswith("alspec: without effect: --answers, --chat, --stop; --plan shows")
