"""Without a GPU, Triton kernels run in Triton's interpreter; this must be set before the first kernel is imported."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def patch_language_once() -> None:
    """Let a launch in the interpreter patch `triton.language` for its own call and not for each call of a function.

    Every function that a kernel calls would go through all names of the language, to find them patched already. That
    is half of the time of most kernels.
    """
    from triton import language
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # modules, by the launch under way

    @functools.cache
    def used(function: Callable[..., Any]) -> set[int]:
        return {id(value) for value in function.__globals__.values() if value is language or value is language.core}

    def launch_afresh(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(*args, **kwargs)

    def patch_once(function: Callable[..., Any]) -> Any:
        if used(function) <= patched:
            return None
        patched.update(used(function))
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_afresh, patch_once


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_language_once()
