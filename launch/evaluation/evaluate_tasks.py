"""The tasks of `launch/evaluate.py`: windows of a text, and prompts that contain the answer to their question."""

from __future__ import annotations

import gzip
import itertools
import lzma
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

import tokenizers
import torch

from alspec.config import EvaluateConfig, SamplingConfig
from alspec.errors import UserError, show
from alspec.models.checkpoint.files import parse_json
from alspec.models.demo.demo_tokenizer import SPECIAL_TOKENS
from alspec.models.demo.training_data import RecallPrompt, recall_prompts
from alspec.predictor import first_lossy_length
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.quality import TextScore, score_under
from alspec.runtime.eval.teacher_forced import CacheSetting

__all__ = [
    "ANSWER",
    "Quality",
    "Task",
    "answer_tasks",
    "answered",
    "first_lossy_position",
    "needle_tasks",
    "read_text",
    "recall_task",
    "record_needle_tasks",
    "records_task",
    "text_task",
    "too_short",
]


ANSWER_TOKENS = 128  # longest answer that is compared with the one under full attention
ANSWER = "greedy tokens equal"
INSTRUCTION = "Read this text.\n\n{}\n\nWhat happens in it? Answer in a few sentences."
MAX_VOCAB = 2**16  # largest vocabulary for prompts in the demo checkpoint's format
# An argument that `recall_prompts` may refuse -> its flag.
RECALL_FLAGS = {"corpus_text": "--text", "context_tokens": "--contexts"}


@dataclass(frozen=True)
class Task:
    """One measure over several texts of about the same length."""

    measure: str
    context: int  # tokens, of the longest text
    texts: list[list[int]]
    answers: list[list[int]] | None = None  # the right continuation of each text; None: the text itself is predicted
    depth: float | None = None  # position of the answer in its text, 0 to 1

    def run(self, engine: Engine, thresholds: Sequence[Sequence[float]], cache: CacheSetting) -> list[Quality]:
        """Measure it under several settings of lambda, each with one value for each layer."""
        measured = _bits_per_byte if self.answers is None else _agreement if self.measure == ANSWER else _recall
        return measured(engine, self, thresholds, cache)


@dataclass(frozen=True)
class Quality:
    """One measured value, and the hit rate of each layer over the positions whose A~ leaves out tokens."""

    value: float
    hit_rates: list[float] | None  # None if no A~ leaves out a token
    details: dict[str, float] = field(default_factory=dict)  # other values of the same texts


@dataclass(frozen=True)
class RecordCase:
    """Pairs of keys and values; the prompt asks for the value of `key`."""

    pairs: list[tuple[str, str]]
    key: str
    value: str

    def ordered(self, num_pairs: int, depth: float) -> list[tuple[str, str]]:
        """`num_pairs` pairs, at least one. The pair of `key` is at `depth`: 0 is the first place, 1 the last."""
        others = [pair for pair in self.pairs if pair[0] != self.key][: num_pairs - 1]
        place = round(depth * len(others))
        return [*others[:place], (self.key, self.value), *others[place:]]


def too_short(config: EvaluateConfig, count: int, longest: int, found: int) -> UserError:
    """The error of a text that does not have `count` windows of `longest` tokens."""
    return UserError(
        f"flags: --text: {count} windows of {longest} tokens needed, {config.text} has {found} tokens; give a longer "
        "text, or lower --windows, --answers or --contexts"
    )


def read_text(path: Path) -> str:
    """The text of a .txt file, or the texts of a .jsonl or .jsonl.xz file.

    Raises:
        UserError: the file is unreadable or broken.
    """
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = data.decode("utf-8-sig")
        if ".jsonl" in path.suffixes:
            lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
            text = "\n\n".join(_text_of(line, f"{path}:{number}") for number, line in lines)
    except OSError as error:
        raise UserError(f"flags: --text: cannot read {path}: {error.strerror}; give a text file") from None
    except lzma.LZMAError as error:
        raise UserError(f"flags: --text: {path}: broken ({error}); give .txt, .jsonl or .jsonl.xz") from None
    except UnicodeDecodeError as error:
        raise UserError(f"flags: --text: {path}: not UTF-8 at byte {error.start}; give a UTF-8 text file") from None
    return text


def _text_of(line: str, where: str) -> str:
    expected = 'expected a text, as in {"text": "..."}'
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(f"flags: --text: {where}: not JSON ({getattr(error, 'msg', error)}); {expected}") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not _is_text(text):
        raise UserError(f"flags: --text: {where}: {expected}, found {show(value if text is None else text)}")
    return text


def _is_text(value: object) -> TypeGuard[str]:
    """Whether the value is a text that UTF-8 can encode. JSON may contain half characters (lone surrogates)."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def first_lossy_position(chunk_size: int) -> int:
    """The first position whose A~ leaves out a token. Before it A~ = A, so every layer would count as a hit."""
    return first_lossy_length(chunk_size) - 1


def text_task(begin: list[int], ids: list[int], context: int) -> Task:
    """Bits per byte over all whole windows of `context` tokens in `ids`. Each window begins with `begin`."""
    stride = context - len(begin)
    starts = range(0, len(ids) - stride + 1, stride)
    return Task("bits per byte", context, [begin + ids[start : start + stride] for start in starts])


def recall_task(engine: Engine, text: str, context: int, count: int) -> Task:
    """Facts scattered over running text; the prompt asks for one. In the demo checkpoint's format."""
    return _answered("recall", context, _recall_prompts(count, context, _core(engine), text, seed=1))


def needle_tasks(engine: Engine, text: str, contexts: list[int], depths: Sequence[float], count: int) -> list[Task]:
    """As `recall_task`, with one task for each context and depth: the prompt asks for a fact at this depth."""
    core = _core(engine)
    text = text[: 40 * max(contexts)]  # about ten of the longest contexts: enough to draw from, quick to tokenize
    return [
        _answered("needle", context, _recall_prompts(count, context, core, text, seed=2, depth=depth), depth)
        for context in contexts
        for depth in depths
    ]


def records_task(engine: Engine, path: Path, count: int) -> Task:
    """Key-value retrieval from a .jsonl.gz file with `ordered_kv_records`, `key` and `value` in each line.

    Raises:
        UserError: the file is unreadable or broken, or a prompt is longer than the model's positions.
    """
    prompts = [_record_prompt(engine, case, case.pairs) for case in _record_cases(path, count)]
    if not prompts:
        raise UserError(f"flags: --records: {path} holds no case")
    limit = engine.model_config.longest_context
    longest = max(map(_num_tokens, prompts))
    if longest > limit:
        raise UserError(f"flags: --records: {path}: prompts of {longest} tokens; the model has {limit} positions")
    return _answered("record recall", longest, prompts)


def record_needle_tasks(
    engine: Engine, path: Path, contexts: list[int], depths: Sequence[float], count: int
) -> list[Task]:
    """As `records_task`, but each context is filled with pairs, and the pair of `key` is placed at each depth.

    Stops at the first context that holds all pairs of every case: longer contexts would give the same prompts. The
    tasks of this context are labelled with the length of these prompts.

    Raises:
        UserError: as `records_task`, or a context that cannot hold one pair.
    """
    cases, tasks = _record_cases(path, count), []
    for context in contexts:
        used = {depth: [_pairs_within(engine, case, context, depth) for case in cases] for depth in depths}
        if not all(pairs for at_depth in used.values() for pairs in at_depth):
            raise UserError(f"flags: --contexts: {context} tokens do not hold one pair of {path}")
        prompts = {
            depth: [_record_prompt(engine, case, pairs) for case, pairs in zip(cases, used[depth], strict=True)]
            for depth in depths
        }
        is_all = all(len(pairs) == len(case.pairs) for case, pairs in zip(cases, used[depths[0]], strict=True))
        length = max(_num_tokens(prompt) for at_depth in prompts.values() for prompt in at_depth) if is_all else context
        tasks += [_answered("record needle", length, prompts[depth], depth) for depth in depths]
        if is_all:
            break
    return tasks


def answer_tasks(engine: Engine, ids: list[int], contexts: Sequence[int], count: int) -> list[Task]:
    """Prompts over running text, chats where the model has a template. Their answers are still to come (`answered`).

    Prompt and answer together have about as many tokens as the context.

    Raises:
        UserError: a context that has no room for a prompt and an answer.
    """
    assert engine.tokenizer is not None
    tokenizer = engine.tokenizer

    def prompt_ids(text: str) -> list[int]:
        if not tokenizer.has_chat_template:
            return tokenizer.encode(text)
        return tokenizer.encode_chat([{"role": "user", "content": INSTRUCTION.format(text)}])

    tasks = []
    for context in contexts:
        # Text that is cut out of a longer one may have a token more at each end.
        room = context - ANSWER_TOKENS - len(prompt_ids("")) - 2
        if room < 1:
            raise UserError(f"flags: --contexts: {context} tokens have no room for a prompt and {ANSWER_TOKENS} more")
        prompts = [prompt_ids(tokenizer.decode(ids[at * room : (at + 1) * room])) for at in range(count)]
        tasks.append(Task(ANSWER, context, [prompt[-(context - ANSWER_TOKENS) :] for prompt in prompts], []))
    return tasks


def answered(engine: Engine, task: Task) -> Task:
    """One of `answer_tasks` with the greedy answers of the engine, which must be loaded, with speculation off."""
    sampling = SamplingConfig(max_new_tokens=ANSWER_TOKENS)
    answers = [[token.token_id for token in engine.stream([prompt], sampling)] for prompt in task.texts]
    return replace(task, answers=answers)


def _record_cases(path: Path, count: int) -> list[RecordCase]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [_record_case(line) for line in itertools.islice(lines, count)]
    except OSError as error:
        raise UserError(f"flags: --records: cannot read {path}: {error}; give a .jsonl.gz file") from None
    except (EOFError, zlib.error, KeyError, TypeError, ValueError) as error:
        raise UserError(f"flags: --records: {path}: broken at {show(error)}") from None


def _record_case(line: str) -> RecordCase:
    case = parse_json(line)
    pairs = [(key, value) for key, value in case["ordered_kv_records"]]
    if not all(map(_is_text, itertools.chain(*pairs, (case["key"], case["value"])))):
        raise ValueError("expected texts as keys and values")
    return RecordCase(pairs, case["key"], case["value"])


def _record_prompt(engine: Engine, case: RecordCase, pairs: list[tuple[str, str]]) -> RecallPrompt:
    assert engine.tokenizer is not None
    lead = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    records = ", ".join(f'"{key}": "{value}"' for key, value in pairs)
    body = f'{lead}{{{records}}}\n\nKey: "{case.key}"\nCorresponding value:'
    answer_ids = engine.tokenizer.encode(f' "{case.value}"', add_bos=False)
    return RecallPrompt(engine.tokenizer.encode(body), answer_ids, case.value)


def _pairs_within(engine: Engine, case: RecordCase, context: int, depth: float) -> list[tuple[str, str]]:
    """Return as many pairs, in the order of `RecordCase.ordered`, as fit `context` tokens with prompt and answer."""
    pairs = case.ordered(len(case.pairs), depth)
    while pairs and (length := _num_tokens(_record_prompt(engine, case, pairs))) > context:
        fewer = min(len(pairs) - 1, max(len(pairs) * context // length, 1))
        pairs = case.ordered(fewer, depth) if fewer else []
    return pairs


def _num_tokens(prompt: RecallPrompt) -> int:
    return len(prompt.prompt_ids + prompt.answer_ids)


def _recall_prompts(
    count: int, context: int, core: tokenizers.Tokenizer, text: str, seed: int, depth: float | None = None
) -> list[RecallPrompt]:
    """As `recall_prompts`.

    Raises:
        UserError: an argument that `recall_prompts` refuses; names its flag.
    """
    try:
        return recall_prompts(count, context, core, text, seed, depth)
    except ValueError as error:
        argument, _, why = str(error).partition(": ")
        if argument not in RECALL_FLAGS:
            raise
        raise UserError(f"flags: {RECALL_FLAGS[argument]}: {why}") from None


def _core(engine: Engine) -> tokenizers.Tokenizer:
    core = engine.text_tokenizer("use --records", "flags: --recall, --needles").core
    missing = next((token for token in SPECIAL_TOKENS if core.token_to_id(token) is None), None)
    if missing is not None or core.get_vocab_size() > MAX_VOCAB:
        lack = f"the token {missing}" if missing is not None else f"a vocabulary of {MAX_VOCAB} at most"
        raise UserError(
            f"flags: --recall, --needles: their prompts have the format of the demo checkpoint, which needs {lack}; "
            "use --records with this tokenizer"
        )
    return core


def _answered(measure: str, context: int, prompts: list[RecallPrompt], depth: float | None = None) -> Task:
    texts, answers = [prompt.prompt_ids for prompt in prompts], [prompt.answer_ids for prompt in prompts]
    return Task(measure, context, texts, answers, depth)


def _bits_per_byte(
    engine: Engine, task: Task, thresholds: Sequence[Sequence[float]], cache: CacheSetting
) -> list[Quality]:
    """Bits per UTF-8 byte. All tokens of a window count except its first one, which nothing predicts."""
    assert engine.tokenizer is not None
    first_lossy = first_lossy_position(engine.config.speculation.chunk_size)
    # Decode all windows together: a character can begin in one window and end in the next.
    num_bytes = len(engine.tokenizer.decode([token for window in task.texts for token in window[1:]]).encode("utf-8"))
    counted = 0
    nats, hits = [0.0] * len(thresholds), torch.zeros(len(thresholds), engine.model_config.num_layers)
    for window in task.texts:
        counted += len(window[first_lossy:])
        for index, score in enumerate(_scores(engine, window, thresholds, 0, cache)):
            nats[index] += float(score.nll.double().sum())
            hits[index] += score.hits[:, first_lossy:].sum(1)
    rates = _shares(hits, counted)
    return [Quality(total / math.log(2) / num_bytes, layers) for total, layers in zip(nats, rates, strict=True)]


def _recall(engine: Engine, task: Task, thresholds: Sequence[Sequence[float]], cache: CacheSetting) -> list[Quality]:
    """Return the share of prompts for which greedy decoding gives the whole answer. Prompts use full attention."""
    assert task.answers is not None
    first_lossy = first_lossy_position(engine.config.speculation.chunk_size)
    counted = 0
    right, hits = [0] * len(thresholds), torch.zeros(len(thresholds), engine.model_config.num_layers)
    for prompt, answer in zip(task.texts, task.answers, strict=True):
        first = max(len(prompt), first_lossy)
        counted += max(len(prompt + answer) - first, 0)
        for index, score in enumerate(_scores(engine, prompt + answer, thresholds, len(prompt), cache)):
            # Greedy decoding gives the answer if each of its tokens is the greedy choice after those before it.
            right[index] += score.predicted[len(prompt) - 1 :].tolist() == answer
            hits[index] += score.hits[:, first:].sum(1)
    rates = _shares(hits, counted)
    return [Quality(count / len(task.texts), layers) for count, layers in zip(right, rates, strict=True)]


def _agreement(engine: Engine, task: Task, thresholds: Sequence[Sequence[float]], cache: CacheSetting) -> list[Quality]:
    """Return the share of the answers' tokens that are the greedy choice after the same tokens before them.

    Details: the share of tokens before the first difference, which are those that greedy decoding under speculation has
    in common with the answer, and the share of answers without a difference.
    """
    assert task.answers is not None
    first_lossy = first_lossy_position(engine.config.speculation.chunk_size)
    tokens = sum(map(len, task.answers))
    counted = 0
    equal, common, whole = ([0] * len(thresholds) for _ in range(3))
    hits = torch.zeros(len(thresholds), engine.model_config.num_layers)
    for prompt, answer in zip(task.texts, task.answers, strict=True):
        # The last token of an answer chooses nothing: its verdicts are not counted.
        first, last = max(len(prompt), first_lossy), len(prompt + answer) - 1
        counted += max(last - first, 0)
        for index, score in enumerate(_scores(engine, prompt + answer, thresholds, len(prompt), cache)):
            same = score.predicted[len(prompt) - 1 :] == torch.tensor(answer)
            equal[index] += int(same.sum())
            common[index] += int(same.long().cumprod(0).sum())
            whole[index] += bool(same.all())
            hits[index] += score.hits[:, first:last].sum(1)
    details = [
        {"share before the first difference": before / tokens, "share of whole answers": each / len(task.texts)}
        for before, each in zip(common, whole, strict=True)
    ]
    rates = _shares(hits, counted)
    return [Quality(count / tokens, rate, more) for count, rate, more in zip(equal, rates, details, strict=True)]


def _shares(hits: torch.Tensor, counted: int) -> list[list[float] | None]:
    """Hit rates of each lambda and layer over the counted positions; None for each lambda if there are none."""
    if not counted:
        return [None] * len(hits)
    rates: list[list[float] | None] = (hits / counted).tolist()
    return rates


def _scores(
    engine: Engine, ids: list[int], thresholds: Sequence[Sequence[float]], prompt_tokens: int, cache: CacheSetting
) -> list[TextScore]:
    assert engine.transport is not None
    chunk_size = engine.config.speculation.chunk_size
    return score_under(engine.model, engine.transport, ids, thresholds, chunk_size, prompt_tokens, cache)
