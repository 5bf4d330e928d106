"""A conversation on the terminal: `python launch/chat.py --model DIR`, or with torchrun."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import json
import sys
from typing import Any

from alspec.config import ChatConfig, SamplingConfig
from alspec.errors import DoesNotFitError, UserError
from alspec.launch.terminal.conversation import HELP, Conversation
from alspec.launch.terminal.display import (
    Printer,
    StatusLine,
    color_without_effect,
    print_turn,
    shows_color,
    use_utf8,
    why_no_hit_rate,
)
from alspec.launch.terminal.flags import (
    Parser,
    cuts_without_effect,
    notify,
    parse_command,
    speculation_without_effect,
)
from alspec.launch.terminal.output import exit_code, has_reader
from alspec.launch.terminal.user_input import UserInput
from alspec.models.checkpoint.source import model_name
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.guard import guarded
from alspec.runtime.profiling.stats import summarize

__all__ = ["main"]

OUT_OF_MEMORY = "Use more ranks, or a lower --max-context"
CHECK_S = 0.1  # ranks agree so often whether the user stops the answer
MOST_TOKENS = 64  # from one such agreement to the next


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="chat", description="Talk to a model with a chat template.", epilog=" ".join(HELP.split()))
    with exit_code(argv) as outcome:
        config, _ = parse_command(parser, ChatConfig, argv, outcome)
        if config.n > 1 or config.logprobs is not None:
            raise UserError("flags: --answers, --logprobs: a conversation shows one answer, its text; leave them out")
        use_utf8()
        engine = Engine(config)
        engine.check_sampling(config)
        is_first = engine.placement.rank == 0
        tokenizer = _tokenizer(engine)
        conversation = Conversation(config.system, tokenizer.apply_chat_template)
        with guarded(engine.heartbeat, OUT_OF_MEMORY), StatusLine(is_first) as status:
            _load(config, engine, status)
            if is_first:
                with UserInput(is_alone=engine.placement.world_size == 1) as user:
                    _Chat(config, engine, tokenizer, conversation, user, status).run()
            else:
                _follow(config, engine)
            engine.close()
    return outcome.code


def _tokenizer(engine: Engine) -> Tokenizer:
    tokenizer = engine.text_tokenizer("give --model", "chat")
    if not tokenizer.has_chat_template:
        raise UserError(
            f"chat: {model_name(engine.config)} has no chat template; use an instruction-tuned model, or "
            "launch/generate.py to continue a text"
        )
    return tokenizer


def _load(config: ChatConfig, engine: Engine, status: StatusLine) -> None:
    """Load the model, with a cache for as long a conversation as the model's positions or the memory allow."""
    status.show("loading weights")
    notices = []
    try:
        engine.load(1, engine.max_total_tokens, for_turns=True)
    except DoesNotFitError as error:
        if config.max_context is not None or error.largest_context is None:
            raise
        largest = min(map(int, engine.agreement.exchange(str(error.largest_context))))
        engine.load(1, largest, for_turns=True)
        notices.append(f"a conversation can have {largest} of {engine.max_total_tokens} tokens: more do not fit")
    status.clear()
    if engine.placement.rank == 0:
        advice = "use --speculation simulated, or paired on two ranks"
        ignored = speculation_without_effect(config, engine.mode != "off", advice)
        ignored += color_without_effect(engine.mode != "off" or config.draft != "off") if config.color else []
        notify([*engine.take_notices(), *notices, *cuts_without_effect(config), *ignored])


class _Chat:
    """Rank 0's part: it reads, encodes and prints. The other ranks get token ids (`_follow`)."""

    def __init__(
        self,
        config: ChatConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        conversation: Conversation,
        user: UserInput,
        status: StatusLine,
    ) -> None:
        self._config, self._engine, self._tokenizer = config, engine, tokenizer
        self._conversation, self._user, self._status = conversation, user, status
        self._has_explained_hits = False

    def run(self) -> None:
        """Answer the user's lines until the user leaves."""
        if self._user.is_terminal:
            print(f"{model_name(self._engine.config)}: /help lists commands", file=sys.stderr)
        while has_reader():
            try:
                line = self._user.read()
                if line is None:
                    break
                reply = self._conversation.obey(line)
                if self._conversation.has_ended:
                    break
                if reply is None:
                    self._answer(line)
                else:
                    print(reply, file=sys.stderr)
            except UserError as error:
                notify([str(error)])
        self._engine.agreement.broadcast(json.dumps(None))

    def _answer(self, text: str) -> None:
        engine, limit = self._engine, self._engine.cache.max_context
        ids = self._tokenizer.encode_chat(self._conversation.with_user(text), limit)
        room = limit - len(ids)
        if room < 1:
            can_grow = limit < engine.model_config.longest_context
            advice = "shorten it or raise --max-context" if can_grow else "shorten it"
            advice = "/reset begins a new one" if self._conversation.has_turns else advice
            raise UserError(
                f"the conversation has {len(ids)} tokens with this message, and {limit} is the most; {advice}"
            )
        sampling = _sampling(self._config, room)
        engine.agreement.broadcast(json.dumps([ids, sampling.max_new_tokens]))
        printer = Printer([{}], is_batch=False, color=self._config.color and shows_color())
        engine.heartbeat.end_output = self._end_output(printer)
        stop, has_begun, is_stopped = _Stop(engine), False, False
        tokens = engine.stream(ids, sampling, progress=self._status.show_prompt_progress(len(ids)))
        with self._user.answering():
            try:
                for token in tokens:
                    if not has_begun:
                        has_begun = True
                        self._user.has_first_token()
                        self._status.clear()
                    printer.show(token)
                    if token.finish_reason is None and stop.is_due() and stop.agree(self._user.stops()):
                        is_stopped = True
                        break
            except KeyboardInterrupt:
                if has_begun or not self._user.is_terminal or self._user.presses > 1:
                    raise
                is_stopped = True
            finally:
                tokens.close()
        if not has_begun:
            self._status.clear()
            notify(["stopped before the first token; the message is dropped"])
            return
        printer.close()
        (request,) = engine.generation.requests
        self._conversation.add(text, request.text)
        reason = (
            "no more tokens fit" if sampling.max_new_tokens == room else f"--max-new-tokens {sampling.max_new_tokens}"
        )
        note = "stopped" if is_stopped else f"cut: {reason}" if request.finish_reason == "length" else None
        summary = summarize(engine.generation, engine.config.speculation.first_lossy_length)
        print_turn(summary, note)
        self._explain_hits(summary)

    def _explain_hits(self, summary: dict[str, Any]) -> None:
        """Say once why a turn of a speculating mode has no hit rate."""
        is_judged = self._engine.mode != "off" and summary["tokens_per_s"] is not None and not summary["alone_steps"]
        if is_judged and summary["hit_rate"] is None and not self._has_explained_hits:
            self._has_explained_hits = True
            notify([f"no hit rate: {why_no_hit_rate(summary['first_lossy_length'])}"])

    def _end_output(self, printer: Printer) -> Any:
        def end() -> None:
            self._user.restore_terminal()
            printer.end_line()

        return end


def _follow(config: ChatConfig, engine: Engine) -> None:
    """What the ranks behind rank 0 do: generate what it generates."""
    while (turn := json.loads(engine.agreement.broadcast(None, is_patient=True))) is not None:
        ids, room = turn
        stop = _Stop(engine)
        for token in engine.stream(ids, _sampling(config, room)):
            if token.finish_reason is None and stop.is_due() and stop.agree(None):
                break


def _sampling(config: ChatConfig, room: int) -> SamplingConfig:
    """The settings of an answer for which `room` tokens are left."""
    values = {name: getattr(config, name) for name in SamplingConfig.model_fields}
    return SamplingConfig(**values | {"max_new_tokens": min(config.max_new_tokens, room)})


class _Stop:
    """All ranks stop an answer at the same token: after the first, then every `CHECK_S`, they hear from rank 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._left = 1  # tokens until the ranks agree

    def is_due(self) -> bool:
        """Count a token; True if the ranks agree after it."""
        self._left -= 1
        return self._left <= 0

    def agree(self, stops: bool | None) -> bool:
        """Whether the answer ends here, on every rank.

        Args:
            stops: rank 0 decides; the others pass None.
        """
        message = None if stops is None else json.dumps([stops, self._tokens_ahead()])
        agreed, self._left = json.loads(self._engine.agreement.broadcast(message))
        return bool(agreed)

    def _tokens_ahead(self) -> int:
        """Tokens in `CHECK_S`; with one rank 1, because nothing is exchanged."""
        generation = self._engine.generation
        if self._engine.placement.world_size == 1 or not generation.step_us:
            return 1
        tokens_per_us = sum(generation.tokens_of_steps) / sum(generation.step_us)
        return max(1, min(MOST_TOKENS, round(CHECK_S * 1e6 * tokens_per_us)))


if __name__ == "__main__":
    sys.exit(main())
