"""Verdicts that are forced for profiling: evenly spread over the layers, or drawn from the hit rates of a real model.

The layers of a real model that reject are not evenly spread: some reject half of the time, others never. A pair over a
link loses less then, because layers that it loses behind a reject often reject too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import parse_json

__all__ = ["ForcedVerdicts", "drawn_verdicts", "forced_verdicts", "read_layer_rates"]

NUM_DRAWS = 256  # steps until drawn verdicts repeat


def forced_verdicts(num_layers: int, hit_rate: float) -> list[int]:
    """Return one verdict per layer (1 accepts, 0 rejects) with this hit rate; the hits are spread evenly."""
    # 1e-9 as in the latency model: L r may be a few ulp below a whole number.
    hits = [int(layer * hit_rate + 1e-9) for layer in range(num_layers + 1)]
    return [after - before for before, after in itertools.pairwise(hits)]


def drawn_verdicts(num_layers: int, layer_rates: Sequence[float], num_steps: int, seed: int = 0) -> Tensor:
    """Draw verdicts for steps, [steps, L] int32, each layer by its own hit rate.

    Args:
        num_layers: L.  layer_rates: of a model with any number of layers; layer l has that of the layer as deep in it.
    """
    rates = torch.tensor([layer_rates[layer * len(layer_rates) // num_layers] for layer in range(num_layers)])
    draws = torch.rand(num_steps, num_layers, generator=torch.Generator().manual_seed(seed))
    return (draws < rates).int()


@dataclass
class ForcedVerdicts:
    """What `DecodeStep.speculate` is given, and what changes it from step to step."""

    now: Tensor  # [L] int32, which the kernels read
    of_steps: Tensor  # [N, L] int32: of each step, over and over

    @classmethod
    def of(cls, num_layers: int, rate: float | Sequence[float], device: torch.device) -> ForcedVerdicts:
        """For a hit rate, or for one of each layer."""
        if isinstance(rate, (int, float)):
            of_steps = torch.tensor([forced_verdicts(num_layers, rate)], dtype=torch.int32)
        else:
            of_steps = drawn_verdicts(num_layers, rate, NUM_DRAWS)
        of_steps = of_steps.to(device)
        return cls(of_steps[0].clone(), of_steps)

    def turn(self, step: int) -> None:
        """Launches from now on have the verdicts of this step. Every rank calls it between the same launches."""
        if len(self.of_steps) > 1:
            self.now.copy_(self.of_steps[step % len(self.of_steps)])


def read_layer_rates(path: Path, flag: str = "--hit-rates", others: str = "real, numbers from 0 to 1,") -> list[float]:
    """Read the hit rate of each layer from a file of rows, as `launch/evaluate.py --rows` writes them.

    Args:
        flag: that named it.  others: what the flag takes beside a file, for errors.
    Raises:
        UserError: not readable, or not exactly one row with hits.
    """
    name = f"flags: {flag}: {path}"
    try:
        rows = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{name}: {reason}; give {others} or a file of evaluate's rows") from None
    found = [rates for row in rows if isinstance(row, dict) and (rates := row.get("hit_rate_per_layer"))]
    found = [rates for rates in found if isinstance(rates, list) and any(rates)]
    if len(found) != 1:
        raise UserError(
            f"{name}: expected one row with hits in hit_rate_per_layer, found {len(found)}; write the file with "
            "launch/evaluate.py --rows, for one context and one threshold"
        )
    if not all(isinstance(rate, (int, float)) and 0 <= rate <= 1 for rate in found[0]):
        raise UserError(f"{name}: expected numbers from 0 to 1 in hit_rate_per_layer, found {show(found[0])}")
    return [float(rate) for rate in found[0]]
