"""From what a step left on the device to the error that names rank, layer and step."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from alspec.errors import AlspecError, BadNumbersError, RankFailureError
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, split_fault
from alspec.runtime.distributed.agreement import Agreement
from alspec.runtime.distributed.transport import Transport

__all__ = ["bad_logits_error", "fault_error"]

FAULT_EXCHANGE_S = 1.0  # ranks read a step's fault at nearly the same time, if their hosts are not late


def fault_error(code: int, step: int, num_layers: int, agreement: Agreement, attempt: int) -> AlspecError:
    """What a kernel noted in the fault word: bad numbers, or a rank that it waited for in vain.

    Either may follow from what another rank has found: it works with the bad numbers, or waits for one that waits. So
    all that have found something within `FAULT_EXCHANGE_S` say what came first.

    Args:
        code: not 0; see kernels/comm/ll_packets.py.
        attempt: to decode, by this engine; the same number on every rank.
    """
    own = json.dumps([step, code])
    try:
        found = agreement.gather_within(f"fault/{attempt}", own, FAULT_EXCHANGE_S)
    except RuntimeError:  # the store is gone with a rank that has left, and this fault as true as before
        found = [own]
    step, code = min((json.loads(text) for text in found), key=lambda fault: _moment(fault, num_layers))
    kind, _, rank = split_fault(code)
    where = _operation_of(code, num_layers)
    if kind == BAD_NUMBERS:
        return _bad_numbers("NaN or Inf", f"rank {rank}, {where}", step)
    return RankFailureError(f"rank {rank} stalled at step {step}, operation {where}: no data came")


def _moment(fault: list[int], num_layers: int) -> tuple[int, float, int]:
    """Orders steps and fault words by what comes first in a step; those of one operation by kind and rank."""
    step, code = fault
    _, slot, _ = split_fault(code)
    # The last handover comes before the LM head.
    places = {2 * num_layers + 1: -1.0, 2 * num_layers + 2: 2 * num_layers - 0.5}
    return step, places.get(slot, slot), code


def bad_logits_error(logits: Tensor, layer_sums: Tensor, step: int, transport: Transport) -> BadNumbersError:
    """Where NaN or Inf in the logits began. Every rank sees the same logits, so every rank comes here.

    Args:
        logits: [B, V] fp32.
        layer_sums: [L] fp32 of this rank, not finite where its activations were not.
    """
    finite = torch.isfinite(transport.all_gather_world(layer_sums)).cpu()  # [world, L]
    bad = [(layer, rank) for rank, layers in enumerate(finite.tolist()) for layer, ok in enumerate(layers) if not ok]
    if bad:
        where = "rank {1}, layer {0}".format(*min(bad))
    else:
        token = int(torch.isfinite(logits).all(0).int().argmin())
        where = f"rank {token // -(-logits.shape[1] // transport.placement.world_size)}, the LM head"
    return _bad_numbers("NaN or Inf in the logits", where, step)


def _bad_numbers(what: str, where: str, step: int) -> BadNumbersError:
    return BadNumbersError(
        f"{what}: first seen on {where}, step {step}; check the weights (--verify-checksums) or use --dtype fp32"
    )


def _operation_of(code: int, num_layers: int) -> str:
    """Slots 2 l and 2 l + 1 are the all-reduces of layer l; three more follow the last layer's."""
    slot = split_fault(code)[1]
    if slot == 2 * num_layers:
        return "the LM head"
    if slot == 2 * num_layers + 1:
        return "the start of a step"
    if slot == 2 * num_layers + 2:
        return "the last layer's output, handed over"
    return f"{('attention', 'MLP')[slot % 2]} output, layer {slot // 2}"
