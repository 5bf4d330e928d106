"""The eager round: draft K tokens, verify them with the newest token in one pass, emit the right ones and one more.

A round reads like this:

    drafts   = what the drafter proposes to follow the newest token, K for each request
    logits   = the model over K + 1 rows: the newest token and the drafts
    chosen   = for each row the token that plain decoding chooses behind it
    accepted = length of the longest prefix of the drafts that are the chosen tokens
    emit chosen[0], ..., chosen[accepted]

Every emitted token is the one of plain decoding with the same seed; see acceptance.py. What rejected rows wrote lies
behind the committed length and is never read. A round without drafts is a plain step.

Shapes: B requests, R = K + 1 rows of each, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from alspec.config import SamplingConfig
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.sampling.adjustment import count_newest
from alspec.kernels.sampling.logprobs import Logprobs, logprobs_ref
from alspec.runtime.decode.decode_step import StepRecord, warm_up_steps
from alspec.runtime.decode.eager_sampling import sample, starting_counts
from alspec.runtime.decode.rounds.acceptance import accepted_drafts, max_drafts, round_rows, seen_by_rows
from alspec.runtime.decode.rounds.draft_policy import DraftPolicy, round_cost, texts_so_far
from alspec.runtime.decode.rounds.drafter import Drafter, DraftRequest, Drafts
from alspec.runtime.decode.rounds.row_forward import RowForward
from alspec.runtime.decode.rounds.token_history import TokenHistory
from alspec.runtime.faults.bad_steps import bad_logits_error

__all__ = ["RoundStep"]


class RoundStep:
    """Rounds of one batch on one rank of one group, without attention-level speculation.

    Args:
        forward: the model over its cache.  drafter: proposes tokens.  num_drafts: K.  policy: whether drafting pays.
    """

    is_fused = False
    uses_graph = False
    launched = 0  # the host waits for every step
    recent_kinds = ""

    def __init__(self, forward: RowForward, drafter: Drafter, num_drafts: int, policy: DraftPolicy) -> None:
        self._forward, self._drafter, self._num_drafts, self._policy = forward, drafter, num_drafts, policy
        cache = forward.cache
        self._history = TokenHistory(cache.batch_size, cache.max_context, cache.device)
        self._requests = torch.arange(cache.batch_size, device=cache.device)
        self._has_blocks = any(not isinstance(cache.layer(layer), KVLayer) for layer in range(cache.num_layers))
        self._sampling = SamplingConfig()
        self._seen: Tensor | None = None  # with penalties: see `tokens_seen`
        self._is_warm = cache.device.type != "cuda"
        self._steps = 0
        self._seq_lens: list[int] = []  # cached tokens of each request, and the newest one

    @property
    def next_step(self) -> int:
        """Number of the running step: eager steps are never launched ahead. See `DecodeStep.next_step`."""
        return self._steps

    @property
    def prompt_queries(self) -> Tensor | None:
        """Room for the prompts' last queries, if drafts recall blocks. See `DecodeStep.prompt_queries`."""
        return self._forward.last_queries

    def set_verdict_rule(self, threshold: float, forced: Tensor | None = None) -> None:
        """Refuse: a round has no verdicts. See `DecodeStep.speculate`."""
        raise AssertionError("nothing is speculated in a layer")

    def prepare(self, sampling: SamplingConfig, kept: Sequence[int] | None = None) -> int:
        """On a GPU, run one round the first time, to compile its kernels. See `DecodeStep.prepare`."""
        self._sampling = sampling
        if not self._is_warm:
            warm_up_steps(self, kept or [0] * self._forward.cache.batch_size, 2)
            self._is_warm = True
        return 0

    def begin(
        self,
        token_ids: list[int],
        seq_lens: list[int],
        seen: Tensor | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        continued: Sequence[int] = (),  # whose newest queries `recall` has
    ) -> None:
        """Set tokens, lengths and what drafts are looked up in. See `DecodeStep.begin`."""
        self._history.begin(token_ids, seq_lens, prompts)
        self._forward.begin()
        if prompts is not None:
            self._forward.recall(self._history.lengths - 1)
        forward = self._forward
        self._seen = starting_counts(
            self._sampling, seen, len(token_ids), forward.model.config.vocab_size, forward.cache.device
        )
        self._drafter.begin(self._history)
        self._policy.begin(texts_so_far(token_ids, prompts))
        self._seq_lens = list(seq_lens)
        self._steps = 0

    def step(self, remaining: int, live: list[bool] | None = None) -> StepRecord:
        """Run one round; a request that has ended keeps its newest token. See `DecodeStep.step`.

        Raises:
            BadNumbersError: logits of an emitted token are NaN or Inf; no token of this round is returned.
        """
        started = time.perf_counter()
        self._steps += 1
        forward, history = self._forward, self._history
        is_live = torch.tensor(live or [True] * len(self._requests), device=self._requests.device)
        if self._seen is not None:
            count_newest(self._seen, history.newest)
        drafts = self._draft(remaining - 1, is_live)
        token_ids, seq_lens = round_rows(history.newest, history.lengths, drafts)
        logits, layer_sums = forward.full(token_ids, seq_lens)
        seen = None if self._seen is None else seen_by_rows(self._seen, drafts)
        chosen = self._choose(logits, seq_lens, seen)
        accepted = accepted_drafts(drafts, chosen)
        if seen is not None:
            self._seen = seen[accepted, self._requests]
        counts = (accepted + 1) * is_live
        lengths = (history.lengths + accepted).int()
        forward.cache.commit(lengths)
        forward.recall_rows(accepted, lengths)
        history.append(chosen.T, counts)
        emitted, offered, logprobs = self._read(chosen, accepted, drafts, logits, layer_sums)
        tokens = [len(ids) if on else 0 for ids, on in zip(emitted, live or [True] * len(emitted), strict=True)]
        self._policy.read([ids[:count] for ids, count in zip(emitted, tokens, strict=True)])
        if any(offered):
            mean = sum(tokens) / sum(count > 0 for count in tokens)
            self._policy.record(mean, self._cost(max(offered)))
        self._seq_lens = [length + count for length, count in zip(self._seq_lens, tokens, strict=True)]
        return StepRecord(emitted, None, (time.perf_counter() - started) * 1e6, 0, logprobs, offered)

    def launch_missing(self, launched: int, kinds: str) -> None:
        """Do nothing: no eager step is ever in flight. See `DecodeStep.launch_missing`."""

    def release(self) -> None:
        """Do nothing: there is no graph. See `DecodeStep.release`."""

    def _draft(self, longest: int, is_live: Tensor) -> Drafts:
        """Ask for drafts if that pays and there is room for them: up to `longest` for each live request."""
        history, capacity = self._history, self._forward.cache.max_context
        limits = (
            max_drafts(history.lengths.long(), min(self._num_drafts, longest), capacity, self._has_blocks) * is_live
        )
        width = int(limits.max())
        nothing = Drafts(self._requests.new_zeros(len(limits), 0), torch.zeros_like(limits))
        if width < 1 or not self._policy.decide_next(width, self._cost(width)):
            return nothing
        drafts = self._drafter.draft(DraftRequest(history, limits, width, self._sampling, self._seen))
        width = int(drafts.counts.max())
        return Drafts(drafts.token_ids[:, :width], drafts.counts) if width else nothing

    def _cost(self, num_drafts: int) -> float:
        """The cost of a round with so many drafts, relative to a plain step: it changes with the cached lengths."""
        return round_cost(num_drafts, self._drafter.cost(self._seq_lens))

    def _choose(self, logits: Tensor, seq_lens: Tensor, seen: Tensor | None) -> Tensor:
        """Choose the token behind each row, [R, B] int64, as plain decoding chooses it at that position."""
        return sample(
            logits.flatten(0, 1),
            self._sampling,
            self._requests.repeat(len(logits)),
            seq_lens.flatten().long(),
            None if seen is None else seen.flatten(0, 1),
        ).view(seq_lens.shape)

    def _read(
        self, chosen: Tensor, accepted: Tensor, drafts: Drafts, logits: Tensor, layer_sums: Tensor
    ) -> tuple[list[list[int]], list[int], Logprobs | None]:
        """Bring a round's results to the host: emitted tokens and numbers of drafts of each request, and logprobs."""
        is_finite = torch.isfinite(logits).all(2).long()
        read = torch.stack([accepted, drafts.counts, *chosen, *is_finite], 1).tolist()  # one copy, [B, 2 + 2 R]
        num_rows = len(chosen)
        emitted = [row[2 : 3 + row[0]] for row in read]
        if not all(all(row[2 + num_rows : 3 + num_rows + row[0]]) for row in read):
            raise bad_logits_error(logits.flatten(0, 1), layer_sums, self._steps, self._forward.transport)
        offered = [row[1] for row in read]
        if self._sampling.logprobs is None:
            return emitted, offered, None
        places = [row * len(read) + request for request, ids in enumerate(emitted) for row in range(len(ids))]
        rows = logits.flatten(0, 1)[places]
        return emitted, offered, logprobs_ref(rows, chosen.flatten()[places], self._sampling.logprobs)
