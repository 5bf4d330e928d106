"""How a checkpoint's files hold quantised weights: what `quantization_config` in config.json says."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field

from alspec.models.validation import Frozen

__all__ = ["QuantisationConfig", "QuantisationMethod", "SchemeTarget", "WeightScheme"]

QuantisationMethod = Literal["compressed-tensors", "fp8", "awq", "gptq"]


class WeightScheme(Frozen):
    """How the weights of some modules are stored."""

    layout: Literal["fp8", "pack-quantized", "awq", "gptq"] = Field(description="names and packing of the tensors")
    bits: int = Field(ge=4, le=8, description="bits of a code: 4, or 8")
    group_size: int = Field(ge=-1, description="input channels that share a scale; -1: all")
    rows_per_scale: int = Field(default=1, ge=-1, description="output channels that share a scale (fp8); -1: all")
    scale_name: str = Field(default="weight_scale", description="name of the scales (fp8)")
    symmetric: bool = Field(default=True, description="there are no zero points (pack-quantized)")
    has_order: bool = Field(default=False, description="a tensor assigns each input channel to its group")
    order_is_announced: bool = Field(default=True, description="config.json says so; else some weights may lack it")
    zero_offset: int = Field(default=0, ge=0, le=1, description="added to stored zero points (gptq)")

    @property
    def column_multiple(self) -> int:
        """What the input channels of one rank must be a multiple of, so that groups and pairs of codes stay whole."""
        if self.layout == "fp8":
            return max(self.group_size, 1)
        # A rank may hold any channels of an ordered weight: its scales are found by index.
        return 2 if self.has_order or self.group_size == -1 else math.lcm(self.group_size, 2)

    @property
    def requires_order(self) -> bool:
        """Whether each weight must have a tensor that assigns its input channels to groups."""
        return self.has_order and self.order_is_announced

    def name(self, method: str) -> str:
        """The scheme in a few words, such as 'int4 (awq, groups of 128)'."""
        if self.layout == "fp8" and self.rows_per_scale > 1:
            parts = f"blocks of {self.rows_per_scale} x {self.group_size}"
        elif self.group_size > 0:
            parts = f"groups of {self.group_size}"
        else:
            parts = "one scale" if self.rows_per_scale == -1 else "a scale for each row"
        prefix = "" if method == "fp8" else f"{method}, "
        return f"{'fp8' if self.layout == 'fp8' else f'int{self.bits}'} ({prefix}{parts})"


class SchemeTarget(Frozen):
    """A scheme, and the modules that it is for: names, `re:` and a regular expression, or `Linear` for all."""

    targets: tuple[str, ...]
    scheme: WeightScheme


class QuantisationConfig(Frozen):
    """The quantisation of a checkpoint's weights. Activations and the KV cache are not part of it."""

    method: QuantisationMethod
    groups: tuple[SchemeTarget, ...] = Field(min_length=1)
    ignore: tuple[str, ...] = Field(default=(), description="modules that are not quantised, spelled like targets")
    unused: tuple[str, ...] = Field(default=(), description="settings that are not used here")

    @property
    def names_modules(self) -> bool:
        """Whether targets and `ignore` say which modules are quantised; otherwise their tensors in the files do."""
        return self.method == "compressed-tensors"

    def scheme_of(self, module: str) -> WeightScheme | None:
        """The scheme of a linear module such as `model.layers.0.mlp.up_proj`; None: it is not quantised.

        A name goes before a regular expression, and that before `Linear`, as in the package compressed-tensors.
        """
        if any(_rank(module, pattern) is not None for pattern in self.ignore):
            return None
        found = [
            (rank, group.scheme)
            for group in self.groups
            for pattern in group.targets
            if (rank := _rank(module, pattern)) is not None
        ]
        return min(found, key=lambda item: item[0])[1] if found else None

    @property
    def name(self) -> str:
        """All schemes in a few words."""
        return " and ".join(dict.fromkeys(group.scheme.name(self.method) for group in self.groups))


def _rank(module: str, pattern: str) -> int | None:
    """How a pattern matches a linear module: 0 by name, 1 as a regular expression, 2 by its class; None: not."""
    if pattern.startswith("re:"):
        return 1 if re.match(pattern.removeprefix("re:"), module) else None
    return {module: 0, "Linear": 2}.get(pattern)
