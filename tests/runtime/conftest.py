"""Tiny random Llama folders, their oracle in fp64, and a launcher of several ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs
import pytest
import tokenizers
import torch
from one_thread import one_thread  # noqa: F401
from paths import WORKERS
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from alspec.predictor import block_masses
from alspec.simulation import SimulatedStep, simulate_step

WORKER = WORKERS / "step_worker.py"
EOS = "<|end|>"


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([EOS])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}), encoding="utf-8")


def write_folder(folder: Path, family: str = "Llama", **other: Any) -> None:
    """Write a random model. Its weights are so large that distant tokens matter in some layers and not in others."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 301,  # not a multiple of the number of ranks
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256,
    } | other
    torch.manual_seed(0)
    kind, config = (getattr(transformers, family + suffix) for suffix in ("ForCausalLM", "Config"))
    model = kind(config(**sizes))
    for name, parameter in model.named_parameters():
        parameter.data = torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.15
    model.save_pretrained(folder)
    write_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: 6 layers, 8 query and 4 KV heads, vocabulary of 301, fp32. Do not write to it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_folder(folder)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with 3 layers (first, middle, last), for kernels in the interpreter."""
    folder = tmp_path_factory.mktemp("model") / "small"
    write_folder(folder, num_hidden_layers=3)
    return folder


@pytest.fixture(scope="session")
def turbo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with 4 query and 2 KV heads of 64 channels, which a quantised cache needs."""
    folder = tmp_path_factory.mktemp("model") / "turbo"
    write_folder(folder, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    return folder


@pytest.fixture(scope="session")
def window_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model as a Mistral: every layer has a sliding window of 450 tokens."""
    folder = tmp_path_factory.mktemp("model") / "window"
    write_folder(folder, "Mistral", num_hidden_layers=3, sliding_window=450)
    return folder


@pytest.fixture(scope="session")
def narrow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral of two layers with heads of 64 channels and a sliding window of 70 tokens, for rounds."""
    folder = tmp_path_factory.mktemp("model") / "narrow"
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    write_folder(folder, "Mistral", sliding_window=70, **sizes)
    return folder


@pytest.fixture(scope="session")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of four layers with heads of 64 channels: the middle layers have a sliding window of 357 tokens."""
    folder = tmp_path_factory.mktemp("model") / "mixed"
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    write_folder(
        folder, "Qwen2", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        hidden_size=256, use_sliding_window=True, sliding_window=357, layer_types=kinds,
    )  # fmt: skip
    return folder


@dataclass
class OracleRun:
    """The tokens that the oracle generated for each request, and the result of `simulate_step` for each decode step."""

    tokens: list[list[int]]
    steps: list[SimulatedStep] = field(default_factory=list)


class Oracle:
    """The tiny model in fp64 and plain torch, written from the published equations. It decodes by `simulate_step`."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.num_layers: int = config["num_hidden_layers"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self._eps: float = config["rms_norm_eps"]
        kinds, window = config.get("layer_types"), config.get("sliding_window")
        self.sliding_windows = [
            window if kinds is None or kinds[layer] == "sliding_attention" else None for layer in range(self.num_layers)
        ]
        self._inv_freq = 10_000.0 ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        self.sm_scale = self.head_dim**-0.5

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self._eps).sqrt() * self._weights[name]

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """RoPE: each channel pair (c, c + D/2) is a complex number that is rotated by its angle."""
        first, second = heads.chunk(2, dim=-1)
        rotation = torch.polar(torch.ones_like(first), positions[:, None, None] * self._inv_freq.expand_as(first))
        rotated = torch.complex(first, second) * rotation
        return torch.cat([rotated.real, rotated.imag], dim=-1)

    def embed(self, token_ids: list[int]) -> Tensor:
        """x [n, hidden]."""
        return self._weights["model.embed_tokens.weight"][token_ids]

    def pre_attention(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, Hq, D], k and v [n, Hkv, D]."""
        prefix = f"model.layers.{layer}."
        h = self._norm(x, prefix + "input_layernorm.weight")
        names = [f"{prefix}self_attn.{part}_proj." for part in "qkv"]
        q, k, v = (
            (h @ self._weights[name + "weight"].T + self._weights.get(name + "bias", 0)).unflatten(
                1, (-1, self.head_dim)
            )
            for name in names
        )
        return self._rotate(q, positions), self._rotate(k, positions), v

    def post_attention(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        """x [n, hidden] after the layer."""
        prefix = f"model.layers.{layer}."
        x = x + attention.flatten(1) @ self._weights[prefix + "self_attn.o_proj.weight"].T
        h = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate, up = (h @ self._weights[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (gate * torch.sigmoid(gate) * up) @ self._weights[prefix + "mlp.down_proj.weight"].T

    def logits(self, x: Tensor) -> Tensor:
        """[n, V]."""
        return self._norm(x, "model.norm.weight") @ self._weights["lm_head.weight"].T

    def empty_cache(self, batch_size: int, capacity: int) -> list[Tensor]:
        """L x [B, Hkv, capacity, D], all NaN: elements that were not written must not be read."""
        shape = (batch_size, self.num_kv_heads, capacity, self.head_dim)
        return [torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(self.num_layers)]

    def prefill(
        self,
        ids: list[int],
        k_cache: list[Tensor],
        v_cache: list[Tensor],
        request: int,
        masses: list[Tensor] | None = None,
    ) -> Tensor:
        """Process a prompt with full causal attention and fill the caches; returns logits [V] of its last token.

        masses: L x [B, Hkv, NB], filled with the last token's masses of blocks.
        """
        n = len(ids)
        positions, x = torch.arange(n), self.embed(ids)
        age = positions[:, None] - positions
        for layer in range(self.num_layers):
            q, k, v = self.pre_attention(layer, x, positions)
            k_cache[layer][request, :, :n] = k.transpose(0, 1)
            v_cache[layer][request, :, :n] = v.transpose(0, 1)
            group = q.shape[1] // self.num_kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("ihd,jhd->hij", q, k) * self.sm_scale
            hidden = (age < 0) | (age >= (self.sliding_windows[layer] or n))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            if masses is not None:
                last = weights[:, -1].unflatten(0, (self.num_kv_heads, -1))
                masses[layer][request] = block_masses(last, positions // 64, masses[layer].shape[-1])
            x = self.post_attention(layer, x, torch.einsum("hij,jhd->ihd", weights, v))
        return self.logits(x[-1:])[0]

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: list[int],
        threshold: float,
        eos: tuple[int, ...] = (),
        recall_blocks: int = 0,
    ) -> OracleRun:
        """Greedy tokens of a batch with S = 128. A request ends at its own length or at an `eos` token."""
        capacity = max(map(len, prompts)) + max(max_new_tokens)
        k_cache, v_cache = self.empty_cache(len(prompts), capacity), self.empty_cache(len(prompts), capacity)
        shape = (len(prompts), self.num_kv_heads, capacity // 64 + 1)
        masses = [torch.zeros(shape, dtype=torch.float64) for _ in range(self.num_layers)] if recall_blocks else None
        tokens = [[int(self.prefill(ids, k_cache, v_cache, r, masses).argmax())] for r, ids in enumerate(prompts)]
        run = OracleRun(tokens)
        options: dict[str, Any] = {"recall_blocks": recall_blocks, "masses": masses or ()}
        options |= {"sliding_windows": self.sliding_windows}
        while True:
            live = [
                len(made) < limit and made[-1] not in eos for made, limit in zip(tokens, max_new_tokens, strict=True)
            ]
            if not any(live):
                return run
            lengths = [len(ids) + len(made) for ids, made in zip(prompts, tokens, strict=True)]
            step = simulate_step(
                self.embed([made[-1] for made in tokens]),
                k_cache,
                v_cache,
                torch.tensor(lengths),
                self.pre_attention,
                self.post_attention,
                threshold=threshold,
                chunk_size=128,
                sm_scale=self.sm_scale,
                live=torch.tensor(live),
                **options,
            )
            k_cache, v_cache = step.k_cache, step.v_cache
            options |= {"priority": step.priority, "masses": step.masses}
            run.steps.append(step)
            for request, token in enumerate(self.logits(step.x).argmax(-1).tolist()):
                if live[request]:
                    tokens[request].append(token)


@pytest.fixture(scope="session")
def oracle(tiny_folder: Path) -> Oracle:
    """The tiny folder's model in fp64."""
    return Oracle(tiny_folder)


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[Path], Oracle]:
    """`oracle_of(folder)`: another folder's model in fp64."""
    return Oracle


def repeated_passage(length: int, seed: int) -> list[int]:
    """A repeated passage with some noise: distant tokens add little, so some layers accept and some reject."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(256, (8,), generator=generator).repeat(length // 8 + 1)[:length]
    noise = torch.randint(256, (length,), generator=generator)
    return torch.where(torch.rand(length, generator=generator) < 0.1, noise, ids).tolist()


@pytest.fixture(scope="session")
def make_prompt() -> Callable[[int, int], list[int]]:
    """`make_prompt(length, seed)`: token ids without an end token."""
    return repeated_passage


Spec = dict[str, list[dict[str, Any]]]
RunRanks = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_ranks(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """`run_ranks(world_size, spec)`: run step_worker.py's `spec` on that many processes; returns each rank's record."""

    def run(
        world_size: int,
        spec: Spec,
        model: Path = tiny_folder,
        kv_cache: str = "bf16",
        softmax: str = "exact",
        kv_protect: int = 0,
        recall_blocks: int = 0,
    ) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        ports = jobs.free_ports(len(spec))
        options = {"model": str(model), "kv_cache": kv_cache, "softmax": softmax, "ports": ports, "modes": spec}
        options |= {"kv_protect": kv_protect, "recall_blocks": recall_blocks}
        (folder / "spec.json").write_text(json.dumps(options), encoding="utf-8")
        jobs.run_ranks(WORKER, world_size, folder, timeout_s=240)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]

    return run
