"""The bundled demo checkpoint: its files, its tokenizer, and recall by the trained network, which is a Llama."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from paths import ROOT
from safetensors import safe_open
from tokenizers import Tokenizer

from alspec.models.checkpoint.checkpoint import verify_checksums
from alspec.models.demo.blend import blend
from alspec.models.demo.network import DemoLlama, Shape, attend_full, export, layer_forward, load, rms_norm
from alspec.models.demo.training_data import Codec, recall_prompts
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.quality import TextScore, score_text

FOLDER = ROOT / "models" / "demo" / "checkpoint"
STORY = (
    "The old man walked slowly down the road to the village. He had lived there when he was young, before the mill "
    "was closed and the river changed its course. Nobody knew him now. The houses stood where they had always stood, "
    "with their small windows and doors, and smoke rose from the chimney of the inn. He stopped at the bridge and "
    "looked into the water. A child came up and asked him where he was going. He answered that he did not know yet. "
    "The church bell struck four, and the light began to fade behind the hills. They crossed the square together "
    "without another word, while the evening grew colder and the first lamps were lit. "
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> DemoLlama:
    return load(FOLDER, Shape())


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine.from_pretrained(dtype="fp32", transport="gloo")
    engine.load(1, 2048)
    return engine


def score(engine: Engine, ids: list[int], threshold: float, prompt_tokens: int) -> TextScore:
    assert engine.transport is not None
    return score_text(engine.model, engine.transport, ids, threshold, 128, prompt_tokens)


def test_shards_hold_exactly_the_indexed_tensors_within_24_mb():
    files = sorted(FOLDER.glob("*.safetensors"))
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    found = {}
    num_bytes = 0
    for file in files:
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                tensor = shard.get_tensor(name)
                assert tensor.dtype == torch.bfloat16
                assert torch.isfinite(tensor).all(), name
                found[name] = file.name
                num_bytes += tensor.nbytes
    assert len(files) == 2
    assert found == index["weight_map"]
    assert num_bytes == index["metadata"]["total_size"]
    assert sum(file.stat().st_size for file in files) <= 24_000_000


def test_config_has_the_documented_shape():
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 64)
    assert config["max_position_embeddings"] >= 8192
    assert config["tie_word_embeddings"] is True
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert generation["eos_token_id"] == [tokenizer.token_to_id("<|eos|>"), tokenizer.token_to_id("<|end|>")]
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 4096


@pytest.mark.parametrize(
    "text",
    [
        "It's 2048.",
        "tabs\t and\n\n  newlines \r\n",
        "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f600",
        "def f(x):\n    return x\n",
        "",
    ],
)
def test_tokenizer_round_trip(codec: Codec, text: str):
    assert codec.tokenizer.decode(codec.encode(text), skip_special_tokens=False) == text


def test_digits_stay_single_and_bos_comes_once(codec: Codec):
    assert [codec.tokenizer.id_to_token(i) for i in codec.encode(" 4821")] == ["\u0120", "4", "8", "2", "1"]
    assert codec.tokenizer.encode("Hello").ids.count(codec.bos) == 1


def test_chat_template_renders_the_training_format(codec: Codec):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


def test_logits_equal_transformers(model: DemoLlama, codec: Codec):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ids = torch.tensor([[codec.bos, *codec.encode(STORY)]])
    with torch.no_grad():
        x, rope = F.embedding(ids, model.embed), model.rope(ids.shape[1])
        for weights in model.layers():
            x = layer_forward(x, weights, rope, model.shape.head_dim, attend_full)
        logits = rms_norm(x, model.norm_out) @ model.embed.T
    with torch.no_grad():
        expected = oracle(ids).logits
    assert torch.isfinite(logits).all()
    assert (logits - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_recall_needs_distant_tokens(engine: Engine, codec: Codec, number: int):
    prompt = recall_prompts(2, 2048, codec.tokenizer, STORY, seed=3)[number]
    ids, start = prompt.prompt_ids + prompt.answer_ids, len(prompt.prompt_ids)
    for threshold in (0.0, 0.1):
        assert score(engine, ids, threshold, start).predicted[start - 1 :].tolist() == prompt.answer_ids
    assert score(engine, ids, float("inf"), start).predicted[start - 1 :].tolist() != prompt.answer_ids


def test_most_layers_accept_speculation(engine: Engine, codec: Codec):
    ids = recall_prompts(1, 1000, codec.tokenizer, STORY, seed=4)[0].prompt_ids
    rates = score(engine, ids, 0.1, 0).hits[:, 2 * 128 + 63 :].float().mean(1)
    local = [i for i in range(10) if i not in Shape().global_layers]
    assert (rates[local] > 0.9).all()
    assert rates[list(Shape().global_layers)].mean() < 0.9


def test_recall_prompts_are_reproducible_and_hold_their_answer(codec: Codec):
    first = recall_prompts(4, 1024, codec.tokenizer, STORY, seed=7)
    assert first == recall_prompts(4, 1024, codec.tokenizer, STORY, seed=7)
    assert first != recall_prompts(4, 1024, codec.tokenizer, STORY, seed=8)
    for prompt in first:
        text = codec.tokenizer.decode(prompt.prompt_ids, skip_special_tokens=False)
        assert len(prompt.prompt_ids) + len(prompt.answer_ids) == 1024
        assert text.count(f"is {prompt.value}.") == 1
        assert text.endswith("<|end|><|assistant|>")
        assert codec.tokenizer.decode(prompt.answer_ids).rstrip(".").endswith(prompt.value)


def test_recall_prompts_refuse_text_without_words(codec: Codec):
    with pytest.raises(ValueError, match=r"corpus_text: .*: expected at least 8 words"):
        recall_prompts(1, 1024, codec.tokenizer, "a b c. d e f.", seed=0)


def test_export_round_trip_and_blend(tmp_path: Path):
    shape = replace(Shape(), num_layers=2, hidden_size=32, intermediate_size=64, vocab_size=64)
    first, second = DemoLlama(shape), DemoLlama(shape)
    export(first, tmp_path, 0, [1, 5])
    loaded = load(tmp_path, shape)
    for a, b in zip(first.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b.bfloat16())
    half = blend(first, second, 0.25)
    assert torch.allclose(half.wq, 0.75 * first.wq + 0.25 * second.wq, atol=1e-6)


def test_checksums_are_those_of_the_files():
    verify_checksums(FOLDER)
