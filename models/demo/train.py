"""Train the demo checkpoint on one GPU; the schedule counts minutes of wall time, not training steps.

    python -P -m alspec.models.demo.train --corpus DIR --state DIR --out DIR --minutes 18

There are two phases: rows of 2K tokens, then rows of 8K tokens while the learning rate falls to zero. A call stops
after `--stop-after` minutes, and the next call with the same `--state` continues. Each call exports the weights to
`--out`. `--warm-start` begins a new run with exported weights, usually with long rows only (`--short-share 0`).

Each layer adds a hinge to the next-token loss, for speculative outputs that would be rejected:
    hinge = mean over tokens past 2S of max(0, ||A~ - A|| / ||A|| - margin)
A is the full attention output over all heads (before o_proj); A~ is exact attention over sink and window only. The
weight of the hinge is so large in local layers that they learn to ignore distant tokens. In `Shape.global_layers` it is
0 or, with `--global-hinge`, so small that they read distant tokens only where this improves the next-token loss enough.
Every layer runs, and is trained with, full attention.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.data import DataLoader

from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.demo.demo_tokenizer import read_corpus
from alspec.models.demo.network import (
    DemoLlama,
    LayerWeights,
    Shape,
    attend_full,
    export,
    layer_forward,
    load,
    near_mask,
    rms_norm,
)
from alspec.models.demo.training_data import Codec, RowStream, common_words, encode_corpus

__all__ = ["Muon", "forward_loss", "main"]

CHUNK_SIZE = 128
HINGE_MARGIN = 0.05
LOCAL_HINGE_WEIGHT = 0.5
MOMENTUM, WEIGHT_DECAY = 0.95, 0.1  # of `Muon`
WARMUP_STEPS, HINGE_RAMP_STEPS = 200, 500
MIXTURES = {
    2048: {"text": 0.66, "story": 0.08, "needle": 0.10, "records": 0.10, "repeat": 0.06},
    8192: {"text": 0.52, "story": 0.08, "needle": 0.17, "records": 0.16, "repeat": 0.07},
}


class Muon(torch.optim.Optimizer):
    """Muon: momentum orthogonalised by Newton-Schulz, batched over stacked matrices [L, out, in].

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. torch.optim.Muon processes
    one matrix at a time, which would launch thousands of small kernels per training step.
    """

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.orthogonalise = torch.compile(orthogonalise, dynamic=False) if params[0].is_cuda else orthogonalise

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - MOMENTUM)
                update = self.orthogonalise(param.grad.lerp(state["momentum"], MOMENTUM))
                scale = max(1.0, param.shape[-2] / param.shape[-1]) ** 0.5
                param.mul_(1 - group["lr"] * WEIGHT_DECAY)
                param.add_(update.to(param.dtype), alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Move all singular values of [L, rows, columns] towards 1 (five quintic Newton-Schulz iterations, bf16)."""
    x: Tensor = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    out: Tensor = x.mT if tall else x
    return out


def _train_layer(
    x: Tensor, weights: LayerWeights, rope: tuple[Tensor, Tensor], head_dim: int, mask: BlockMask | Tensor | None
) -> tuple[Tensor, Tensor]:
    """One layer and its hinge, which is zero without a mask."""
    hinge = x.new_zeros((), dtype=torch.float32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal hinge
        full_out = attend_full(q, k, v)
        if mask is None:
            return full_out
        if isinstance(mask, BlockMask):
            spec_out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            spec_out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        dist2 = (spec_out.float() - full_out.float()).square().sum((1, 3))
        norm2 = full_out.float().square().sum((1, 3))
        miss = ((dist2 + 1e-12) / (norm2 + 1e-6)).sqrt()
        hinge = F.relu(miss[:, 2 * CHUNK_SIZE :] - HINGE_MARGIN).mean()
        return full_out

    return layer_forward(x, weights, rope, head_dim, attend), hinge


def _token_losses(x: Tensor, norm_out: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
    logits = rms_norm(x, norm_out) @ embed.to(x.dtype).T
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().long(), reduction="none").view_as(targets)


def forward_loss(
    model: DemoLlama,
    ids: Tensor,
    weights: Tensor,
    mask: BlockMask | Tensor,
    hinge_weights: list[float],
    train_layer: Callable[..., tuple[Tensor, Tensor]] = _train_layer,
    token_losses: Callable[..., Tensor] = _token_losses,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of a batch.

    Args:
        model: the network.
        ids: [B, T + 1] int32. weights: [B, T + 1] float32, the loss weight of each token as a target.
        mask: mask of A~ for rows of T tokens: a block mask (CUDA) or bool [T, T].
        hinge_weights: one weight per layer; if it is 0, A~ is not computed.
        train_layer, token_losses: compiled functions if the device has a compiler.
    Returns:
        weighted mean cross entropy (nats); plain means over [text, answers]; hinge of each layer [L].
    """
    inputs, targets, target_weights = ids[:, :-1], ids[:, 1:], weights[:, 1:]
    rope = model.rope(inputs.shape[1])
    x = F.embedding(inputs, model.embed).to(torch.bfloat16 if inputs.is_cuda else torch.float32)
    hinges = []
    for layer_weights, hinge_weight in zip(model.layers(), hinge_weights, strict=True):
        x, hinge = train_layer(x, layer_weights, rope, model.shape.head_dim, mask if hinge_weight else None)
        hinges.append(hinge)
    losses = token_losses(x, model.norm_out, model.embed, targets)
    plain = (target_weights == 1.0).float()
    answers = (target_weights > 2.0).float()
    by_kind = torch.stack([(losses * part).sum() / part.sum().clamp(min=1) for part in (plain, answers)])
    return (losses * target_weights).sum() / target_weights.sum(), by_kind.detach(), torch.stack(hinges)


def block_mask(length: int, device: str) -> BlockMask | Tensor:
    """Mask of A~ for rows of `length` tokens: a block mask on CUDA, bool [length, length] on the CPU."""
    if device == "cpu":
        positions = torch.arange(length)
        return near_mask(positions[:, None], positions[None, :], CHUNK_SIZE)

    def reads(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return near_mask(query, key, CHUNK_SIZE)

    return create_block_mask(reads, None, None, length, length, device=device)


def prepare(corpus: Path, state: Path, tokenizer_file: Path) -> None:
    """Tokenize the corpus into the state folder, unless this was done before."""
    state.mkdir(parents=True, exist_ok=True)
    if (state / "words.json").exists():
        return
    codec = Codec(Tokenizer.from_file(str(tokenizer_file)))
    books, other = encode_corpus(corpus / "train.jsonl.xz", codec)
    np.save(state / "books.npy", books)
    np.save(state / "other.npy", other if len(other) else books)
    texts = (text[:200_000] for source, text in read_corpus(corpus / "train.jsonl.xz") if source.startswith("books/"))
    (state / "words.json").write_text(json.dumps(common_words("\n".join(texts))))
    print(f"corpus: {len(books):,} tokens of books, {len(other):,} of other text", flush=True)


def batches(args: argparse.Namespace, length: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of `args.batch_tokens` tokens in rows of `length` + 1, built by worker processes."""
    stream = RowStream(
        args.state / "books.npy",
        args.state / "other.npy",
        json.loads((args.state / "words.json").read_text()),
        args.tokenizer,
        MIXTURES[length],
        max(1, args.batch_tokens // length),
        length + 1,
        seed=args.seed + step + length,
    )
    pin = args.device == "cuda"
    loader = DataLoader(stream, batch_size=None, num_workers=args.workers, pin_memory=pin, prefetch_factor=8)
    return iter(loader)


class Trainer:
    """The model, its optimizers and the progress of training. All of it resumes from the state folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, args.state / "trainer.pt"
        torch.manual_seed(args.seed)
        shape = replace(Shape(), num_layers=args.layers)
        self.model = (load(args.warm_start, shape) if args.warm_start else DemoLlama(shape)).to(args.device)
        self.hinge_weights = [
            args.global_hinge if i in shape.global_layers else LOCAL_HINGE_WEIGHT for i in range(args.layers)
        ]
        matrices = self.model.matrices()
        rest = [p for p in self.model.parameters() if not any(p is matrix for matrix in matrices)]
        self.muon = Muon(matrices, lr=args.matrix_lr)
        self.adam = torch.optim.AdamW(rest, lr=args.other_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.functions: tuple[Callable[..., Any], ...] = (_train_layer, _token_losses)
        if args.device == "cuda":
            self.functions = (torch.compile(_train_layer, dynamic=False), torch.compile(_token_losses, dynamic=False))
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if self.file.exists():
            saved = torch.load(self.file, map_location=args.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.muon.load_state_dict(saved["muon"])
            self.adam.load_state_dict(saved["adam"])
            self.step, self.tokens, self.seconds = saved["progress"]

    def save(self) -> None:
        """Write the resume file and the exported weights."""
        progress = (self.step, self.tokens, self.seconds)
        optimizers = {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}
        torch.save({"model": self.model.state_dict(), **optimizers, "progress": progress}, self.file)
        codec = Codec(Tokenizer.from_file(str(self.args.tokenizer)))
        export(self.model, self.args.out, codec.bos, [codec.eos, codec.end])

    def set_learning_rates(self) -> None:
        """Warm up, stay constant, then fall linearly to zero in the second phase."""
        progress = min(1.0, self.seconds / (60 * self.args.minutes))
        start = self.args.short_share
        factor = min(1.0, (self.step + 1) / WARMUP_STEPS, max(0.01, (1 - progress) / (1 - start)))
        for optimizer, peak in [(self.muon, self.args.matrix_lr), (self.adam, self.args.other_lr)]:
            optimizer.param_groups[0]["lr"] = peak * factor

    def run(self, length: int, until_seconds: float, deadline: float) -> None:
        """Train on rows of `length` until `until_seconds` of training or the deadline of this call."""
        args, mask = self.args, block_mask(length, self.args.device)
        hinge_weights = torch.tensor(self.hinge_weights, device=args.device)
        rows, began, before = batches(args, length, self.step), time.monotonic(), self.seconds
        logged = (began, self.tokens)
        while self.seconds < until_seconds and time.monotonic() < deadline:
            ids, weights = (part.to(args.device, non_blocking=True) for part in next(rows))
            self.set_learning_rates()
            loss, by_kind, hinges = forward_loss(self.model, ids, weights, mask, self.hinge_weights, *self.functions)
            ramp = min(1.0, self.step / HINGE_RAMP_STEPS)
            (loss + ramp * (hinges * hinge_weights).sum()).backward()
            self.muon.step()
            self.adam.step()
            self.model.zero_grad(set_to_none=True)
            self.step += 1
            self.tokens += ids[:, 1:].numel()
            if self.step % args.log_every == 0:
                values = [loss.item(), *by_kind.tolist(), *hinges.tolist()]  # synchronizes with the device
                if not all(map(math.isfinite, values)):
                    raise FloatingPointError(f"step {self.step}: loss is not finite: {values}")
                now = time.monotonic()
                speed, logged = (self.tokens - logged[1]) / (now - logged[0]), (now, self.tokens)
                hinge_text = " ".join(f"{value:.3f}" for value in values[3:])
                print(
                    f"step {self.step} rows {length} min {self.seconds / 60:.2f} tokens {self.tokens / 1e6:.0f}M "
                    f"{speed / 1e3:.0f}k/s loss {values[0]:.3f} text {values[1]:.3f} answers {values[2]:.3f} "
                    f"hinge {hinge_text}",
                    flush=True,
                )
            self.seconds = before + time.monotonic() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.jsonl.xz")
    parser.add_argument("--state", type=Path, required=True, help="folder to resume from and save to")
    parser.add_argument("--out", type=Path, required=True, help="folder for the exported weights")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_CHECKPOINT / "tokenizer.json")
    parser.add_argument("--minutes", type=float, default=18.0, help="training time of the whole run")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes after which this call saves and stops")
    parser.add_argument("--short-share", type=float, default=0.55, help="share of the time spent on rows of 2K")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--warm-start", type=Path, help="folder with exported weights to begin with")
    parser.add_argument("--global-hinge", type=float, default=0.0, help="hinge weight of the global layers")
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=0.004)
    parser.add_argument("--layers", type=int, default=Shape.num_layers)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.stop_after
    torch.backends.cuda.matmul.allow_tf32 = True
    prepare(args.corpus, args.state, args.tokenizer)
    trainer = Trainer(args)
    total = 60 * args.minutes
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        for length, until_seconds in [(2048, args.short_share * total), (8192, total)]:
            if trainer.seconds < until_seconds and time.monotonic() < deadline:
                trainer.run(length, until_seconds, deadline)
    trainer.save()
    print(
        f"saved after {trainer.step} steps, {trainer.tokens:,} tokens, {trainer.seconds / 60:.2f} minutes", flush=True
    )


if __name__ == "__main__":
    main()
