"""alspec: multi-device speculative inference for Llama models.

Public names are imported on first use, so that `import alspec.verdict` does not import the runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alspec.config import EngineConfig, SamplingConfig, SpeculationConfig
    from alspec.errors import AlspecError, BadNumbersError, DoesNotFitError, RankFailureError, UserError
    from alspec.runtime.engine.engine import Engine
    from alspec.runtime.engine.generation import Completion, Token, TokenLogprobs

__all__ = [
    "AlspecError",
    "BadNumbersError",
    "Completion",
    "DoesNotFitError",
    "Engine",
    "EngineConfig",
    "RankFailureError",
    "SamplingConfig",
    "SpeculationConfig",
    "Token",
    "TokenLogprobs",
    "UserError",
]

_MODULES = {
    "AlspecError": "alspec.errors",
    "BadNumbersError": "alspec.errors",
    "Completion": "alspec.runtime.engine.generation",
    "DoesNotFitError": "alspec.errors",
    "Engine": "alspec.runtime.engine.engine",
    "EngineConfig": "alspec.config",
    "RankFailureError": "alspec.errors",
    "SamplingConfig": "alspec.config",
    "SpeculationConfig": "alspec.config",
    "Token": "alspec.runtime.engine.generation",
    "TokenLogprobs": "alspec.runtime.engine.generation",
    "UserError": "alspec.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
