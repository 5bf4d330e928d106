"""How plot_trace.py draws the bars of a trace, and traces that end early."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from linked_trace import LINK_US, LinkedJob

from alspec.errors import UserError
from alspec.launch import plot_trace
from alspec.launch.plots import plot_link
from alspec.runtime.profiling.kernel_trace import label
from alspec.runtime.profiling.timeline import trace_json


def bar(op: str, rank: int, begin: float, end: float, step: int = 1, kernel: str = "") -> dict[str, Any]:
    return {"op": op, "rank": rank, "step": step, "layer": 0, "kernel": kernel, "begin": begin, "end": end}


def test_overlap_is_that_of_the_first_post_attention() -> None:
    """Work on `A~` began before the full attention ended; the recompute of its sender did not."""
    bars = [bar("full_attention", 0, 0, 10), bar("post_attention", 1, 4, 8), bar("post_attention", 0, 12, 15)]
    assert plot_trace.overlap(bars).endswith("in 1 of 1 layers")
    # Clocks of other hosts may begin later.
    bars = [bar("full_attention", 0, -30, -20), bar("post_attention", 1, -10, -5)]
    assert plot_trace.overlap(bars).endswith("in 0 of 1 layers")


def test_clock_skew_is_that_of_the_worst_step() -> None:
    ends = {1: (10.0, 11.0), 2: (20.0, 24.0), 3: (30.0, 32.0)}
    bars = [
        bar("lm_head", rank, 0, at, step, "_finish_step_kernel") for step in ends for rank, at in enumerate(ends[step])
    ]
    assert plot_trace.clock_skew_us(bars) == 4.0
    assert plot_trace.clock_skew_us([bar("lm_head", 0, 0, 1)]) is None


def test_kernels_that_overlap_are_one_bar_up_to_the_last_end() -> None:
    (part,) = plot_trace._parts([bar("attention", 0, 0, 10), bar("attention", 0, 1, 5)], {})
    assert (part["begin"], part["end"]) == (0, 10)


def test_the_predictor_lies_within_the_attention_of_each_sender() -> None:
    """In a group of two, one rank attends after `A~` has arrived, the other one before."""
    bars = [
        bar("full_attention", 0, 5, 10),
        bar("full_attention", 1, 0, 2),
        bar("post_attention", 2, 3, 8),
        bar("post_attention", 3, 3, 8),
    ]
    parts = plot_trace._parts(bars, plot_trace.spec_outputs(bars))
    spans = [(part["rank"], part["op"], part["begin"], part["end"]) for part in parts if part["rank"] < 2]
    assert spans == [
        (0, "predictor", 5, 5),
        (0, "full_attention", 5, 10),
        (1, "predictor", 0, 2),
        (1, "full_attention", 2, 2),
    ]


@pytest.mark.parametrize(
    ("senders", "receivers", "sender", "receiver"), [({0, 1}, {2, 3}, 1, 2), ({2, 3}, {0, 1}, 2, 1)]
)
def test_the_arrow_of_a_spec_output_joins_neighbouring_lanes(
    senders: set[int], receivers: set[int], sender: int, receiver: int
) -> None:
    axes = mock.Mock()
    spec = {"senders": senders, "receivers": receivers, "arrival": 3.0, "end": 4.0, "accepted": True}
    plot_trace._draw_spec_output(axes, spec, 0.0, 100.0)
    (_, head, tail), _ = axes.annotate.call_args
    assert [round(y) for _, y in (tail, head)] == [sender, receiver]
    assert abs(head[1] - tail[1]) == pytest.approx(1 - 2 * plot_trace.HALF)


def test_each_meaning_has_its_own_style() -> None:
    """Operations differ in colour; verdicts and arrows are far from all of them."""
    styles = [(color, plot_trace.HATCHES.get(name)) for name, color in plot_trace.COLORS.items()]
    styles += [(color, None) for color in plot_link.LINK_STYLES.values()]
    colors = [tuple(int(color[at : at + 2], 16) for at in (1, 3, 5)) for color, _ in styles]
    assert len(set(colors)) == len(styles)
    linked = colors[len(plot_trace.COLORS) :]
    for index, color in enumerate(colors):
        for other in linked:
            if other is not color:
                assert sum(abs(a - b) for a, b in zip(color, other, strict=True)) > 60, (index, color, other)


def test_the_speculators_arrows_are_no_verdict(tmp_path: Path) -> None:
    path, _ = linked_trace(tmp_path)
    bars, _, _ = plot_trace._read(path)
    axes = mock.Mock()
    plot_link.draw_link(axes, bars, 0.0, plot_trace.HALF)
    found = {call.kwargs["arrowprops"]["color"] for call in axes.annotate.call_args_list}
    names = {name for name, color in plot_link.LINK_STYLES.items() if color in found}
    assert names == {"accepted, x taken", "x taken by the speculator"}


@pytest.mark.parametrize(("layers", "code"), [("0:13", 0), ("10:99", 2), ("13:14", 2), ("30:99", 2)])
def test_layers_that_the_trace_does_not_have(
    layers: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 layers and the LM head behind them."""
    pytest.importorskip("matplotlib")
    path, _ = linked_trace(tmp_path)
    assert plot_trace.main([str(path), str(tmp_path / "picture.png"), "--step", "1", "--layers", layers]) == code
    if code:
        err = capsys.readouterr().err
        assert err.startswith("alspec: exit 2: flags: --layers: expected layers within 0:13, as ")
        assert err.endswith(f"trace.json has, found '{layers}'\n")
        assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize("fault", ["cut off", "damaged"])
def test_a_broken_compressed_trace_is_one_error_line(fault: str, tmp_path: Path) -> None:
    data = gzip.compress(json.dumps({"traceEvents": [{"ph": "M"}] * 50}).encode())
    path = tmp_path / "trace.json.gz"
    path.write_bytes(data[:-12] if fault == "cut off" else data[:10] + b"\xff" * 8 + data[18:])
    with pytest.raises(UserError, match=r"trace\.json\.gz is not JSON: .*; give a file written by --trace"):
        plot_trace._read(path)


def linked_trace(folder: Path, tp_size: int = 1) -> tuple[Path, LinkedJob]:
    """A trace of a pair over a link: a step with misses, then one without."""
    verdicts = [[1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1], [1] * 12]
    job = LinkedJob(tp_size)
    for hits in verdicts:
        job.step(hits)
    path = folder / "trace.json"
    path.write_text(trace_json(label(job.rows, verdicts)))
    return path, job


@pytest.mark.parametrize("tp_size", [1, 2])
def test_arrows_of_a_link_are_the_messages_that_were_taken(tp_size: int, tmp_path: Path) -> None:
    path, job = linked_trace(tmp_path, tp_size)
    bars, _, _ = plot_trace._read(path)
    assert plot_trace.is_linked(bars)
    found = {"verifier": set(), "speculator": set()}
    for message in plot_link.messages_taken(bars):
        found[message["to"]].add((message["step"], message["layer"]))
        assert message["taken"] - message["sent"] >= LINK_US
        assert {message["source"], message["rank"]} == {tp_size - 1, tp_size}
        assert (message["rank"] < tp_size) == (message["to"] == "verifier")
    for index, side in enumerate(("verifier", "speculator")):
        expected = {
            (step, layer)
            for step, sides in enumerate(job.steps, start=1)
            for layer, taken in enumerate(sides[index].taken)
            if taken
        }
        assert found[side] == expected
        assert expected


def test_verdicts_of_a_link_are_drawn_over_their_layers(tmp_path: Path) -> None:
    path, job = linked_trace(tmp_path)
    bars = [bar for bar in plot_trace._read(path)[0] if bar["step"] == 1]
    spans = plot_link.verdict_spans(bars)
    verdicts = [name for name, *_ in spans]
    assert [name == "rejected" for name in verdicts] == [layer in (2, 7) for layer in range(12)]
    assert [name == "accepted, x taken" for name in verdicts] == job.steps[0][0].taken
    assert all(first[3] <= second[2] for first, second in pairwise(spans))
    parts = plot_trace._parts(bars, {})
    plot_link.relabel(parts)
    lost = [part["layer"] for part in parts if part["op"] == "rejected"]
    assert lost == [layer for layer, is_lost in enumerate(job.steps[0][1].lost) if is_lost]
    labels = {part["layer"]: part["label"] for part in parts if part["rank"] == 0 and part["op"] == "post_attention"}
    late = [layer for layer, name in enumerate(verdicts) if name == "accepted, no right x in time"]
    assert labels == {2: "on A", 7: "on A"} | dict.fromkeys(late, "on A~")


def test_a_trace_over_a_link_becomes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, job = linked_trace(tmp_path)
    picture = tmp_path / "picture.png"
    assert plot_trace.main([str(path), str(picture), "--step", "1", "--layers", "0:12"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    taken = sum(sum(verifier.taken) for verifier, _ in job.steps)
    lost = sum(sum(speculator.lost) for _, speculator in job.steps)
    restarts = sum(sum(speculator.taken) for _, speculator in job.steps)
    out = capsys.readouterr().out
    assert f"{taken} of 24 x were taken by the verifier, {22 - taken} were late or wrong, 2 A~ were rejected" in out
    assert f"the speculator took {restarts} x and lost {lost} layers" in out
