"""Configuration files: safe YAML with the booleans and integers of YAML 1.2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.error import MarkedYAMLError

from alspec.errors import UserError

__all__ = ["dump_yaml", "load_yaml"]

MAX_INT_CHARACTERS = 1000  # Python refuses to print integers of more than 4300 digits


class _Loader(yaml.SafeLoader):
    """Safe loader with the booleans and integers of YAML 1.2: `off` and `on` are strings, and 010 is ten.

    It refuses a key that appears twice in a mapping, and an integer too long to show in a message.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys; runs before merge keys (`<<`) are expanded."""
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
                names.add(key.value)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Parse a decimal integer, or an octal or hexadecimal one with the prefix 0o or 0x."""
        if not _INT_PATTERN.match(node.value):  # possible with an explicit tag !!int
            raise MarkedYAMLError(
                problem=f"expected an integer, found {node.value!r:.80}", problem_mark=node.start_mark
            )
        if len(node.value) > MAX_INT_CHARACTERS:
            raise MarkedYAMLError(problem="expected a smaller integer", problem_mark=node.start_mark)
        return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `_Loader`, or a YAML 1.1 reader, would read as another type."""


_BOOL, _INT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int"
_INT_PATTERN = re.compile("(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _INT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
for _yaml_class in (_Loader, _Dumper):
    _yaml_class.add_implicit_resolver(_INT, _INT_PATTERN, list("-+0123456789"))
_Loader.add_constructor(_INT, _Loader.construct_yaml_int)


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file: a YAML mapping of field names.

    Raises:
        UserError: unreadable file, broken YAML, a duplicate key, or anything that is not a mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"config: cannot read {path}: {error.strerror}; give an existing YAML file") from None
    except RecursionError:
        raise UserError(f"config: {path} is not YAML: nested too deeply") from None
    # The constructors of values raise the built-in exceptions, for example for the date 2026-13-01.
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise UserError(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"config: {path}: expected a mapping of field names, found {type(values).__name__}")
    return values


def dump_yaml(values: dict[str, Any]) -> str:
    """Write YAML that `load_yaml` reads back; keeps the order of `values`."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False))
