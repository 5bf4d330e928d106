"""Output for people: streamed text on stdout; a status line and the closing panel on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Self

from rich.color import Color
from rich.console import Console
from rich.panel import Panel
from rich.style import Style
from rich.table import Table

from alspec.runtime.engine.generation import Token
from alspec.runtime.engine.memory import GIB

__all__ = [
    "Printer",
    "StatusLine",
    "color_without_effect",
    "print_panel",
    "print_turn",
    "shows_color",
    "use_utf8",
    "why_no_hit_rate",
]


class StatusLine:
    """One line on stderr that says what the command is doing, if stderr is a terminal; clear it before other output.

    Not a spinner: spinners hide the cursor, and it would stay hidden if the heartbeat ended the process.
    """

    def __init__(self, is_first: bool) -> None:
        self._enabled = is_first and sys.stderr.isatty()
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Replace the line with `text`."""
        if self._enabled:
            print(f"\r\x1b[Kalspec: {text}", end="", file=sys.stderr, flush=True)
            self._is_shown = True

    def show_prompt_progress(self, total: int) -> Callable[[int], None]:
        """Return a function that shows how many of `total` prompt tokens are done."""
        return lambda done: self.show(f"prompt: {done} of {total} tokens")

    def clear(self) -> None:
        """Erase the line."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False


class Printer:
    """Streams the text of one request. A batch becomes one JSON line for each answer, in order, as they finish.

    Args:
        extras: of each prompt: what its lines hold beside the answer.
        num_answers: to each prompt.
    """

    def __init__(self, extras: list[dict[str, Any]], is_batch: bool, color: bool, num_answers: int = 1) -> None:
        self._extras, self._num_answers = extras, num_answers
        self._texts = [""] * (len(extras) * num_answers)
        self._finish_reasons: list[str | None] = [None] * len(self._texts)
        self._is_batch = is_batch
        self._color = color
        self._next = 0  # request whose line is printed next
        self._is_in_line = False

    def show(self, token: Token) -> None:
        """Print what this token adds."""
        if not self._is_batch and token.text:
            self._is_in_line = not token.text.endswith("\n")
        if self._is_batch:
            self._texts[token.request] += token.text
            self._finish_reasons[token.request] = token.finish_reason
            self._print_finished()
        elif self._color and (token.hit_rate is not None or token.is_draft):
            # Not through a rich console, which would wrap lines and change tabs and control characters.
            sys.stdout.write(_shade(1.0 if token.hit_rate is None else token.hit_rate).render(token.text))
        else:
            sys.stdout.write(token.text)
        sys.stdout.flush()

    def close(self) -> None:
        """End the text."""
        if not self._is_batch:
            sys.stdout.write("\n")
        self._is_in_line = False
        sys.stdout.flush()

    def end_line(self) -> None:
        """End an unfinished line before an error message; does nothing a second time, or after `close`."""
        if self._is_in_line:
            self._is_in_line = False
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _print_finished(self) -> None:
        while self._next < len(self._texts) and self._finish_reasons[self._next] is not None:
            prompt, answer = divmod(self._next, self._num_answers)
            line: dict[str, Any] = {"request": prompt}
            if self._num_answers > 1:
                line["answer"] = answer
            line |= {"text": self._texts[self._next], "finish_reason": self._finish_reasons[self._next]}
            line |= self._extras[prompt]
            print(json.dumps(line, ensure_ascii=False))
            self._next += 1


def use_utf8() -> None:
    """Write UTF-8 whatever the locale is."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # a replaced stdout may have none
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="replace")


def shows_color() -> bool:
    """Standard output is a terminal, or `FORCE_COLOR` is set."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def _shade(hit_rate: float) -> Style:
    """Return a colour from red (every layer rejected A~) to green (every layer accepted A~, or an accepted draft)."""
    return Style(
        bgcolor=Color.from_rgb(200 * (1 - hit_rate), 60 + 80 * hit_rate, 60), color=Color.from_rgb(255, 255, 255)
    )


def color_without_effect(has_speculation: bool) -> list[str]:
    """Return a notice if `--color` shades nothing. has_speculation: tokens have verdicts, or are drafts."""
    if not has_speculation:
        return ["--color shades nothing: nothing is speculated"]
    if not shows_color():
        return ["--color shades nothing: standard output is no terminal; FORCE_COLOR=1 shades all the same"]
    return []


def why_no_hit_rate(first_lossy: int) -> str:
    """Why short contexts have no hit rate. first_lossy: tokens from which on it is counted."""
    return f"counted from {first_lossy} tokens on; A~ leaves out hardly anything before"


def print_panel(summary: dict[str, Any]) -> None:
    """The closing panel, on stderr; plain when stderr is no terminal."""
    console = Console(stderr=True)
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(summary):
        table.add_row(name, value)
    if console.is_terminal:
        console.print(Panel(table, title="alspec", expand=False))
    else:
        for name, value in _rows(summary):
            print(f"{name}: {value}", file=sys.stderr)


def print_turn(summary: dict[str, Any], note: str | None) -> None:
    """One line about an answer of a conversation, on stderr; dim on a terminal."""
    (prompt,), (reused,), (new,) = summary["prompt_tokens"], summary["reused_tokens"], summary["new_tokens"]
    parts = [f"prompt {prompt} tokens, {reused} kept from before", f"first token {summary['ttft_ms']:.0f} ms"]
    parts.append(f"{new} tokens" if summary["tokens_per_s"] is None else f"{new} at {summary['tokens_per_s']:.1f}/s")
    if summary["hit_rate"] is not None:
        parts.append(f"hit rate {100 * summary['hit_rate']:.1f} %")
    if summary["drafts"] is not None:
        parts.append(f"{summary['drafts']['tokens_per_step']:.2f} tokens a step")
    line = "; ".join([*parts, note] if note else parts)
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[{line}]", style="dim", markup=False)


def _mode(summary: dict[str, Any]) -> list[str]:
    """The parts of the panel's first row."""
    parts = [summary["mode"], f"{summary['world_size']} rank(s) on {summary['device']}", summary["dtype"]]
    if summary["transport"] is not None:
        parts.append(summary["transport"])
    return [*parts, "captured graph"] if summary["cuda_graph"] else parts


def _drafts(summary: dict[str, Any]) -> str:
    """What became of drafts, as in `ngram, up to 2: 2.10 tokens a step; accepted 0/1/2 in 9/5/8 of 22 rounds`."""
    drafts, weights = summary["drafts"], summary["draft_weights"]
    counts = drafts["accepted_histogram"]
    drafter = summary["draft"] if weights is None else f"{summary['draft']}, weights {weights}"
    text = f"{drafter}, up to {summary['draft_tokens']}: {drafts['tokens_per_step']:.2f} tokens a step"
    if not drafts["rounds"]:
        return f"{text}; no drafts: none to make, none that pay (--draft-always drafts all the same), or the text ended"
    numbers, times = "/".join(map(str, range(len(counts)))), "/".join(map(str, counts))
    return f"{text}; accepted {numbers} in {times} of {drafts['rounds']} rounds"


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("mode", ", ".join(_mode(summary))),
        ("prompt tokens", " ".join(map(str, summary["prompt_tokens"]))),
        ("new tokens", " ".join(map(str, summary["new_tokens"]))),
        ("TTFT", f"{summary['ttft_ms']:.1f} ms"),
    ]
    if summary["tokens_per_s"] is not None:
        p50, p90, p99 = (summary[f"ms_per_token_p{p}"] for p in (50, 90, 99))
        rows += [
            ("tokens/s", f"{summary['tokens_per_s']:.1f}"),
            ("ms/token", f"p50 {p50:.2f}  p90 {p90:.2f}  p99 {p99:.2f}"),
        ]
    if summary["gb_per_s"] is not None:
        share = f"{100 * summary['share_of_limit']:.0f} % of the copy limit"
        rows.append(("read", f"{summary['gb_per_s']:.1f} GB/s a rank, {share}"))
    alone = summary["alone_steps"]
    if summary["hit_rate"] is not None:
        rows.append(("hit rate", f"{100 * summary['hit_rate']:.1f} % at lambda {summary['threshold']:g}"))
    elif summary["mode"] in ("paired", "simulated") and summary["tokens_per_s"] is not None and not alone:
        rows.append(("hit rate", f"- ({why_no_hit_rate(summary['first_lossy_length'])})"))
    if alone:
        why = "a pair did not pay (--pair-always speculates all the same)"
        rows.append(("alone", f"{alone} steps in which each group decoded alone: {why}"))
    if summary["weights"] != summary["dtype"]:
        rows.append(("weights", summary["weights"]))
    if summary["drafts"] is not None:
        rows.append(("drafts", _drafts(summary)))
    memory = summary["memory"]
    rows.append(
        (
            "memory",
            f"weights {memory['weights_bytes'] / GIB:.2f} GiB, cache {memory['cache_bytes'] / GIB:.2f} GiB, "
            f"buffers {memory['buffer_bytes'] / GIB:.2f} GiB a rank",
        )
    )
    return rows
