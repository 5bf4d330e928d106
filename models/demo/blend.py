"""Blend two exported demo checkpoints of the same run into one: weights = (1 - share) * first + share * second.

    python -P -m alspec.models.demo.blend --first runs/first --second runs/second --share 0.5 --out DIR

The second checkpoint continues the training of the first, with a hinge on its global layers as well (see train.py).
`share` trades the hit rate of these layers against the information that an accepted `A~` loses.
Source: Wortsman et al., "Robust fine-tuning of zero-shot models", 2022 (weight-space interpolation).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.demo.network import DemoLlama, Shape, export, load
from alspec.models.demo.training_data import Codec

__all__ = ["blend"]


@torch.no_grad()
def blend(first: DemoLlama, second: DemoLlama, share: float) -> DemoLlama:
    """Interpolate every parameter of two networks of one shape; `share` in [0, 1] is the weight of `second`."""
    result = DemoLlama(first.shape)
    for dst, a, b in zip(result.parameters(), first.parameters(), second.parameters(), strict=True):
        dst.copy_(torch.lerp(a, b, share))
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Blend two demo checkpoints.")
    parser.add_argument("--first", type=Path, required=True)
    parser.add_argument("--second", type=Path, required=True)
    parser.add_argument("--share", type=float, required=True, help="weight of the second, 0 to 1")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_CHECKPOINT / "tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    codec = Codec(Tokenizer.from_file(str(args.tokenizer)))
    blended = blend(load(args.first, Shape()), load(args.second, Shape()), args.share)
    export(blended, args.out, codec.bos, [codec.eos, codec.end])


if __name__ == "__main__":
    main()
