"""What `--draft` adds to an engine: the checks before memory is taken, the draft model, and the step of rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from alspec.config import EngineConfig
from alspec.errors import UserError, show
from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.checkpoint.source import draft_model_source, has_tokenizer, model_config, open_tokenizer
from alspec.models.llama import Llama, quantised_copy
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import weights_name
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.predictor import first_lossy_length
from alspec.runtime.cache.codecs import Cache, check_head_dim, new_cache
from alspec.runtime.decode.decode_step import DecodeStep
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.rounds.draft_policy import DraftPolicy, RepeatedTexts
from alspec.runtime.decode.rounds.drafter import Drafter
from alspec.runtime.decode.rounds.model_drafter import ModelDrafter, SelfDrafter
from alspec.runtime.decode.rounds.ngram_drafter import NgramDrafter
from alspec.runtime.decode.rounds.round_step import RoundStep
from alspec.runtime.decode.rounds.row_forward import RowForward
from alspec.runtime.distributed.placement import PeerMemory
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.choices import Choices
from alspec.runtime.engine.composition import most_rows
from alspec.runtime.engine.loading import open_model, read_weights
from alspec.runtime.engine.memory import RoundSize
from alspec.runtime.engine.round_composition import build_captured_rounds
from alspec.runtime.engine.weight_settings import config_with_weights
from alspec.runtime.profiling.predicted_costs import DRAFT_LAYER_US, rows_us, step_us

__all__ = [
    "Drafting",
    "check_draft_tokenizer",
    "draft_copy_config",
    "draft_model_config",
    "draft_config_with_weights",
    "round_size",
]


def draft_model_config(config: EngineConfig) -> LlamaConfig | None:
    """Shape of the draft model; None without one.

    Raises:
        UserError: a broken folder or file.
    """
    draft_settings = draft_model_source(config)
    if draft_settings is None:
        return None
    with _naming_draft():
        return model_config(draft_settings)


@contextmanager
def _naming_draft() -> Iterator[None]:
    """Begin the message of a `UserError` with the setting that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"draft: {error}") from None


def draft_config_with_weights(
    config: EngineConfig, model: LlamaConfig | None, tp_size: int, packs: bool
) -> LlamaConfig | None:
    """The smaller model with what `--draft-weights` means for its weights; None without one.

    Args:
        model: of `draft_model_config`.  tp_size, packs: as for `config_with_weights`.
    Raises:
        UserError: weights that are quantised already, or inputs that cannot be divided into groups.
    """
    settings = draft_model_source(config)
    if settings is None or model is None:
        return None
    return _with_draft_weights(settings, model, tp_size, packs)


def _with_draft_weights(settings: EngineConfig, model: LlamaConfig, tp_size: int, packs: bool) -> LlamaConfig:
    """As `config_with_weights`, whose errors are about `--weights`."""
    try:
        return config_with_weights(settings, model, tp_size, packs)
    except UserError as error:
        raise UserError(f"draft_{error}") from None


def round_size(config: EngineConfig, draft_model: LlamaConfig | None) -> RoundSize | None:
    """What rounds need in memory; None without drafts. draft_model: of `draft_config_with_weights`."""
    copied = config.draft_weights if config.draft == "self" else "auto"
    return None if config.draft == "off" else RoundSize(config.tokens_of_step, draft_model, copied)


@dataclass
class Drafting:
    """Drafts of one engine. Created before memory is taken; `load` takes that of the draft model's weights.

    The draft model is a smaller one, or with `--draft self --draft-weights` a quantised copy of the one that verifies.
    """

    config: EngineConfig
    target: LlamaConfig  # the model that verifies
    choices: Choices
    model_config: LlamaConfig | None  # of the smaller model
    checkpoint: Checkpoint | None
    copy_config: LlamaConfig | None = None  # of the copy
    model: Llama | None = None  # the draft model, when it is loaded
    most_tokens: float = math.inf  # longer texts than this are not drafted; set by `build_step`
    _round_costs: dict[tuple[int, float], float] = field(default_factory=dict)  # by requests and mean length

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        target: LlamaConfig,
        model: LlamaConfig | None,
        tokenizer: Tokenizer | None,
        choices: Choices,
    ) -> Drafting | None:
        """Open the draft model's files and compare its tokenizer; None if nothing is drafted.

        Args:
            model: of `draft_model_config`.  tokenizer: of the target.
        Raises:
            UserError: a broken folder or file, another tokenizer, or a model that does not divide over the ranks.
        """
        if config.draft == "off":
            return None
        settings, tp_size = draft_model_source(config), choices.placement.tp_size
        if settings is None or model is None:
            return cls(
                config, target, choices, None, None, draft_copy_config(config, target, tp_size, choices.packs_weights)
            )
        with _naming_draft():
            model.check_tp_size(tp_size)
            check_head_dim(model, choices.device)
            checkpoint, draft_tokenizer = open_model(settings, model)
        if settings.random_weights is None:
            _check_tokenizers(config.draft, tokenizer, draft_tokenizer)
        return cls(
            config,
            target,
            choices,
            draft_config_with_weights(config, model, tp_size, choices.packs_weights),
            checkpoint,
        )

    @property
    def num_rows(self) -> int:
        """Rows of each request in a round."""
        return self.config.draft_tokens + 1

    @property
    def size(self) -> RoundSize | None:
        """What rounds need in memory."""
        return round_size(self.config, self.model_config)

    @property
    def num_layers(self) -> int:
        """Layers of the model that drafts."""
        return (self.model_config or self.target).num_layers

    @property
    def weights_name(self) -> str | None:
        """What the weights of a copy, or of a quantised draft model, are; None: there is none."""
        model = self.copy_config or self.model_config
        if model is None or model.quantised_as is None:
            return None
        return weights_name(model, self.choices.placement.tp_size, self.choices.dtype_name)

    def load(self, transport: Transport) -> None:
        """Read this rank's weights of a smaller model."""
        if self.model_config is not None:
            choices = self.choices
            weights = read_weights(self.checkpoint, self.model_config, choices.placement, choices.dtype, choices.device)
            self.model = Llama(self.model_config, weights, transport)

    def notices(self, max_context: int) -> list[str]:
        """A line about a smaller model that has fewer positions than this context."""
        if self.model_config is None or max_context <= self.model_config.longest_context:
            return []
        limit = self.model_config.longest_context
        return [f"draft: {self.config.draft} has {limit} positions: longer texts go on without drafts"]

    def build_step(
        self,
        model: Llama,
        cache: Cache,
        transport: Transport,
        peer_memory: PeerMemory | None,
        operation: OperationHook,
    ) -> DecodeStep:
        """The step of rounds over one cache, with the draft model's own cache of the same size.

        It is captured where a fused step exists and one launch serves all rows, otherwise eager.
        """
        draft_cache = self._draft_cache(cache, transport)
        self.most_tokens = math.inf
        self._round_costs.clear()
        if self.model_config is not None and cache.max_context > self.model_config.longest_context:
            # A round is launched before the last one is read, so it may begin K + 1 tokens later than is known here.
            self.most_tokens = self.model_config.longest_context - 2 * self.num_rows
        if self.copy_config is not None and self.model is None:
            tp_size = self.choices.placement.tp_size
            self.model = Llama(self.copy_config, quantised_copy(model, self.copy_config, tp_size), transport)
        always = self.config.draft_always
        policy = DraftPolicy(always, RepeatedTexts() if self.config.draft == "ngram" and not always else None)
        tp_size = self.choices.placement.tp_size
        if self.choices.has_fused_step and self.num_rows <= most_rows(cache.batch_size, self.target, tp_size):
            return build_captured_rounds(
                model, cache, transport, peer_memory, self.choices.uses_graph, operation, self.config, policy,
                self._captured_round_cost, self.model, draft_cache,
            )  # fmt: skip
        chunk_size, recalled = self.config.speculation.chunk_size, self._recalled
        copy = self.model if self.copy_config is not None else None
        forward = RowForward(model, cache, transport, chunk_size, operation, recalled, copy)
        drafter: Drafter
        if self.config.draft == "ngram":
            drafter = NgramDrafter()
        elif self.config.draft == "self":
            drafter = SelfDrafter(forward, self._draft_cost)
        else:
            assert self.model is not None
            assert draft_cache is not None
            draft_forward = RowForward(self.model, draft_cache, transport, chunk_size, operation)
            drafted = self.model.config
            drafter = ModelDrafter(
                draft_forward, self.target.vocab_size, self._draft_cost, operation, drafted.short_context,
                drafted.frequency_length,
            )  # fmt: skip
        return RoundStep(forward, drafter, self.config.draft_tokens, policy)

    def _draft_cache(self, cache: Cache, transport: Transport) -> Cache | None:
        """The cache of a smaller model; None without one."""
        if self.model is None or self.model_config is None:
            return None
        return new_cache(
            "bf16", self.model_config, transport.placement.tp_size, cache.batch_size, cache.max_context,
            self.choices.dtype, cache.device, keeps_context=True,
        )  # fmt: skip

    @property
    def _recalled(self) -> int:
        return self.config.speculation.recalled if self.config.draft == "self" else 0

    def _draft_cost(self, seq_lens: list[int]) -> float:
        """Estimated time of one draft of all requests at these lengths, relative to a plain step.

        Infinite where the draft model has no more positions.
        """
        if self.config.draft == "ngram":
            return 0.0
        if max(seq_lens) > self.most_tokens:
            return math.inf
        if self.config.draft == "self":
            speculation = self.config.speculation
            longest = first_lossy_length(speculation.chunk_size, speculation.recalled)
            draft_model = self.copy_config or self.target
            draft_us = self._step_us(draft_model, [min(n, longest) for n in seq_lens])
        else:
            assert self.model_config is not None
            draft_model, placement = self.model_config, self.choices.placement
            draft_us = step_us(draft_model, placement.tp_size, self.choices.dtype, seq_lens, "bf16", 0)
        return (draft_us + draft_model.num_layers * DRAFT_LAYER_US) / self._step_us(self.target, seq_lens)

    def _step_us(self, model: LlamaConfig, seq_lens: list[int]) -> float:
        """Predicted time of a step over a cache as the model's."""
        config, tp_size = self.config, self.choices.placement.tp_size
        return step_us(model, tp_size, self.choices.dtype, seq_lens, config.kv_cache, config.kv_protect)

    def _captured_round_cost(self, seq_lens: list[int]) -> float:
        """Estimated time of a round over the fused kernels at these lengths, relative to a plain step.

        It is asked for in each step: lengths count by their mean, rounded up to a block, so that it is seldom computed.
        """
        if max(seq_lens) > self.most_tokens:
            return math.inf
        mean = -(-sum(seq_lens) // len(seq_lens))
        key = len(seq_lens), min(-(-mean // BLOCK) * BLOCK, self.most_tokens)
        if key not in self._round_costs:
            self._round_costs[key] = self._fused_round_cost([int(key[1])] * key[0])
        return self._round_costs[key]

    def _fused_round_cost(self, seq_lens: list[int]) -> float:
        config = self.config
        further_us = rows_us(
            self.target, self.choices.placement.tp_size, self.choices.dtype, seq_lens, config.kv_cache,
            config.kv_protect, self.num_rows, config.softmax,
        )  # fmt: skip
        return (
            1.0 + config.draft_tokens * self._draft_cost(seq_lens) + further_us / self._step_us(self.target, seq_lens)
        )


def draft_copy_config(config: EngineConfig, target: LlamaConfig, tp_size: int, packs: bool) -> LlamaConfig | None:
    """The model with the weights of `--draft-weights`, for `--draft self`; None without them.

    Args:
        target: the model that verifies.  tp_size, packs: as for `config_with_weights`.
    Raises:
        UserError: the model's weights have no more bits than the copy, or cannot be divided into groups.
    """
    if config.draft_weights == "auto" or config.draft != "self":
        return None
    # The copy is made of the values, whatever the checkpoint's format.
    plain = target.model_copy(update={"quantisation": None, "weights": config.draft_weights})
    bits = plain.quantised_bits
    if target.quantised_as is not None and target.quantised_bits <= bits:
        raise UserError(
            f"draft_weights: {config.draft_weights} copies weights of more than {bits} bits, found "
            f"{target.quantised_as}; leave it out"
        )
    copied = config.model_copy(update={"weights": config.draft_weights})
    return _with_draft_weights(copied, plain, tp_size, packs)


def check_draft_tokenizer(config: EngineConfig, target: LlamaConfig, model: LlamaConfig | None) -> None:
    """Compare the draft model's tokenizer as a run does, if both are there: a plan needs no more than the shapes.

    Args:
        model: of `draft_model_config`.
    Raises:
        UserError: another tokenizer, or one that cannot be read.
    """
    settings = draft_model_source(config)
    if settings is None or model is None or not all(map(_has_own_tokenizer, (config, settings))):
        return
    with _naming_draft():
        draft_tokenizer = open_tokenizer(settings, model)
    _check_tokenizers(config.draft, open_tokenizer(config, target), draft_tokenizer)


def _has_own_tokenizer(config: EngineConfig) -> bool:
    return config.random_weights is None and has_tokenizer(config)


def _check_tokenizers(draft: str, target: Tokenizer | None, draft_tokenizer: Tokenizer | None) -> None:
    """Check that the same ids are the same tokens.

    Raises:
        UserError: names the first token that differs.
    """
    if target is None or draft_tokenizer is None:
        which = "the model" if target is None else draft
        raise UserError(f"draft: {which} has no tokenizer to compare; use --draft self or ngram")
    expected, found = (
        {id_: token for token, id_ in each.core.get_vocab().items()} for each in (target, draft_tokenizer)
    )
    for id_ in sorted(expected.keys() | found.keys()):
        if expected.get(id_) != found.get(id_):
            token, other = ("no token" if each is None else show(each) for each in (expected.get(id_), found.get(id_)))
            raise UserError(
                f"draft: {draft}: expected the model's tokenizer, whose id {id_} is {token}, found {other}; use a "
                "smaller model of the same family"
            )
