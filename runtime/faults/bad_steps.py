"""Turn a fault word or bad logits of a failed step into an error that names the rank, the layer and the step."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from alspec.errors import AlspecError, BadNumbersError, RankFailureError
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, split_fault
from alspec.runtime.distributed.agreement import Agreement
from alspec.runtime.distributed.transport import Transport

__all__ = ["bad_logits_error", "fault_error", "num_operations"]

FAULT_EXCHANGE_S = 1.0  # all ranks read the fault of a step at nearly the same time, unless a host is late


def fault_error(
    code: int, step: int, num_layers: int, agreement: Agreement, attempt: int, num_draft_layers: int = 0
) -> AlspecError:
    """The error for a fault word: bad numbers, or a rank whose data did not arrive in time.

    A fault on one rank may cause faults on others: bad numbers spread, and a rank that waits makes others wait. So all
    ranks that find a fault within `FAULT_EXCHANGE_S` report the earliest of these faults.

    Args:
        code: fault word, not 0; see kernels/comm/ll_packets.py.
        step: the step that left it.
        num_layers: L.
        agreement: exchange of text between the ranks.
        attempt: number of this attempt to decode by this engine; the same on every rank.
        num_draft_layers: L of the model that drafts; 0 without drafts.
    Returns:
        `BadNumbersError` or `RankFailureError`, to be raised by the caller.
    """
    own = json.dumps([step, code])
    try:
        found = agreement.gather_within(f"fault/{attempt}", own, FAULT_EXCHANGE_S)
    except RuntimeError:  # the store ended together with a rank; this fault is still valid
        found = [own]
    step, code = min((json.loads(text) for text in found), key=lambda fault: _order_in_time(fault, num_layers))
    kind, _, rank = split_fault(code)
    where = _operation_name(split_fault(code)[1], num_layers, num_draft_layers)
    if kind == BAD_NUMBERS:
        return _bad_numbers("NaN or Inf", f"rank {rank}, {where}", step)
    return RankFailureError(f"rank {rank} stalled at step {step}, operation {where}: no data arrived")


def _order_in_time(fault: list[int], num_layers: int) -> tuple[int, float, int]:
    """Sort key of (step, fault word): by step, then by operation within the step, then by kind and rank."""
    step, code = fault
    _, reduce_index, _ = split_fault(code)
    # The start of a step comes first, then drafts; the handover after the last layer comes before the LM head.
    order = {2 * num_layers + 1: -math.inf, 2 * num_layers + 2: 2 * num_layers - 0.5}
    if reduce_index >= num_operations(num_layers):
        return step, reduce_index - 2**20, code  # no index is as large
    return step, order.get(reduce_index, reduce_index), code


def bad_logits_error(logits: Tensor, layer_sums: Tensor, step: int, transport: Transport) -> BadNumbersError:
    """The error for NaN or Inf in the logits, naming where they began.

    Every rank calls it: all ranks have the same logits.

    Args:
        logits: [B, V] fp32.
        layer_sums: [L] fp32 of this rank; an entry is not finite if the activations of that layer were not.
        step: the step that computed them.
        transport: to gather `layer_sums` from all ranks.
    """
    finite = torch.isfinite(transport.all_gather_world(layer_sums)).cpu()  # [world, L]
    bad = [(layer, rank) for rank, layers in enumerate(finite.tolist()) for layer, ok in enumerate(layers) if not ok]
    if bad:
        where = "rank {1}, layer {0}".format(*min(bad))
    else:
        token = int(torch.isfinite(logits).all(0).int().argmin())
        peers = transport.placement.peers  # each computes a part of the vocabulary
        where = f"rank {peers[token // -(-logits.shape[1] // len(peers))]}, the LM head"
    return _bad_numbers("NaN or Inf in the logits", where, step)


def _bad_numbers(what: str, where: str, step: int) -> BadNumbersError:
    return BadNumbersError(
        f"{what}: first seen on {where}, step {step}; check the weights (--verify-checksums) or use --dtype fp32"
    )


def num_operations(num_layers: int) -> int:
    """How many operations of a step fault words name; those of draft steps follow."""
    return 2 * num_layers + 3


def _operation_name(reduce_index: int, num_layers: int, num_draft_layers: int) -> str:
    """Name of the operation in a fault word: 2 l and 2 l + 1 are the all-reduces of layer l; three more follow."""
    if reduce_index >= num_operations(num_layers):
        name = _operation_name(reduce_index - num_operations(num_layers), num_draft_layers, 0)
        return f"{name}, while drafting"
    if reduce_index == 2 * num_layers:
        return "the LM head"
    if reduce_index == 2 * num_layers + 1:
        return "the start of a step"
    if reduce_index == 2 * num_layers + 2:
        return "the last layer's output, handed over"
    return f"{('attention', 'MLP')[reduce_index % 2]} output, layer {reduce_index // 2}"
