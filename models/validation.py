"""Frozen pydantic models of configuration files, and the one line that names their first fault."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from alspec.errors import UserError, show

__all__ = ["Frozen", "user_error"]


class Frozen(BaseModel):
    """Base of settings that never change; unknown fields and values of another type are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def user_error(error: ValidationError, where: str, names: Mapping[str, str]) -> UserError:
    """UserError for the first fault of a validation.

    Args:
        where: file, and object in it.  names: the file's spelling of our field names, where it differs.
    """
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return UserError(f"{where}: {message}; correct the file or download it again")
    field = str(first["loc"][0])
    message = message[0].lower() + message[1:]
    return UserError(f"{where}: {names.get(field, field)}: {message}, found {show(first['input'])}; correct the file")
