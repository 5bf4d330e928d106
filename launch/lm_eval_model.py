"""Run tasks of lm-eval: `python launch/lm_eval_model.py --model alspec --model_args model=DIR --tasks hellaswag`.

The arguments are lm-eval's own command line. `model_args` are fields of `EngineConfig` and `threshold`. Likelihoods
come from the reference semantics over the cache that `kv_cache` and `softmax` name: the context is read as a prompt,
the continuation is decoded. Tasks that generate text need kv_cache bf16 with softmax exact.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, cast

import torch

from alspec.config import SamplingConfig, validate
from alspec.errors import AlspecError, UserError, report
from alspec.runtime.decode.eager_step import WARM_UP_TOKENS
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.quality import TextScore, score_text
from alspec.runtime.eval.teacher_forced import CODECS, SOFTMAXES, CacheSetting
from alspec.sas import Softmax

__all__ = ["cache_setting", "generate_until", "loglikelihood", "loglikelihood_rolling", "main", "open_engine"]

CHOICE = ("temperature", "top_p", "top_k")  # names in tasks and in SamplingConfig
# lm-eval's own default, for tasks that set no limit.
DEFAULT_NEW_TOKENS = 256
PLAIN = CacheSetting()


def open_engine(threshold: float = 0.1, **options: Any) -> Engine:
    """Load an engine of one rank that simulates speculation. Options are fields of `EngineConfig`."""
    engine = Engine.from_pretrained(speculation={"mode": "simulated", "threshold": threshold}, **options)
    # Likelihoods read no cache. `generate_until` allocates what its texts need.
    engine.load(1, min(WARM_UP_TOKENS, engine.max_total_tokens))
    return engine


def cache_setting(kv_cache: str, softmax: str) -> CacheSetting:
    """The cache over which likelihoods are computed.

    Raises:
        UserError: an unknown name.
    """
    if kv_cache not in CODECS or softmax not in SOFTMAXES:
        known = f"kv_cache {', '.join(CODECS)} and softmax {', '.join(SOFTMAXES)}"
        raise UserError(f"lm-eval: expected {known}, found {kv_cache!r} and {softmax!r}")
    return CacheSetting(kv_cache, cast(Softmax, softmax))


def loglikelihood(engine: Engine, context: str, continuation: str, cache: CacheSetting = PLAIN) -> tuple[float, bool]:
    """Log-likelihood of `continuation` after `context`, in nats, and whether greedy decoding gives it.

    As in lm-eval's own models: whitespace between the two belongs to the continuation; a context that is too long loses
    its beginning; an empty context becomes the BOS token, or EOS if the tokenizer has no BOS.
    """
    ids = _encode(engine, context + continuation)
    start = len(_encode(engine, context.rstrip()))
    if not start:
        prefix = _prefix(engine)
        ids, start = ids if ids[:1] == prefix else prefix + ids, 1
    if start >= len(ids):
        raise UserError(f"lm-eval: expected a continuation that adds tokens, found {continuation!r}")
    dropped = min(max(len(ids) - engine.max_total_tokens, 0), start - 1)
    ids, start = ids[dropped:], start - dropped
    score = _score(engine, ids, start, cache)
    answer = torch.tensor(ids[start:])
    return -float(score.nll[start - 1 :].double().sum()), torch.equal(score.predicted[start - 1 :], answer)


def loglikelihood_rolling(engine: Engine, text: str, cache: CacheSetting = PLAIN) -> float:
    """Log-likelihood of a whole text, in nats, over windows of the model's length.

    Each window begins as an empty context. Each token counts once.
    """
    prefix = _prefix(engine)
    ids = _encode(engine, text)[len(_encode(engine, "")) :]
    stride = engine.max_total_tokens - 1
    windows = [prefix + ids[start : start + stride] for start in range(0, len(ids), stride)]
    return -sum(float(_score(engine, ids, 0, cache).nll.double().sum()) for ids in windows)


def generate_until(engine: Engine, context: str, settings: dict[str, Any], seed: int = 0) -> str:
    """Generate text after `context`, up to one of the texts in `settings["until"]`.

    Raises:
        UserError: a wrong value of a setting.
    """
    until = settings.get("until") or []
    values: dict[str, Any] = {
        "max_new_tokens": int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS)),
        "stop": tuple(text for text in ([until] if isinstance(until, str) else until) if text),
        "seed": seed,
    }
    if settings.get("do_sample"):
        values |= {"temperature": 1.0} | {name: settings[name] for name in CHOICE if name in settings}
    sampling = validate(SamplingConfig, values, "lm-eval")
    room = engine.max_total_tokens - sampling.max_new_tokens
    if room < 1:
        raise UserError(f"max_gen_toks: {sampling.max_new_tokens} leaves no room in {engine.max_total_tokens} tokens")
    prompts = [_encode(engine, context)[-room:] or _prefix(engine)]
    return "".join(token.text for token in engine.stream(prompts, sampling))


def main() -> int:
    """Run lm-eval's command line with the model `alspec` added. Returns the exit code."""
    try:
        _register()
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

        cli_evaluate()
    except AlspecError as error:
        return report(error)
    return 0


def _register() -> None:
    try:
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
        from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"lm-eval cannot be imported ({error}); pip install -e '.[lm-eval]'") from None

    @register_model("alspec")
    class AlspecLM(LM):  # type: ignore[misc]
        """Serves one request after another. lm-eval's batch size and device have no effect."""

        def __init__(
            self,
            batch_size: Any = 1,
            max_batch_size: Any = None,
            device: Any = None,
            kv_cache: str = "bf16",
            softmax: str = "exact",
            **options: Any,
        ) -> None:
            super().__init__()
            self.cache = cache_setting(kv_cache, softmax)
            self.engine = open_engine(**options)

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [loglikelihood(self.engine, request.args[0], request.args[1], self.cache) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [loglikelihood_rolling(self.engine, request.args[0], self.cache) for request in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            if self.cache != PLAIN:
                raise UserError("lm-eval: tasks that generate decode from kv_cache bf16 with softmax exact only")
            # The longest first, so that memory is allocated once.
            order = sorted(range(len(requests)), key=lambda index: len(requests[index].args[0]), reverse=True)
            times: Counter[str] = Counter()  # a repeated request is sampled with another seed
            answers = {}
            for index in order:
                context, settings = requests[index].args
                answers[index] = generate_until(self.engine, context, settings, seed=times[context])
                times[context] += 1
            return [answers[index] for index in range(len(requests))]


def _encode(engine: Engine, text: str) -> list[int]:
    return engine.text_tokenizer("give a model folder", "lm-eval").encode(text)


def _prefix(engine: Engine) -> list[int]:
    """Return the tokens that stand for an empty context."""
    assert engine.tokenizer is not None
    token_id = engine.tokenizer.prefix_token_id
    if token_id is None:
        raise UserError("lm-eval: an empty context needs a BOS or EOS token, which this tokenizer does not have")
    return [token_id]


def _score(engine: Engine, ids: list[int], start: int, cache: CacheSetting) -> TextScore:
    assert engine.transport is not None
    speculation = engine.config.speculation
    return score_text(engine.model, engine.transport, ids, speculation.threshold, speculation.chunk_size, start, cache)


if __name__ == "__main__":
    sys.exit(main())
