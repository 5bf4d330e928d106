"""SmolLM2 on several ranks: 200 tokens after short and long prompts are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import smollm2
from gpu_jobs import needs

from alspec.config import EngineConfig
from alspec.models.checkpoint.source import model_config, open_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200)]

NEW_TOKENS = 200
# At lambda 0 the verdict rejects nearly every A~, and what it accepts is attention's own output.
PAIR = ("--speculation", "paired", "--threshold", 0)


@pytest.fixture(scope="module", params=smollm2.BOOKS)
def example(request: pytest.FixtureRequest) -> tuple[list[int], list[int]]:
    """A prompt, and the tokens that transformers generates behind it."""
    model = smollm2.reference(smollm2.installed())
    config = EngineConfig(model=smollm2.NAME)
    ids = smollm2.from_books(open_tokenizer(config, model_config(config)), request.param)
    return ids, smollm2.greedy(model, ids, NEW_TOKENS)


@pytest.mark.parametrize(
    ("transport", "ranks", "flags"),
    [
        pytest.param("gloo", 3, (), id="gloo-3"),
        pytest.param("gloo", 2, PAIR, id="gloo-pair"),
        pytest.param("auto", 2, PAIR, id="auto-pair", marks=[pytest.mark.gpu, pytest.mark.multi_gpu, needs(2)]),
    ],
)
def test_tokens_are_those_of_transformers(
    transport: str, ranks: int, flags: tuple[object, ...], example: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    ids, expected = example
    found = smollm2.generate([ids], tmp_path, ranks, "--transport", transport, "--max-new-tokens", NEW_TOKENS, *flags)
    assert smollm2.texts(found) == [expected]
