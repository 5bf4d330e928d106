"""The composition root: peer memory, cache and decoder of an engine are put together here, as choices.py has chosen.

Every rank calls the functions that get a `Transport`.
"""

from __future__ import annotations

import torch

from alspec.config import EngineConfig, SpeculationConfig
from alspec.errors import UserError
from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.dispatch import attend_recall_parts, attend_spec_parts
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.common.limits import FAST_ROWS, MAX_BATCH, MAX_COLUMNS, MAX_FUSED_ROWS, MAX_ROWS, max_batch
from alspec.kernels.linear.decode_weight import DecodeWeight
from alspec.kernels.linear.gemm_products import GemmProducts
from alspec.kernels.linear.products import FusedProducts, Products
from alspec.kernels.speculation.linked_pair import LinkedPair
from alspec.latency_model import LinkCosts, at_rate, linked_tp_step_us, tp_step_us
from alspec.models.llama import Llama
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import largest_product
from alspec.runtime.cache.codecs import Cache, new_cache
from alspec.runtime.cache.recall_state import new_recall_state
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.decode.decode_step import DecodeStep
from alspec.runtime.decode.decoder import DecodeBuffers, Decoder, SpeculationState
from alspec.runtime.decode.eager_step import EagerStep
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.linked_decoders import Speculator, Verifier
from alspec.runtime.decode.pair_policy import PairPolicy
from alspec.runtime.decode.paired_decoder import PairedDecoder
from alspec.runtime.distributed.peer_memory import build_exchanges, probe_peer_memory
from alspec.runtime.distributed.placement import PeerMemory
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.choices import Choices
from alspec.runtime.profiling.predicted_costs import STREAM_BYTES_PER_S, link_costs, message_values, step_costs
from alspec.runtime.profiling.stats import device_bandwidth

__all__ = [
    "build_cache",
    "build_captured_step",
    "build_decode_step",
    "choose_pair_policy",
    "choose_products",
    "eager_notices",
    "most_rows",
    "find_peer_memory",
    "keeps_context",
    "network_notices",
    "num_recalled_blocks",
]


def num_recalled_blocks(config: EngineConfig, mode: str) -> int:
    """Blocks that `A~` recalls in a mode; 0 if nothing reads `A~`."""
    return config.speculation.recalled if mode != "off" or config.draft == "self" else 0


def keeps_context(config: EngineConfig, mode: str, for_turns: bool = False) -> bool:
    """Whether layers with a sliding window hold all tokens instead of a ring of the newest ones.

    `A~` is made of positions, a rejected draft would replace a token that is still read, and a conversation goes on
    from an earlier token.
    """
    return mode != "off" or config.draft != "off" or for_turns


def most_rows(batch_size: int, config: LlamaConfig, tp_size: int) -> int:
    """Most rows of each request that the fused kernels serve in a round; 0: they do not serve so many requests."""
    heads, kv_heads = config.local_heads(tp_size)
    return 0 if batch_size > MAX_BATCH else min(MAX_ROWS // batch_size, MAX_COLUMNS // (heads // kv_heads))


def eager_notices(
    choices: Choices, batch_size: int, config: EngineConfig, model: LlamaConfig, known: list[str]
) -> list[str]:
    """Notices, other than the known ones, if steps of so many requests are too large to be captured."""
    most, tp_size, reason = max_batch(choices.mode), choices.placement.tp_size, ""
    if batch_size > most:
        reason = f"{batch_size} requests: operations are launched one by one; captured steps serve up to {most}"
    elif config.draft != "off" and config.tokens_of_step > (most := most_rows(batch_size, model, tp_size)):
        reason = (
            f"{batch_size} requests of {config.tokens_of_step} rows: the operations of a round are launched one by "
            f"one; captured rounds serve up to {most} rows of each request here (--draft-tokens {most - 1})"
        )
    return [reason] if choices.has_fused_step and reason and reason not in known else []


def find_peer_memory(choices: Choices, requested: str, transport: Transport) -> tuple[PeerMemory | None, list[str]]:
    """Find the memory through which the ranks' kernels exchange packets; every rank calls it.

    Args:
        requested: `--transport`.
    Returns:
        Peer memory, or None where collectives carry everything; notices.
    Raises:
        UserError: the transport asked for does not work here.
    """
    if not choices.candidates:
        return None, []
    peer_memory, reason = probe_peer_memory(choices.candidates, transport)
    if peer_memory is None and requested != "auto":
        raise UserError(f"transport: {requested} does not work here: {reason}; use auto or nccl")
    if peer_memory is None and choices.mode == "paired" and not choices.placement.is_linked:
        raise UserError(f"transport: no memory that both groups reach: {reason}; use --pair-transport nccl")
    used = peer_memory or choices.backend
    return peer_memory, [f"transport: {used}, because symm does not work here ({reason})"] if reason else []


def build_cache(
    choices: Choices,
    config: EngineConfig,
    model: LlamaConfig,
    batch_size: int,
    max_context: int,
    for_turns: bool = False,
) -> Cache:
    """The KV cache of this rank, in the codec of `--kv-cache`."""
    tp_size = choices.placement.tp_size
    return new_cache(
        config.kv_cache,
        model,
        tp_size,
        batch_size,
        max_context,
        choices.dtype,
        choices.device,
        config.softmax,
        config.kv_protect,
        keeps_context(config, choices.mode, for_turns),
    )


def build_decode_step(
    choices: Choices,
    speculation: SpeculationConfig,
    model: Llama,
    cache: Cache,
    transport: Transport,
    peer_memory: PeerMemory | None,
    operation: OperationHook,
    policy: PairPolicy | None = None,
) -> DecodeStep:
    """The decode step for one cache: captured where a fused step exists and the batch is small enough, else eager."""
    if choices.has_fused_step and cache.batch_size <= max_batch(choices.mode):
        paired = speculation if choices.mode == "paired" else None
        return build_captured_step(model, cache, transport, peer_memory, choices.uses_graph, operation, paired, policy)
    return EagerStep(model, cache, transport, choices.mode, speculation, operation)


def choose_products(model: Llama, tp_size: int, num_rows: int) -> Products:
    """The projections of a step of so many rows: of packed weights, or of few rows, the fused ones."""
    matrices = [matrix for layer in model.weights.layers for matrix in layer.tensors.values()]
    is_packed = any(isinstance(matrix, DecodeWeight) for matrix in matrices)
    if num_rows <= (MAX_FUSED_ROWS if is_packed else FAST_ROWS):
        return FusedProducts()
    head_rows, device = model.weights.lm_head.shape[0], model.weights.embedding.device
    room = torch.zeros(num_rows * largest_product(model.config, tp_size, head_rows), device=device)
    return GemmProducts(room, model.unpacked)


def choose_pair_policy(
    choices: Choices, config: EngineConfig, model: LlamaConfig, transport: Transport, batch_size: int
) -> PairPolicy | None:
    """How far ahead the speculator of a pair over a link is, and when the groups decode alone; None in other jobs.

    Every rank calls it.
    """
    placement, tp_size = choices.placement, choices.placement.tp_size
    if not placement.is_linked or not choices.uses_graph:
        return None
    size, slower = message_values(model, tp_size, batch_size), _slower_than_h200(choices, transport)
    link_us = transport.message_us(torch.zeros(size, dtype=torch.int64, device=transport.device))

    def costs(num_tokens: int) -> tuple[float, LinkCosts]:
        sizes = choices.dtype, num_tokens, config.kv_cache, config.kv_protect
        alone_us = tp_step_us(at_rate(step_costs(model, tp_size, 1, *sizes), slower))
        return alone_us, at_rate(link_costs(model, tp_size, *sizes, link_us, config.speculation.recalled), slower)

    return PairPolicy(costs, model.num_layers, link_us)


def _slower_than_h200(choices: Choices, transport: Transport) -> float:
    """How many times as long as on an H200 kernels take, by the copy rate of the slowest rank; every rank calls it."""
    if choices.device.type != "cuda":
        return 1.0
    own = torch.tensor([device_bandwidth(choices.device)], dtype=torch.float64, device=transport.device)
    return STREAM_BYTES_PER_S / float(transport.all_gather_world(own).min())


def network_notices(
    choices: Choices, config: EngineConfig, model: LlamaConfig, transport: Transport, context: int
) -> list[str]:
    """Say so if `auto` took tensor parallelism over several hosts and one alone is predicted to be faster.

    Every rank calls it. The time of an all-reduce is measured, that of kernels is an H200's at this GPU's copy rate.
    """
    placement = choices.placement
    tp_size, of_host = placement.tp_size, placement.local_world_size
    is_chosen = config.speculation.mode == "auto" and choices.mode == "off" and config.draft == "off"
    if not is_chosen or not choices.has_fused_step or placement.is_one_host:
        return []
    link_us = transport.all_reduce_us(model.hidden_size)
    if of_host not in model.valid_tp_sizes:
        return []
    sizes, slower = (choices.dtype, context, config.kv_cache, config.kv_protect), _slower_than_h200(choices, transport)
    split_us = linked_tp_step_us(at_rate(step_costs(model, tp_size, 1, *sizes), slower), link_us)
    alone_us = tp_step_us(at_rate(step_costs(model, of_host, 1, *sizes), slower))
    if alone_us >= split_us:
        return []
    return [
        f"speculation: off, and an all-reduce between the hosts takes {link_us:.0f} us: predicted for {context} tokens "
        f"are {split_us / 1e3:.1f} ms a token, and {alone_us / 1e3:.1f} ms on one host alone or, at most, as "
        "a pair (--speculation paired; docs/two_hosts.md)"
    ]


def build_captured_step(
    model: Llama,
    cache: Cache,
    transport: Transport,
    peer_memory: PeerMemory | None,
    uses_graph: bool,
    operation: OperationHook,
    speculation: SpeculationConfig | None = None,
    policy: PairPolicy | None = None,
) -> CapturedStep:
    """The fused step of one model and cache, with its buffers: one group, a pair over packets, or over a link.

    Args:
        speculation: given for two paired groups.
        policy: of a pair over a link, see `choose_pair_policy`. The groups never decode alone if `speculation.always`.
    """
    config, batch_size, device = model.config, cache.batch_size, transport.device
    tp_size = transport.placement.tp_size
    shape = None if speculation is None else _pair_shape(model, cache, transport, peer_memory, speculation)
    exchange, logit_exchange, pair = build_exchanges(
        transport, peer_memory, 2 * config.num_layers, batch_size, config.hidden_size, config.vocab_size,
        shape,
    )  # fmt: skip
    common = (
        config, model.weights, model.rotary, cache,
        DecodeBuffers.allocate(config, tp_size, batch_size, model.weights.embedding.dtype, device),
        exchange, logit_exchange, transport.all_reduce, transport.all_gather_peers,
    )  # fmt: skip
    if speculation is None:
        products = choose_products(model, tp_size, batch_size)
        return CapturedStep(Decoder(*common, products=products), None, cache.max_context, uses_graph, operation)
    assert shape is not None
    state = SpeculationState(
        speculation.threshold,
        speculation.chunk_size,
        hits=torch.zeros(config.num_layers, batch_size, dtype=torch.int32, device=device),
        live=torch.ones(batch_size, dtype=torch.int32, device=device),
        recall=new_recall_state(cache, shape.num_qo_heads, speculation.recalled),
    )
    decoder: Decoder
    if pair is not None:
        sums = torch.zeros(batch_size, num_sums(batch_size, shape.num_qo_heads, config.head_dim), 2, device=device)
        decoder = PairedDecoder(*common, state, pair, sums, stops_early=peer_memory == "symm")
    else:
        placement = transport.placement
        linked = LinkedPair.allocate(shape, exchange, placement.group, placement.paired_rank)
        state.hits = linked.hits  # the verifier's verdicts travel as they are
        decoder = (Verifier if linked.verifies else Speculator)(*common, state, linked, transport.pair_link())
    alone = None if policy is None or speculation.always else Decoder(*common)
    return CapturedStep(decoder, state, cache.max_context, uses_graph, operation, alone, policy)


def _pair_shape(
    model: Llama,
    cache: Cache,
    transport: Transport,
    peer_memory: PeerMemory | None,
    speculation: SpeculationConfig,
) -> PairShape:
    """Sizes of a pair's memory.

    `A~` comes in parts over `symm`. In the host's memory readers would wait in line, and over a link none reads it.
    """
    config, batch_size, tp_size = model.config, cache.batch_size, transport.placement.tp_size
    num_heads, parts, recalled = config.num_qo_heads // tp_size, 1, speculation.recalled
    layers = [cache.layer(layer) for layer in range(cache.num_layers)]
    if peer_memory == "symm" and not transport.placement.is_linked:
        parts = min(attend_spec_parts(layer, num_heads, speculation.chunk_size, transport.device) for layer in layers)
    if recalled:
        parts += attend_recall_parts(layers, recalled)
    return PairShape(
        config.num_layers, batch_size, tp_size, config.hidden_size, num_heads, cache.num_kv_heads, config.head_dim,
        parts, recalled,
    )  # fmt: skip
