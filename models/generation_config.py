"""generation_config.json: the settings that a model's authors advise for choosing tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alspec.errors import show
from alspec.models.checkpoint.files import is_there, read_json

__all__ = ["GENERATION_CONFIG", "NEUTRAL_VALUES", "notice_of_settings", "read_generation_config"]

GENERATION_CONFIG = "generation_config.json"
# Settings that change a text, also at temperature 0, with the value that has no effect. So has null.
NEUTRAL_VALUES: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "sequence_bias": [],
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": [],
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
    "watermarking_config": None,
    "token_healing": False,
    "max_time": None,
    "num_beams": 1,
    "num_beam_groups": 1,
}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Settings of a folder's generation_config.json; empty if there is no such file.

    Raises:
        UserError: the file is broken.
    """
    path = folder / GENERATION_CONFIG
    return read_json(path, "for the end-of-text tokens") if is_there(path) else {}


def notice_of_settings(folder: Path) -> str | None:
    """One line that names the settings that would change the tokens and are not applied; None if there are none.

    Temperature, top-k, top-p and `do_sample` are not listed, because they do not change greedy tokens, nor are lengths,
    of which commands have their own.
    """
    given = read_generation_config(folder)
    ignored = {name: given[name] for name, neutral in NEUTRAL_VALUES.items() if given.get(name) not in (None, neutral)}
    if not ignored:
        return None
    listed = ", ".join(f"{name} {show(value, 20)}" for name, value in ignored.items())
    return f"{GENERATION_CONFIG}: not applied: {listed}; only flags and options say how tokens are chosen"
