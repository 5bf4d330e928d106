"""The lines that a user sees for a batch and at the end of a run."""

from __future__ import annotations

import pytest

from alspec.launch.terminal.display import Printer, print_panel
from alspec.runtime.engine.generation import Token


def test_requests_that_end_together_are_printed_together(capsys: pytest.CaptureFixture[str]) -> None:
    """In order, once those before them have ended; characters are not escaped to ASCII."""
    printer = Printer([{}] * 3, is_batch=True, color=False)
    for request, text in ((2, "b"), (1, "ä")):
        printer.show(Token(request, 1, text, None, "eos"))
    assert capsys.readouterr().out == ""
    printer.show(Token(0, 1, "a", None, "eos"))
    printer.close()
    lines = [f'{{"request": {index}, "text": "{text}", "finish_reason": "eos"}}\n' for index, text in enumerate("aäb")]
    assert capsys.readouterr().out == "".join(lines)


def test_the_panel_has_the_numbers_of_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    print_panel(
        {
            "mode": "simulated",
            "world_size": 2,
            "device": "one",
            "dtype": "bf16",
            "weights": "int4 (awq, groups of 128), dequantised to bf16",
            "transport": "nccl",
            "cuda_graph": True,
            "prompt_tokens": [7, 30],
            "new_tokens": [3, 4],
            "ttft_ms": 12.34,
            "tokens_per_s": 56.78,
            "ms_per_token_p50": 1.5,
            "ms_per_token_p90": 2.25,
            "ms_per_token_p99": 9.0,
            "gb_per_s": 3210.0,
            "share_of_limit": 0.75,
            "hit_rate": 0.625,
            "threshold": 0.1,
            "alone_steps": 0,
            "draft": "self",
            "draft_tokens": 2,
            "draft_weights": "int4 (groups of 128)",
            "drafts": {"tokens_per_step": 1.234, "rounds": 9, "accepted_histogram": [5, 3, 1]},
            "memory": {"weights_bytes": 2**31, "cache_bytes": 2**30, "buffer_bytes": 2**29},
        }
    )
    assert capsys.readouterr().err.splitlines() == [
        "mode: simulated, 2 rank(s) on one, bf16, nccl, captured graph",
        "prompt tokens: 7 30",
        "new tokens: 3 4",
        "TTFT: 12.3 ms",
        "tokens/s: 56.8",
        "ms/token: p50 1.50  p90 2.25  p99 9.00",
        "read: 3210.0 GB/s a rank, 75 % of the copy limit",
        "hit rate: 62.5 % at lambda 0.1",
        "weights: int4 (awq, groups of 128), dequantised to bf16",
        "drafts: self, weights int4 (groups of 128), up to 2: 1.23 tokens a step; accepted 0/1/2 in 5/3/1 of 9 rounds",
        "memory: weights 2.00 GiB, cache 1.00 GiB, buffers 0.50 GiB a rank",
    ]
