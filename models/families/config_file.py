"""Values of a config.json with its family's defaults, and errors that name file and key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alspec.errors import UserError, show

__all__ = ["ConfigFile"]


@dataclass(frozen=True)
class ConfigFile:
    """Content of a config.json. Where a key is absent, its default is used; an explicit null stays null."""

    path: Path
    raw: dict[str, Any]

    def with_defaults(self, defaults: dict[str, Any]) -> ConfigFile:
        """Return the same file with a family's defaults."""
        return ConfigFile(self.path, defaults | self.raw)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, or `default` if it is absent."""
        return self.raw.get(name, default)

    def whole(self, name: str, default: int | None) -> Any:
        """The value of a key that holds a whole number, such as 512 or 512.0; `default` if it is null or absent."""
        value = self.raw.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """The value of a key that holds true or false; `default` if it is null or absent."""
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self.error(name, "true or false", value, "correct the file")
        return default if value is None else value

    def error(self, name: str, expected: str, found: Any, advice: str) -> UserError:
        """The error of a wrong value."""
        return UserError(f"{self.path}: {name}: expected {expected}, found {show(found)}; {advice}")
