"""Parse the command line into a configuration; end an error as one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib.util
import itertools
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from alspec.config import (
    PROMPTS,
    ChoiceConfig,
    CommandConfig,
    EngineConfig,
    SpeculationConfig,
    fits,
    nearest_name,
    validate,
)
from alspec.errors import UserError
from alspec.launch.terminal.output import Finished, Outcome, is_dash, is_special, target_of
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.distributed.failed_start import publish_failed_command
from alspec.runtime.distributed.placement import Placement
from alspec.yaml_file import dump_yaml, load_yaml

__all__ = [
    "Parser",
    "check_distinct",
    "check_picture",
    "check_positions",
    "check_writable",
    "cuts_without_effect",
    "speculation_without_effect",
    "notify",
    "parse",
    "parse_command",
    "print_config",
]

_ConfigT = TypeVar("_ConfigT", bound=BaseModel)
_CommandT = TypeVar("_CommandT", bound=CommandConfig)
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
SLIP = 0.8  # similarity (difflib) from which on a word counts as a misspelt flag
WRITTEN = ("json_file", "trace", "rows", "plot")  # fields of the files that commands write


class Parser(argparse.ArgumentParser):
    """argparse without shortened flags. An error raises `UserError` and names the nearest flag, if one is similar."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, which by itself takes a value that begins with a dash only in one word: `--prompt=-x`."""
        return super().parse_known_args(self._joined(sys.argv[1:] if args is None else args), namespace)

    def _joined(self, words: Sequence[str]) -> list[str]:
        """Join each flag that takes a value with a next word that begins with a dash and is no flag."""
        flags = {flag: action for action in self._actions for flag in action.option_strings}
        joined: list[str] = []
        for word in words:
            action = flags.get(joined[-1]) if joined else None
            takes_value = action is not None and action.nargs is None
            is_flag = word.split("=")[0] in flags or _is_misspelt(word, flags)
            if takes_value and word[:1] == "-" and len(word) > 1 and not is_flag:
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        known = [flag for action in self._actions for flag in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if unknown and unknown[0].startswith("-") and "unrecognized" in message:
            name = unknown[0].split("=")[0]
            # A field's own name may differ from its flag: `n` is --answers.
            by_field = {
                action.dest.rpartition(".")[2]: action.option_strings[0]
                for action in self._actions if action.option_strings
            }  # fmt: skip
            nearest = by_field.get(name.lstrip("-").replace("-", "_")) or nearest_name(name, known)
            hint = "see --help" if nearest is None else f"the nearest valid name is {nearest}"
            message = f"unknown flag {unknown[0]}; {hint}"
        raise UserError(f"flags: {message}")


def _is_misspelt(word: str, flags: Iterable[str]) -> bool:
    """Return whether a word looks like a flag with a slip in it, so that the value before it seems to be missing."""
    return word.startswith("--") and bool(difflib.get_close_matches(word.split("=")[0], flags, 1, SLIP))


def _leaves(schema: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field of the schema, and of nested ones, with its path of keys."""
    for name, field in schema.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from _leaves(type(field.default), (*path, name))
        else:
            yield (*path, field.alias or name), field


def _flag(path: tuple[str, ...], field: FieldInfo) -> str:
    extra = field.json_schema_extra
    name = extra.get("flag", path[-1]) if isinstance(extra, dict) else path[-1]
    return "--" + str(name).replace("_", "-")


def _add_flags(parser: argparse.ArgumentParser, schema: type[BaseModel]) -> None:
    for path, field in _leaves(schema):
        is_nothing = field.default is None or field.default is False or field.default in ((), {})
        default = "" if is_nothing else f" (default: {_written(field.default)})"
        text = f"{field.description}{default}".replace("%", "%%")
        options: dict[str, Any] = {"dest": ".".join(path), "default": argparse.SUPPRESS, "help": text}
        if field.annotation is bool:
            options["action"] = "store_true"
        elif field.default == ():
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            extra = field.json_schema_extra
            own = extra.get("metavar") if isinstance(extra, dict) else None
            options["metavar"] = own or "|".join(_choices(field.annotation)) or path[-1].upper()
        parser.add_argument(_flag(path, field), **options)


def _written(default: Any) -> str:
    """Return the default value in the spelling of the flag."""
    if isinstance(default, tuple):
        return ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in default)
    return str(default)


def _choices(annotation: Any) -> list[str]:
    """The values of a Literal, also of an optional one; empty for other types and for lists."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) is tuple:
        return []
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def parse_command(
    parser: argparse.ArgumentParser, schema: type[_CommandT], argv: list[str] | None, outcome: Outcome
) -> tuple[_CommandT, argparse.Namespace]:
    """Parse a command line inside `exit_code`; with --print-config, print the configuration and end the command.

    Args:
        argv: arguments of the command line; None: those of this process.
    Returns:
        The configuration, and the namespace of `parse`. It also holds `command`, the command line of this run.
    Raises:
        UserError: as `parse`; two flags that name one file.
        Finished: the configuration was printed.
    """
    outcome.on_error = publish_failed_command
    words = sys.argv[1:] if argv is None else argv
    config, args = parse(parser, schema, words)
    outcome.is_debug = config.debug
    placement = Placement.from_environment()
    if args.print_config:
        # Under torchrun, only rank 0 prints.
        if placement.rank == 0:
            print_config(config)
        raise Finished
    check_distinct(config, args.config)
    args.command = torchrun(placement) + shlex.join([f"launch/{parser.prog}.py", *words])
    return config, args


def torchrun(placement: Placement) -> str:
    """The start of the command line of each host, if there is more than one rank; hosts have as many ranks each."""
    if placement.world_size == 1:
        return ""
    num_hosts = placement.world_size // placement.local_world_size
    hosts = f"--nnodes {num_hosts} " if num_hosts > 1 else ""
    return f"torchrun {hosts}--nproc-per-node {placement.local_world_size} "


def parse(
    parser: argparse.ArgumentParser, schema: type[_ConfigT], argv: list[str]
) -> tuple[_ConfigT, argparse.Namespace]:
    """Merge defaults, the `--config` file and flags into one validated configuration; the later ones win.

    Returns:
        The configuration, and the namespace with the other arguments of the parser.
    Raises:
        UserError: an unknown flag or key, a wrong value, or an unreadable file.
    """
    _add_flags(parser, schema)
    parser.add_argument("--config", type=Path, help="YAML file with the same names as --print-config shows")
    parser.add_argument("--print-config", action="store_true", help="print the configuration in force and exit")
    args = parser.parse_args(argv)
    values: dict[str, Any] = {}
    if args.config is not None:
        values = load_yaml(args.config)
        if fits(schema, values):  # otherwise a flag may still correct it
            validate(schema, values, f"config: {args.config}")
        if isinstance(values.get("speculation"), str):  # the mode alone: make room for other flags
            values["speculation"] = {"mode": values["speculation"]}
    flags = {path: _flag(path, field) for path, field in _leaves(schema)}
    given = {path: getattr(args, ".".join(path)) for path in flags if hasattr(args, ".".join(path))}
    if any((name,) in given for name in PROMPTS):  # a prompt flag replaces the prompt of the file
        values = {name: value for name, value in values.items() if name not in PROMPTS}
    from_flags: dict[str, Any] = {}
    sources = {"flags": from_flags, f"config: {args.config}": deepcopy(values)}
    for path, value in given.items():
        _set(values, path, value)
        _set(from_flags, path, value)
    culprits = [name for name, part in sources.items() if not fits(schema, part)]
    all_sources = " and ".join(culprits or (name for name, part in sources.items() if part))
    return validate(schema, values, "flags", lambda path: flags.get(path, ".".join(path)), all_sources), args


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def check_distinct(config: BaseModel, config_file: Path | None) -> None:
    """Refuse a file that two flags name if the command writes it: the content for the other flag would be lost.

    Raises:
        UserError: names both flags, and the file.
    """
    fields = type(config).model_fields.items()
    files = [(_flag((field.alias or name,), field), getattr(config, name), name in WRITTEN) for name, field in fields]
    files = [file for file in [*files, ("--config", config_file, False)] if isinstance(file[1], Path)]
    for (flag, path, writes), (other_flag, other, other_writes) in itertools.combinations(files, 2):
        is_shared = is_special(path) and not (is_dash(path) and writes and other_writes)
        if (writes or other_writes) and os.path.realpath(path) == os.path.realpath(other) and not is_shared:
            raise UserError(f"flags: {flag} and {other_flag} both name {path}; give each a file of its own")


def check_writable(name: str, path: Path | None) -> None:
    """Check before the run that its result can be written to `path`. Leaves no file behind.

    Raises:
        UserError: names the file.
    """
    if path is None or is_dash(path):
        return
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # Do not open a pipe: its reader would see it close and stop reading.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif path.exists():
            path.open("a").close()
        else:
            # Create another file in the folder: ranks that create and remove `path` itself would race.
            tempfile.TemporaryFile(dir=target_of(path).parent).close()
    except OSError as error:
        raise UserError(
            f"{name}: cannot write {path}: {error.strerror}; give a file in a folder that exists and is writable"
        ) from None


def check_positions(longest: int, model_config: LlamaConfig, steps: int = 0) -> None:
    """Refuse a context that does not fit into the model's positions, together with `steps` further tokens.

    Raises:
        UserError: names the context and the limit.
    """
    limit = model_config.longest_context
    if longest > limit:
        raise UserError(f"flags: --contexts: {longest} is beyond the model's {limit} positions")
    if longest + steps > limit:
        raise UserError(
            f"flags: --contexts: {longest} tokens and the {steps} steps after them are beyond the model's {limit} "
            "positions; lower --contexts or --steps"
        )


def notify(notices: Iterable[str]) -> None:
    """Print each notice as a line on stderr."""
    for notice in notices:
        print(f"alspec: {notice}", file=sys.stderr)


def cuts_without_effect(config: ChoiceConfig) -> list[str]:
    """Return notices: `--top-k`, `--top-p` and `--min-p` have no effect if sampling is greedy."""
    cuts = (("--top-k", config.top_k > 0), ("--top-p", config.top_p < 1.0), ("--min-p", config.min_p > 0.0))
    given = [flag for flag, is_given in cuts if is_given]
    if not given or config.temperature > 0.0:
        return []
    listed = " and ".join(filter(None, [", ".join(given[:-1]), given[-1]]))
    return [f"{listed} without effect: temperature 0 takes the most likely token"]


def speculation_without_effect(config: EngineConfig, speculates: bool, advice: str) -> list[str]:
    """Return notices: settings of speculation have no effect in mode off, nor blocks where the predictor recalls none.

    Args:
        speculates: the mode is not off.  advice: how to speculate.
    """
    default, own = SpeculationConfig(), config.speculation
    notices = []
    has_predictor = speculates or config.draft == "self"
    if has_predictor and own.predictor == "window" and own.recall_blocks != default.recall_blocks:
        notices.append("--recall-blocks without effect: --predictor window recalls no blocks")
    if speculates:
        return notices
    flags = {
        "threshold": "threshold",
        "chunk_size": "chunk",
        "predictor": "predictor",
        "recall_blocks": "recall-blocks",
        "always": "pair-always",
    }
    if config.draft == "self":  # whose drafts are made by the predictor
        flags = {name: flags[name] for name in ("threshold", "always")}
    given = [f"--{flag}" for name, flag in flags.items() if getattr(own, name) != getattr(default, name)]
    if given:
        advice += "" if config.draft == "off" else ", without --draft"
        notices.append(f"{' and '.join(given)} without effect: mode off does not speculate; {advice}")
    return notices


def check_picture(name: str, path: Path | None) -> None:
    """As `check_writable`, for a picture that matplotlib will write.

    Raises:
        UserError: matplotlib is missing, the file type is unknown, or the file cannot be written.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{name}: needs matplotlib; pip install -e '.[plot]'")
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise UserError(f"{name}: expected a file that ends in {', '.join(PICTURE_SUFFIXES)}, found {str(path)!r}")
    check_writable(name, path)


def print_config(config: BaseModel) -> None:
    """Print the configuration as YAML on stdout; `--config` reads it back."""
    print(dump_yaml(config.model_dump(mode="json", by_alias=True)), end="")
