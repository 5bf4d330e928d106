"""Training of the demo checkpoint at toy size: rows, optimizer, losses."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import ROOT
from tokenizers import Tokenizer

from alspec.models.demo.demo_tokenizer import SPECIAL_TOKENS, train_tokenizer, write_files
from alspec.models.demo.network import DemoLlama, Shape, near_mask
from alspec.models.demo.train import Muon, block_mask, forward_loss, orthogonalise
from alspec.models.demo.training_data import ANSWER_WEIGHT, Codec, RowStream, common_words

TOKENIZER = ROOT / "models" / "demo" / "checkpoint" / "tokenizer.json"


def _corpus(words: int = 30_000) -> str:
    rng = np.random.default_rng(0)
    vocabulary = ["".join(rng.choice(list("abcdeinorst"), rng.integers(4, 8))) for _ in range(400)]
    sentences = (" ".join(rng.choice(vocabulary, 8)).capitalize() + "." for _ in range(words // 8))
    return " ".join(sentences)


@pytest.fixture(scope="module")
def stream_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    folder, text = tmp_path_factory.mktemp("rows"), _corpus()
    codec = Codec(Tokenizer.from_file(str(TOKENIZER)))
    np.save(folder / "books.npy", np.array(codec.encode(text), dtype=np.uint16))
    return folder / "books.npy", TOKENIZER, common_words(text)


@pytest.mark.parametrize("kind", ["text", "story", "needle", "records", "repeat"])
def test_rows_have_full_length_bos_and_weights(stream_files: tuple[Path, Path, list[str]], kind: str):
    books, tokenizer, words = stream_files
    stream = RowStream(books, books, words, tokenizer, {kind: 1.0}, batch_size=2, length=1025, seed=1)
    for ids, weights in islice(iter(stream), 4):
        assert ids.shape == weights.shape == (2, 1025)
        assert (ids[:, 0] == 0).all()
        assert 0 <= int(ids.min()) <= int(ids.max()) < 4096
        assert bool((weights == ANSWER_WEIGHT).any()) == (kind in ("needle", "records"))


def test_needle_answers_are_stated_before(stream_files: tuple[Path, Path, list[str]]):
    books, tokenizer_file, words = stream_files
    stream = RowStream(books, books, words, tokenizer_file, {"needle": 1.0}, batch_size=4, length=2049, seed=2)
    ids, weights = next(iter(stream))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    for row, row_weights in zip(ids, weights, strict=True):
        answer = np.flatnonzero(row_weights.numpy() == ANSWER_WEIGHT)
        first_run = answer[: int(np.argmax(np.diff(answer, append=answer[-1] + 2) > 1)) + 1]
        fact = tokenizer.decode(row[first_run].tolist()).strip()
        before = tokenizer.decode(row[: first_run[0]].tolist())
        assert fact.split(".")[0] in before


def test_near_mask_reads_sink_and_widened_window():
    positions = torch.arange(700)
    mask = near_mask(positions[:, None], positions[None, :], 128)
    for query in (0, 127, 128, 255, 256, 319, 320, 699):
        n = query + 1
        start = max(0, (n - 128) // 64 * 64)
        expected = set(range(min(128, n))) | set(range(start, n))
        assert set(mask[query].nonzero().flatten().tolist()) == expected
        assert 128 <= n - start < 192 or n < 128


def test_orthogonalise_brings_singular_values_near_one():
    matrices = torch.randn(3, 96, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.shape == (3, 32)
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_training_lowers_loss_and_hinge():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = Shape(64, 2, 64, 128, 4, 2, 16, global_layers=(1,))
    model = DemoLlama(shape)
    with torch.no_grad():
        model.wq.mul_(6)  # sharp attention to random places: most layers miss at first
        model.wk.mul_(6)
    muon = Muon(model.matrices(), lr=0.02)
    pattern = torch.randint(64, (1, 16)).repeat(2, 32)[:, :385].to(torch.int32)
    weights, mask = torch.ones(pattern.shape), block_mask(384, "cpu")
    history = []
    for _ in range(12):
        loss, by_kind, hinges = forward_loss(model, pattern, weights, mask, [0.5, 0.0])
        (loss + 0.5 * hinges[0]).backward()
        muon.step()
        model.zero_grad()
        history.append((loss.item(), hinges[0].item(), hinges[1].item()))
    assert by_kind.shape == (2,)
    assert history[-1][0] < history[0][0] - 0.5
    assert history[0][1] > 0.01
    assert history[-1][1] < history[0][1]
    assert history[0][2] == 0.0


def test_tokenizer_files(tmp_path: Path):
    tokenizer = train_tokenizer(iter([_corpus(4000)]), 300)
    write_files(tokenizer, tmp_path, 512)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.get_vocab_size() == 300
    assert [loaded.id_to_token(i) for i in range(len(SPECIAL_TOKENS))] == SPECIAL_TOKENS
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 512


def test_model_parameters_fit_the_documented_size():
    assert sum(p.numel() for p in DemoLlama(replace(Shape())).parameters()) * 2 <= 24_000_000
