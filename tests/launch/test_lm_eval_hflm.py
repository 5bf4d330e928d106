"""Every request of lm-eval against its own `HFLM` on the same folder, in fp32."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from paths import ROOT
from tiers import fast
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from alspec.errors import UserError
from alspec.launch import lm_eval_model

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")  # HFLM needs it

from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
POSITIONS = 96
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and strict %}{{ raise_exception('no system') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% endif %}"
)
# Merges that join a space, a line end or a letter with what follows, so that a context is often no prefix of the whole.
CORPUS = [
    " the the there  thereof\n\n\nthe re read   really\n the",
    "a cat sat. A cat, the cat; there was\n\n there",
] * 8


def _byte_level(begins: bool) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    if begins:
        core.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", core.token_to_id("<|begin|>"))]
        )
    return core


def _metaspace() -> tokenizers.Tokenizer:
    """A tokenizer like Llama 2's: a mark for each space, bytes for unknown characters, no space before a text."""
    marked = "\u2581"
    pieces = [marked, *(chr(i) for i in range(33, 127)), marked + "t", "th", "the", marked + "the", "re", "ther"]
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *(f"<0x{i:02X}>" for i in range(256)), *pieces])}
    merges = [(marked, "t"), ("t", "h"), ("th", "e"), (marked + "t", "he")]
    merges = [pair for pair in merges if "".join(pair) in vocab and all(part in vocab for part in pair)]
    core = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<0x00>", fuse_unk=True)
    )
    core.add_special_tokens(list(SPECIAL_TOKENS))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement=marked, prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace(marked, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return core


FOLDERS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "begins": (lambda: _byte_level(True), {"bos_token": "<|begin|>"}),
    "no-begin": (lambda: _byte_level(False), {"bos_token": "<|begin|>"}),
    "no-bos": (lambda: _byte_level(False), {}),
    "metaspace": (_metaspace, {"bos_token": "<|begin|>"}),
}


def _write(folder: Path, kind: str, **config: Any) -> str:
    make, settings = FOLDERS[kind]
    core = make()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    values = {"num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": POSITIONS, "bos_token_id": None}
    values |= {"eos_token_id": 1, "initializer_range": 0.2}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | values | config)))
    # A step gives a letter or a space more often than a byte that is no text.
    model.lm_head.weight.data[core.get_vocab_size() :] = 0
    model.save_pretrained(folder)
    core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: _write(tmp_path_factory.mktemp(kind), kind) for kind in FOLDERS}


@pytest.fixture
def both() -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Our model and HFLM for a folder, with the same arguments."""
    open_model, engines = lm_eval_model.model_class(), []

    def open_both(folder: str, **arguments: Any) -> tuple[Any, Any]:
        ours = open_model(model=folder, transport="gloo", dtype="fp32", **arguments)
        engines.append(ours.engine)
        # Its cache mixes up the continuations of one text that is cut at several places.
        return ours, HFLM(pretrained=folder, device="cpu", dtype="float32", logits_cache=False, **arguments)

    yield open_both
    for engine in engines:
        engine.close()


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="task", request_type="") for each in arguments]


BOS = [None, True, False]
CASES = [(kind, bos) for kind in FOLDERS for bos in BOS]


def pairs(seed: int) -> list[tuple[str, str]]:
    """Contexts and continuations that tokenizers join: cut at any place of a text, with spaces at the cut or none."""
    rng = random.Random(seed)
    texts = [
        "Once upon a time there was",
        "the\n\n\nthere  the",
        " a cat",
        "\u00e9\u00e8 \u4e2d\u6587 the",
        "read really",
    ]
    given = [(text[:cut], text[cut:]) for text in texts for cut in rng.sample(range(len(text)), 4)]
    given += [("", "the"), ("", " there was"), (" ", "the"), ("a ", "cat"), ("a  \n", " cat"), ("<|begin|>a", " cat")]
    given += [("", "<|begin|>a cat"), ("", "<|end|>a cat"), ("<|end|>a", " the"), ("a" * 50, "b" * 45)]
    return [*given, ("the cat sat " * 60, "there"), ("A dog was a " * 20, "the cat" * 3), ("x", "y" * (POSITIONS - 1))]


@pytest.mark.parametrize(("kind", "add_bos_token"), CASES)
def test_loglikelihoods(
    kind: str,
    add_bos_token: bool | None,
    folders: dict[str, str],
    both: Callable[..., tuple[Any, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, oracle = both(folders[kind], add_bos_token=add_bos_token)
    asked = requests(*(pair for pair in pairs(seed=len(kind)) if not pair[0] or all(oracle._encode_pair(*pair))))
    assert len(asked) > 20
    with caplog.at_level(logging.WARNING):
        expected = oracle.loglikelihood(asked, disable_tqdm=True)
        cut = sum("Truncating" in record.message for record in caplog.records)
        found = ours.loglikelihood(asked, disable_tqdm=True)
        assert cut
        assert sum("truncating" in record.message for record in caplog.records) == cut
    for (nats, is_greedy), (oracle_nats, oracle_is_greedy), request in zip(found, expected, asked, strict=True):
        assert nats == pytest.approx(oracle_nats, rel=1e-5, abs=1e-4), request.args
        assert is_greedy == oracle_is_greedy


def test_the_contexts_are_no_prefixes(folders: dict[str, str]) -> None:
    """The texts above hold what they are for."""
    core = tokenizers.Tokenizer.from_file(f"{folders['no-bos']}/tokenizer.json")
    split = [(core.encode(context.rstrip()).ids, core.encode(context + rest).ids) for context, rest in pairs(seed=6)]
    assert sum(whole[: len(context)] != context for context, whole in split) > 5


@pytest.mark.parametrize(("kind", "add_bos_token"), fast(CASES, keep=[("begins", None), ("no-bos", None)]))
def test_rolling_loglikelihoods(
    kind: str, add_bos_token: bool | None, folders: dict[str, str], both: Callable[..., tuple[Any, Any]]
) -> None:
    ours, oracle = both(folders[kind], add_bos_token=add_bos_token)
    sizes = (1, POSITIONS - 1, POSITIONS, POSITIONS + 1, 3 * POSITIONS + 7)
    asked = requests(("the",), ("<|begin|>a cat",), *(("q" * size,) for size in sizes), ("a dog, there\n" * 70,))
    expected = oracle.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked, disable_tqdm=True) == pytest.approx(expected, rel=1e-5)


GENERATE = [
    {"until": [], "max_new_tokens": 8},
    {"max_tokens": 9},
    {"until": ["e", "\n"], "max_gen_toks": 40},
    {"until": "th", "max_gen_toks": 40},
    {"until": ["<|user|>"], "max_gen_toks": 40, "do_sample": False, "temperature": 0.0},
    {"until": ["", "zz"], "max_gen_toks": 5, "temperature": 0},
    {"max_gen_toks": 12, "max_tokens": 4, "num_beams": 1, "top_p": 0.5, "do_sample": False},
    {"max_gen_toks": 10, "do_sample": True, "temperature": 1.0, "top_k": 1},
    {"max_gen_toks": 10, "temperature": 1e-4},
]


@pytest.mark.parametrize(("kind", "add_bos_token"), fast(CASES, keep=[("begins", None), ("metaspace", None)]))
def test_answers(
    kind: str,
    add_bos_token: bool | None,
    folders: dict[str, str],
    both: Callable[..., tuple[Any, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, oracle = both(folders[kind], add_bos_token=add_bos_token)
    contexts = ["Once upon a time", "the", "a ", "<|begin|>there", "the cat sat " * 60]
    asked = requests(*((context, dict(settings)) for settings in GENERATE for context in contexts))
    expected = oracle.generate_until(asked, disable_tqdm=True)
    asked = requests(*((context, dict(settings)) for settings in GENERATE for context in contexts))
    with caplog.at_level(logging.WARNING):
        found = ours.generate_until(asked, disable_tqdm=True)
        assert "truncating it to its last" in caplog.text
    for text, oracle_text, request in zip(found, expected, asked, strict=True):
        assert text == oracle_text, request.args
    assert len(set(expected)) > 15


def test_scaled_positions(tmp_path: Path, both: Callable[..., tuple[Any, Any]]) -> None:
    """HFLM reads as many tokens as config.json has positions, also where RoPE scaling allows for more."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ours, oracle = both(_write(tmp_path, "begins", rope_scaling=scaling))
    assert ours.engine.max_total_tokens == 2 * POSITIONS
    assert ours.max_length == oracle.max_length == POSITIONS
    asked = requests(("the cat sat " * 60, "x"), ("xyz", "qq"))
    expected = oracle.loglikelihood(asked, disable_tqdm=True)
    for found, wanted in zip(ours.loglikelihood(asked, disable_tqdm=True), expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    asked = requests(("the cat sat " * 60, {"max_gen_toks": 12}))
    assert ours.generate_until(asked, disable_tqdm=True) == oracle.generate_until(asked, disable_tqdm=True)


def _with_generation_config(folder: Path, **values: Any) -> str:
    """A folder whose generation_config.json has these settings, too."""
    written, path = _write(folder, "begins"), folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return written


def test_settings_of_the_folder_hold(tmp_path: Path, both: Callable[..., tuple[Any, Any]]) -> None:
    """And change the answer."""
    asked = requests(("Once upon a time", {"max_gen_toks": 16}))
    ours, oracle = both(_with_generation_config(tmp_path / "set", repetition_penalty=1.7))
    plain, _ = both(_write(tmp_path / "plain", "begins"))
    answer = ours.generate_until(asked, disable_tqdm=True)
    assert answer == oracle.generate_until(asked, disable_tqdm=True)
    assert answer != plain.generate_until(asked, disable_tqdm=True)


REFUSED: list[dict[str, Any]] = [
    {"min_new_tokens": 12}, {"min_length": 30}, {"sequence_bias": [[[50], 30.0]]}, {"forced_eos_token_id": 1},
    {"exponential_decay_length_penalty": [2, 5.0]}, {"encoder_repetition_penalty": 3.0}, {"max_new_tokens": 3},
]  # fmt: skip
SAMPLED: list[dict[str, Any]] = [{"typical_p": 0.2}, {"epsilon_cutoff": 0.5}, {"eta_cutoff": 0.5}]
SAMPLED += [{"min_p": 0.3, "top_p": 0.5}]


@pytest.mark.parametrize("values", [*REFUSED, *SAMPLED], ids=lambda values: next(iter(values)))
def test_settings_of_the_folder_that_would_change_the_answer_are_refused(
    values: dict[str, Any], tmp_path: Path, both: Callable[..., tuple[Any, Any]]
) -> None:
    """By their names. Settings of samples count only where a task samples."""
    ours, oracle = both(_with_generation_config(tmp_path, **values))
    greedy, name = requests(("Once upon a time", {"max_gen_toks": 16})), next(iter(values))
    if values in SAMPLED:
        assert ours.generate_until(greedy, disable_tqdm=True) == oracle.generate_until(greedy, disable_tqdm=True)
    asked = greedy
    if values in SAMPLED:
        asked = requests(("Once upon a time", {"max_gen_toks": 16, "do_sample": True, "temperature": 0.9}))
    with pytest.raises(UserError, match=f"lm-eval: {name}"):
        ours.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize("advised", [[1], [1, 300], None], ids=str)
def test_answers_end_at_the_tokens_of_generation_config(
    advised: list[int] | None, tmp_path: Path, both: Callable[..., tuple[Any, Any]]
) -> None:
    """Also where config.json names others, special or not."""
    folder = _write(tmp_path, "begins", eos_token_id=[1, 3, 105, 262])
    path = tmp_path / "generation_config.json"
    path.unlink() if advised is None else path.write_text(json.dumps({"eos_token_id": advised}))
    ours, oracle = both(folder)
    asked = requests(*((text, {"max_gen_toks": 40}) for text in ("the", "Once upon", "a cat", "there was", "read")))
    expected = oracle.generate_until(asked, disable_tqdm=True)
    assert ours.generate_until(asked, disable_tqdm=True) == expected
    assert len(set(map(len, expected))) > 1


@pytest.mark.parametrize("kind", ["begins", "no-begin"])
@pytest.mark.parametrize("own", [{"add_bos_token": True}, {"add_bos_token": False}, {"split_special_tokens": True}])
def test_flags_of_the_tokenizer(
    own: dict[str, bool], kind: str, tmp_path: Path, both: Callable[..., tuple[Any, Any]]
) -> None:
    """A Llama tokenizer's flags count as in transformers, whether tokenizer.json agrees with them or not."""
    folder = _write(tmp_path, kind)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizer"} | own))
    ours, oracle = both(folder)
    asked = requests(("the cat", " sat"), ("", "the"), ("<|user|>the", " cat"))
    expected = oracle.loglikelihood(asked, disable_tqdm=True)
    for found, wanted in zip(ours.loglikelihood(asked, disable_tqdm=True), expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)


def test_arguments_that_do_not_exist_are_named(folders: dict[str, str]) -> None:
    for name, advice in (("pretrained", "use model"), ("max_length", "use max_context"), ("treshold", "use threshold")):
        with pytest.raises(UserError, match=f"lm-eval: {name}: no such argument; {advice} "):
            lm_eval_model.model_class()(**{name: folders["begins"]})


def test_what_hflm_refuses_is_refused(folders: dict[str, str], both: Callable[..., tuple[Any, Any]]) -> None:
    ours, oracle = both(folders["begins"])
    for context, settings in (
        ("a", {"max_gen_toks": POSITIONS}),
        ("a", {"max_gen_toks": 4, "do_sample": True}),
        ("a", {"max_gen_toks": 4, "nonsense": 3}),
    ):
        for model, error in ((oracle, (AssertionError, ValueError)), (ours, UserError)):
            with pytest.raises(error):
                model.generate_until(requests((context, dict(settings))), disable_tqdm=True)
    for pair in (("a", ""), ("x", "y" * (POSITIONS + 1))):
        for model, error in ((oracle, (AssertionError, IndexError)), (ours, UserError)):
            with pytest.raises(error):
                model.loglikelihood(requests(pair), disable_tqdm=True)


CHATS = [
    [{"role": "user", "content": " What is it? "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is the"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Answer:  "}],
]


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"chat_template_args": {"strict": True}}])
def test_chats(arguments: dict[str, Any], folders: dict[str, str], both: Callable[..., tuple[Any, Any]]) -> None:
    ours, oracle = both(folders["begins"], **arguments)
    for messages in CHATS:
        for add_generation_prompt in (True, False):
            expected = oracle.apply_chat_template([dict(each) for each in messages], add_generation_prompt)
            assert ours.apply_chat_template(messages, add_generation_prompt) == expected
    for name in (True, False, "default"):
        assert ours.chat_template(name) == oracle.chat_template(name)
    assert ours.tokenizer_name == oracle.tokenizer_name
    text = ours.apply_chat_template(CHATS[0])
    asked = requests((text, " It is"), (text + "It", " is"))
    expected = oracle.loglikelihood(asked, disable_tqdm=True)
    for found, wanted in zip(ours.loglikelihood(asked, disable_tqdm=True), expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    asked = requests((text, {"max_gen_toks": 12}))
    assert ours.generate_until(asked, disable_tqdm=True) == oracle.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize("end", [268, "e"])
def test_thoughts_are_left_out(end: int | str, folders: dict[str, str], both: Callable[..., tuple[Any, Any]]) -> None:
    ours, oracle = both(folders["begins"], think_end_token=end)
    asked = requests(*((context, {"max_gen_toks": 30}) for context in ("the", "Once upon", "cat sat", "a")))
    assert ours.generate_until(asked, disable_tqdm=True) == oracle.generate_until(asked, disable_tqdm=True)


def test_requests_of_a_task_share_their_memory(
    folders: dict[str, str], both: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = both(folders["begins"])
    loads: list[int] = []
    load = ours.engine.load
    monkeypatch.setattr(ours.engine, "load", lambda *room: (loads.append(room[1]), load(*room)))
    contexts = ["a", "Once upon a time there was", "the old man"]
    asked = requests(*((context, {"max_gen_toks": 4}) for context in contexts))
    answers = ours.generate_until(asked, disable_tqdm=True)
    assert len(loads) == 1
    for request, answer in zip(asked, answers, strict=True):
        assert ours.generate_until([request], disable_tqdm=True) == [answer]
    asked = 3 * requests(("a", {"max_gen_toks": 8, "do_sample": True, "temperature": 3.0}))
    answers = ours.generate_until(asked, disable_tqdm=True)
    assert len(set(answers)) == 3  # a repeated request has another seed
    assert ours.generate_until(asked, disable_tqdm=True) == answers
    for cache in (lm_eval_model.cache_setting("turbo4", "exact"), lm_eval_model.cache_setting("bf16", "sas")):
        ours.cache = cache  # the engine has another one
        with pytest.raises(UserError, match="decode from kv_cache bf16 with softmax exact only"):
            ours.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize("multiturn", fast([True, False], keep=[True]))
def test_whole_tasks_with_examples_and_a_system_message(
    multiturn: bool, tmp_path: Path, both: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's own loop over the tasks of docs/lm_eval: the same prompts, and the same answers to them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    manager = TaskManager(include_path="docs/lm_eval", include_defaults=False)
    found = []
    for model in both(_write(tmp_path, "begins", max_position_embeddings=4096)):
        results = simple_evaluate(
            model,
            tasks=["book_endings", "book_bits", "capitals"],
            task_manager=manager,
            limit=2,
            num_fewshot=2,
            apply_chat_template=True,
            system_instruction="Be brief.",
            fewshot_as_multiturn=multiturn,
            bootstrap_iters=0,
        )
        found.append(results["samples"])
    ours, oracle = found
    assert ours.keys() == oracle.keys() == {"book_endings", "book_bits", "capitals"}
    for task, samples in oracle.items():
        for sample, own in zip(samples, ours[task], strict=True):
            assert own["arguments"] == sample["arguments"]
            if task == "capitals":
                assert own["resps"] == sample["resps"]
                assert "<|system|>Be brief.<|end|>" in own["arguments"][0][0]
            else:
                numbers, expected = (np.array(each["resps"], float).ravel() for each in (own, sample))
                assert numbers == pytest.approx(expected, rel=1e-5)
