"""Run tasks of lm-eval: `python launch/lm_eval_model.py --model alspec --model_args model=DIR --tasks hellaswag`.

The arguments are lm-eval's own command line. Every request is answered as lm-eval's own `HFLM` answers it on the same
folder, in fp32 with the same numbers: token ids, what is cut, settings of generation, ends of answers.

`model_args` are fields of `EngineConfig`, `threshold` (lambda, by default 0: full attention), `chunk` (S), and these of
`HFLM`: `add_bos_token`, `prefix_token_id`, `chat_template_args`, `enable_thinking`, `think_end_token`, and its names of
`dtype`. With a threshold above 0, likelihoods and answers are those of `simulated`: the context is read as a prompt,
the continuation is decoded. `kv_cache` and `softmax` name the cache that likelihoods read. Tasks that generate need
kv_cache bf16, softmax exact.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, cast

import torch

from alspec.config import SHORT_DTYPES, EngineConfig, SamplingConfig, nearest_name, validate
from alspec.errors import AlspecError, UserError, report, show
from alspec.models.checkpoint.source import model_path
from alspec.models.generation_config import NEUTRAL_VALUES, notice_of_settings, read_generation_config
from alspec.models.tokenizer.end_tokens import advised_eos_token_ids
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.runtime.decode.decode_step import WARM_UP_TOKENS
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.quality import score_text
from alspec.runtime.eval.teacher_forced import CODECS, SOFTMAXES, CacheSetting
from alspec.sas import Softmax

__all__ = [
    "TaskTokenizer",
    "cache_setting",
    "check_arguments",
    "generate_ids",
    "generation_defaults",
    "loglikelihood",
    "main",
    "max_length",
    "model_class",
    "open_engine",
    "sampling_config",
    "with_end_tokens",
]

_LOG = logging.getLogger(__name__)
PLAIN = CacheSetting()
MAX_GEN_TOKS = 256  # of tasks that set no limit, as HFLM
# transformers reads these only where it samples. The last ones are refused.
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_NO_EFFECT = ("use_cache", "early_stopping", "length_penalty", "diversity_penalty")  # on the tokens of one beam
_NEUTRAL = NEUTRAL_VALUES | {
    "max_new_tokens": None, "top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
_TRANSFORMERS_DEFAULTS = {"top_k": 50}  # of settings that neither the task nor the folder has
_OWN_FIELDS = ("max_new_tokens", "stop", "n", "logprobs")  # of SamplingConfig, which a task cannot set by these names
_HFLM_NAMES = {"pretrained": "model", "max_length": "max_context", "tokenizer": "model", "gguf_file": "model"}
_CHAT_TAG = "\ue000"  # a private character that marks the end of a message that is to be continued


class TaskTokenizer:
    """Texts of tasks to token ids and back, as lm-eval's `HFLM` does it.

    Args:
        tokenizer: of the model.
        add_bos_token: whether texts begin with BOS; None: as the tokenizer's files say.
        prefix_token_id: stands for an empty context; None: BOS, or EOS if the tokenizer has no BOS.
    """

    def __init__(
        self, tokenizer: Tokenizer, add_bos_token: bool | None = None, prefix_token_id: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._prefix = tokenizer.prefix_token_id if prefix_token_id is None else prefix_token_id
        self._bos_text = tokenizer.named_token("bos_token")
        bos = None if self._bos_text is None else tokenizer.core.token_to_id(self._bos_text)
        named = [bos] if add_bos_token and bos is not None else []
        self._begin = tokenizer.encode("") if add_bos_token is None else named

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context.

        Raises:
            UserError: the tokenizer has neither BOS nor EOS.
        """
        if self._prefix is None:
            raise UserError("lm-eval: an empty context needs a BOS or EOS token, which this tokenizer does not have")
        return self._prefix

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids of a text of a likelihood request. A text that begins with the prefix token is left as it is."""
        has_prefix = self._prefix is not None and text.startswith(self._spelled([self._prefix]))
        adds = not has_prefix if add_special_tokens is None else add_special_tokens
        return self._ids(text, adds)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to continue. A text that begins with BOS is left as it is."""
        return self._ids(text, self._bos_text is None or not text.startswith(self._bos_text)) or [self.prefix_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids alone, without special tokens."""
        return self._tokenizer.decode(ids)

    def ends(self, until: Sequence[str]) -> list[tuple[str, int]]:
        """Each text that ends an answer, and the number of last tokens in which it is looked for."""
        return [(text, len(self._ids(text, False)) + 2) for text in until]

    def has_end(self, ids: list[int], ends: list[tuple[str, int]]) -> bool:
        """Whether the last tokens contain one of `ends`, special tokens included."""
        return any(text in self._spelled(ids[-span:]) for text, span in ends)

    def continued_chat(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The chat up to the end of the last message's text, so that the answer goes on with it.

        Raises:
            UserError: the template changes the message; or as `Tokenizer.apply_chat_template`.
        """
        last = messages[-1] | {"content": messages[-1]["content"] + _CHAT_TAG + " "}
        text = self._tokenizer.apply_chat_template([*messages[:-1], last], None, False, variables)
        before, tag, after = text.rpartition(_CHAT_TAG)
        if not tag:
            raise UserError("lm-eval: chat template: expected the last message in the prompt, found none; it is cut")
        # A template that trims messages trims this one, too.
        return before if after.startswith(" ") else before.rstrip()

    def _ids(self, text: str, adds_begin: bool) -> list[int]:
        ids = self._tokenizer.encode(text, add_bos=False, where="lm-eval")
        return [*self._begin, *ids] if adds_begin else ids

    def _spelled(self, ids: list[int]) -> str:
        return str(self._tokenizer.core.decode(ids, skip_special_tokens=False))


def open_engine(threshold: float = 0.0, chunk: int = 128, **options: Any) -> Engine:
    """Load an engine: `off` if threshold is 0, else `simulated`. Options are fields of `EngineConfig`.

    Raises:
        UserError: an option that does not exist, has a wrong value, or is `speculation`.
    """
    if "speculation" in options:
        raise UserError("lm-eval: speculation: leave it out; threshold 0 is full attention, more is simulated")
    mode = "simulated" if threshold else "off"
    engine = Engine.from_pretrained(speculation={"mode": mode, "threshold": threshold, "chunk_size": chunk}, **options)
    applied = None if engine.checkpoint is None else notice_of_settings(model_path(engine.config))
    for notice in engine.take_notices():
        if notice != applied:  # `generation_defaults` applies or refuses these settings
            _LOG.warning(notice)
    # Likelihoods read no cache. `generate_ids` allocates what its texts need.
    engine.load(1, min(WARM_UP_TOKENS, engine.max_total_tokens))
    return engine


def check_arguments(options: dict[str, Any]) -> None:
    """Refuse arguments that do not exist.

    Raises:
        UserError: names it, and what may be meant.
    """
    own = ["threshold", "chunk", "softmax", "add_bos_token", "prefix_token_id", "chat_template_args", "enable_thinking"]
    known = [*(name for name in EngineConfig.model_fields if name != "speculation"), *own, "think_end_token"]
    for name in options:
        if name not in known and name != "speculation":
            meant = _HFLM_NAMES.get(name) or nearest_name(name, known)
            advice = f"use {meant}" if meant else "leave it out"
            raise UserError(f"lm-eval: {name}: no such argument; {advice} (known are {', '.join(sorted(known))})")


def max_length(engine: Engine) -> int:
    """The most tokens that the model reads: `max_context`, else its positions, without what RoPE scaling adds."""
    return engine.config.max_context or engine.model_config.max_position_embeddings


def cache_setting(kv_cache: str, softmax: str) -> CacheSetting:
    """The cache over which likelihoods are computed.

    Raises:
        UserError: an unknown name.
    """
    if kv_cache not in CODECS or softmax not in SOFTMAXES:
        known = f"kv_cache {', '.join(CODECS)} and softmax {', '.join(SOFTMAXES)}"
        raise UserError(f"lm-eval: expected {known}, found {kv_cache!r} and {softmax!r}")
    return CacheSetting(kv_cache, cast(Softmax, softmax))


def loglikelihood(
    engine: Engine, context: list[int], continuation: list[int], cache: CacheSetting = PLAIN
) -> tuple[float, bool]:
    """Log-likelihood of `continuation` after `context`, in nats, and whether greedy decoding gives it.

    A context beyond `max_length` loses its beginning, with a warning. The last token is predicted, not read.

    Args:
        context, continuation: token ids, one at least.
    Raises:
        UserError: no ids, or a continuation that is longer than what the model reads.
    """
    limit, count = max_length(engine), len(continuation)
    if not context or not continuation:
        raise UserError("lm-eval: expected a context and a continuation that adds tokens, found none")
    if count > limit:
        raise UserError(f"lm-eval: a continuation of {count} tokens; expected {limit} at most")
    dropped = len(context) + count - (limit + 1)
    if dropped > 0:
        _LOG.warning(
            f"context of {len(context)} and continuation of {count} tokens exceed {limit} tokens: "
            f"truncating {dropped} tokens from the left"
        )
    ids = [*context, *continuation][-(limit + 1) :]
    start = len(ids) - count
    # A single token stands for an empty context: no prompt whose scales a quantised cache could use.
    prompt_tokens = start if start > 1 else 0
    speculation = engine.config.speculation
    score = score_text(
        engine.model, engine.connected(), ids, speculation.threshold, speculation.chunk_size, prompt_tokens, cache
    )
    answer = torch.tensor(continuation)
    return -float(score.nll[start - 1 :].double().sum()), torch.equal(score.predicted[start - 1 :], answer)


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Settings that hold for tasks which do not set them: transformers' own, then those of generation_config.json."""
    given = read_generation_config(folder) if folder.is_dir() else {}
    names = {*_SAMPLING_ONLY[1:], *_NEUTRAL}  # lm-eval always sets the temperature
    return _TRANSFORMERS_DEFAULTS | {name: given[name] for name in names if given.get(name) is not None}


def sampling_config(
    settings: dict[str, Any], defaults: dict[str, Any], max_new_tokens: int, seed: int = 0
) -> SamplingConfig:
    """How the next token is chosen, for settings of a task.

    Args:
        settings: normalised by lm-eval, without `until` and limits of length.
        defaults: of settings that the task does not have (`generation_defaults`).
        max_new_tokens: the most tokens of the answer.
        seed: of the random numbers.
    Raises:
        UserError: a setting that `SamplingConfig` does not have and that would change the answer; a wrong value.
    """
    values = defaults | settings
    if not values.pop("do_sample", False):
        values = {name: value for name, value in values.items() if name not in _SAMPLING_ONLY}
    elif not values.get("temperature"):
        raise UserError("lm-eval: temperature: expected more than 0 with do_sample, found 0 or none")
    elif values.get("min_p") and (values.get("top_p") or 1.0) < 1.0:
        raise UserError("lm-eval: min_p with top_p: transformers cuts by top_p first, here min_p does; leave one out")
    if values.get("top_k", 0) is None or values.get("top_k", 0) < 0:
        del values["top_k"]
    values = {name: value for name, value in values.items() if not _is_neutral(name, value)}
    known = [name for name in SamplingConfig.model_fields if name not in _OWN_FIELDS]
    for name in values:
        if name not in known:
            raise UserError(
                f"lm-eval: {name}: {show(values[name], 40)} cannot be applied; known are do_sample, {', '.join(known)}"
            )
    return validate(SamplingConfig, {"seed": seed, **values, "max_new_tokens": max_new_tokens}, "lm-eval")


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a setting has no effect on the tokens."""
    return name in _NO_EFFECT or (name in _NEUTRAL and value in (None, _NEUTRAL[name]))


def with_end_tokens(sampling: SamplingConfig, end_ids: Sequence[int]) -> SamplingConfig:
    """The settings, with an answer that ends at these tokens and no others, but those that the settings name."""
    if sampling.ignore_eos:
        return sampling
    stop_ids = tuple(sorted({*end_ids, *(sampling.stop_ids or ())}))
    return sampling.model_copy(update={"ignore_eos": True, "stop_ids": stop_ids})


def generate_ids(
    engine: Engine,
    tokenizer: TaskTokenizer,
    prompt_ids: list[int],
    sampling: SamplingConfig,
    until: Sequence[str] = (),
) -> list[int]:
    """Ids of the answer, up to the token that completes a text of `until`, or an end token, or `max_new_tokens`.

    A prompt that leaves no room for `max_new_tokens` loses its beginning, with a warning.

    Raises:
        UserError: `max_new_tokens` leaves no room for a prompt.
    """
    limit = max_length(engine)
    room = limit - sampling.max_new_tokens
    if room < 1:
        raise UserError(f"max_gen_toks: {sampling.max_new_tokens} leaves no room in {limit} tokens")
    if len(prompt_ids) > room:
        _LOG.warning(f"prompt of {len(prompt_ids)} tokens: truncating it to its last {room} tokens")
    ids: list[int] = []
    ends = tokenizer.ends(until)
    for token in engine.stream([prompt_ids[-room:]], sampling):
        ids.append(token.token_id)
        if tokenizer.has_end(ids, ends):
            break
    return ids


def main() -> int:
    """Run lm-eval's command line with the model `alspec` added. Returns the exit code."""
    # As a script, this folder comes first on the path, and its evaluate.py would hide a package that lm-eval imports.
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
    try:
        model = model_class()
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

        register_model("alspec")(model)

        if os.environ.get("RANK", "0") == "0":
            cli_evaluate()
        else:  # ranks compute the same; the first one reports
            sys.argv[1:] = _without_reports(sys.argv[1:])
            os.environ["LMEVAL_LOG_LEVEL"] = "ERROR"
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
                cli_evaluate()
    except AlspecError as error:
        return report(error)
    return 0


def _without_reports(argv: Sequence[str]) -> list[str]:
    """Arguments of lm-eval without those that write files of results."""
    kept: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument in ("--output_path", "-o"):
            next(rest, None)
        elif not argument.startswith(("--output_path=", "--log_samples")):
            kept.append(argument)
    return kept


def model_class() -> Any:
    """The class of models that lm-eval can use; it is defined here because lm-eval is optional.

    Raises:
        UserError: lm-eval cannot be imported.
    """
    try:
        from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
        from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
            handle_stop_sequences,
            normalize_gen_kwargs,
            postprocess_generated_text,
        )
        from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
            get_rolling_token_windows,
            make_disjoint_window,
        )
        from tqdm import tqdm  # type: ignore[import-untyped] # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"lm-eval cannot be imported ({error}); pip install -e '.[lm-eval]'") from None

    class AlspecLM(TemplateLM):  # type: ignore[misc]
        """Serves one request after another. lm-eval's batch size and device have no effect."""

        def __init__(
            self,
            batch_size: Any = 1,
            max_batch_size: Any = None,
            device: Any = None,
            kv_cache: str = "bf16",
            softmax: str = "exact",
            add_bos_token: bool | None = None,
            prefix_token_id: int | None = None,
            chat_template_args: dict[str, Any] | None = None,
            enable_thinking: bool | None = None,
            think_end_token: str | int | None = None,
            **options: Any,
        ) -> None:
            super().__init__()
            check_arguments(options)
            dtype = options.pop("dtype", "auto")
            if dtype != "auto":
                options["dtype"] = SHORT_DTYPES.get(dtype, dtype)
            self.cache = cache_setting(kv_cache, softmax)
            self.engine = open_engine(**options)
            self.tokenizer = self.engine.text_tokenizer("give a model folder", "lm-eval")
            self.texts = TaskTokenizer(self.tokenizer, add_bos_token, prefix_token_id)
            path = model_path(self.engine.config)
            self.defaults = generation_defaults(path)
            own = self.engine.model_config.eos_token_ids
            self.end_ids = advised_eos_token_ids(path) if path.is_dir() else own
            thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
            self.template_variables = (chat_template_args or {}) | thinking
            self.think_end_token = think_end_token

        @property
        def eot_token_id(self) -> int | None:
            token = self.tokenizer.named_token("eos_token")
            return None if token is None else self.tokenizer.core.token_to_id(token)

        @property
        def prefix_token_id(self) -> int:
            return self.texts.prefix_token_id

        @property
        def max_length(self) -> int:
            return max_length(self.engine)

        @property
        def max_gen_toks(self) -> int:
            return MAX_GEN_TOKS

        @property
        def tokenizer_name(self) -> str:
            return str(model_path(self.engine.config)).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return self.texts.encode(string, add_special_tokens)

        def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
            def render(messages: list[dict[str, Any]]) -> str:
                if not add_generation_prompt:
                    return self.texts.continued_chat(messages, self.template_variables)
                return self.tokenizer.apply_chat_template(messages, variables=self.template_variables)

            try:
                return render(chat_history)
            except UserError as error:
                others = [message for message in chat_history if message["role"] != "system"]
                if len(others) == len(chat_history):
                    raise
                _LOG.warning(f"{error}; leaving out the system message")
                return render(others)

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            answers = []
            for texts, context, continuation in tqdm(requests, "loglikelihood", disable=disable_tqdm):
                answers.append(loglikelihood(self.engine, context, continuation, self.cache))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
            return answers

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in tqdm(requests, "loglikelihood_rolling", disable=disable_tqdm):
                ids = self.tok_encode(request.args[0])
                windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
                pairs = [(None, *make_disjoint_window(window)) for window in windows]
                totals.append(sum(nats for nats, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            if self.cache != PLAIN:
                raise UserError("lm-eval: tasks that generate decode from kv_cache bf16 with softmax exact only")
            # The longest first, so that memory is allocated once.
            order = sorted(range(len(requests)), key=lambda index: len(requests[index].args[0]), reverse=True)
            times: Counter[str] = Counter()  # a repeated request is sampled with another seed
            answers = {}
            for index in tqdm(order, "generate_until", disable=disable_tqdm):
                context, settings = requests[index].args
                answers[index] = self._answer(context, settings, times[context])
                times[context] += 1
                self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
            return [answers[index] for index in range(len(requests))]

        def _answer(self, context: str, settings: dict[str, Any], seed: int) -> str:
            values = normalize_gen_kwargs(settings, self.max_gen_toks)
            until = handle_stop_sequences(values.pop("until"), self.tokenizer.named_token("eos_token"))
            count = values.pop("max_gen_toks")
            prompt_ids = self.texts.encode_prompt(context)
            sampling = with_end_tokens(sampling_config(values, self.defaults, count, seed), self.end_ids)
            ids = generate_ids(self.engine, self.texts, prompt_ids, sampling, until)
            text, end = self.texts.decode(ids), self.think_end_token
            if end is not None and str(end).isdecimal():
                last = max((at for at, token_id in enumerate(ids) if token_id == int(end)), default=-1)
                text = self.texts.decode(ids[last + 1 :]).lstrip()
                end = None
            return str(postprocess_generated_text(text, until, end))

    return AlspecLM


if __name__ == "__main__":
    sys.exit(main())
