"""A folder whose linear weights are quantised: checked from the file headers, then read part by part."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from alspec.errors import UserError, show
from alspec.interrupts import interrupts_wait
from alspec.models.checkpoint.checkpoint import (
    Checkpoint,
    check_tensors,
    check_tied_head,
    expected_tensors,
    head_as_embedding,
    is_tolerated,
    read_headers,
)
from alspec.models.checkpoint.quantised.awq_reader import AwqReader
from alspec.models.checkpoint.quantised.compressed_tensors_reader import CompressedTensorsReader
from alspec.models.checkpoint.quantised.fp8_reader import Fp8Reader
from alspec.models.checkpoint.quantised.gptq_reader import GptqReader
from alspec.models.checkpoint.quantised.packed_weight import PackedWeight
from alspec.models.checkpoint.quantised.quantisation_config import QuantisationConfig, SchemeTarget, WeightScheme
from alspec.models.checkpoint.quantised.weight_reader import Range, WeightReader, ceil_div
from alspec.models.checkpoint.safetensors_header import ALL_DTYPES, FLOAT_DTYPES, ExpectedTensor, TensorEntry
from alspec.models.llama_config import LlamaConfig

__all__ = ["QuantisedCheckpoint", "with_stored_formats"]

_READERS: dict[str, type[WeightReader]] = {
    "fp8": Fp8Reader,
    "pack-quantized": CompressedTensorsReader,
    "awq": AwqReader,
    "gptq": GptqReader,
}
# Tensors of quantised activations and of a quantised KV cache: weights alone are read.
_UNUSED = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale",
    ".kv_scale", ".k_zero_point", ".v_zero_point", ".activation_scale",
)  # fmt: skip
_LINEAR = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "lm_head",
)  # fmt: skip
_WEIGHT, _BIAS = ".weight", ".bias"
_INVERSE = ".weight_scale_inv"
_ORDERS = ("g_idx", "weight_g_idx")


@dataclass(frozen=True)
class QuantisedCheckpoint(Checkpoint):
    """The weights of a quantised checkpoint under the names of an unquantised one.

    `tensor_slice` returns quantised weights dequantised to fp32; `packed_slice` returns them as they are.
    """

    readers: dict[str, WeightReader] = field(default_factory=dict)  # of quantised weights, by name
    stored_files: dict[str, Path] = field(default_factory=dict)  # files of quantised weights' tensors, by name

    @classmethod
    def open(cls, folder: Path, config: LlamaConfig) -> Self:
        """Check the tensors of a folder; see `Checkpoint.open`.

        Reads headers, and of the data only small tensors: repeated shapes, the groups of input channels, and biases
        that must be zeros.

        Raises:
            UserError: as `Checkpoint.open`, also for a tensor of a wrong dtype.
        """
        quantisation = config.quantisation
        assert quantisation is not None
        plain = expected_tensors(config)

        def tolerates(name: str) -> bool:
            return is_tolerated(name, config) or name.endswith(_UNUSED)

        entries, files = read_headers(folder, tolerates, ALL_DTYPES)
        stored_names = head_as_embedding(entries, files, config)
        readers = _choose_readers(plain, quantisation, entries)
        expected = {name: ExpectedTensor((shape,)) for name, shape in plain.items() if name not in readers}
        for name, reader in readers.items():
            module = name.removesuffix(_WEIGHT)
            expected |= {f"{module}.{part}": tensor for part, tensor in reader.tensors().items()}
            if quantisation.method in ("awq", "gptq"):  # these packages also store biases of models that have none
                expected.setdefault(module + _BIAS, ExpectedTensor(((reader.shape[0],),), is_optional=True))
        check_tensors(folder, entries, files, expected, tolerates)
        check_tied_head(cls(entries, files), config)
        summaries = {name: _summary(name, reader, entries) for name, reader in readers.items()}
        checkpoint = cls(
            {name: summaries.get(name) or entries[name] for name in plain},
            {name: files[name] for name in plain if name in files},
            stored_names,
            _unused(quantisation, entries),
            readers=readers,
            stored_files=files,
        )
        for name in readers:
            checkpoint._check_values(name, plain)
        return checkpoint

    def _check_values(self, name: str, plain: dict[str, tuple[int, ...]]) -> None:
        """Check a quantised weight's small tensors: a repeated shape, the groups of channels, and an unused bias."""
        module, reader = name.removesuffix(_WEIGHT), self.readers[name]
        stored = _Module(self, module, torch.device("cpu"))
        if stored.has("weight_shape") and tuple(stored.read("weight_shape").tolist()) != reader.shape:
            raise UserError(
                f"{stored.file('weight_shape')}: tensor {show(f'{module}.weight_shape')}: expected "
                f"{list(reader.shape)}, found {stored.read('weight_shape').tolist()}; "
                "use the config.json that belongs to these weights"
            )
        for part in _ORDERS:
            stored.read_order(part, reader.group_size)
        if stored.has("bias") and module + _BIAS not in plain and stored.read("bias").any():
            raise UserError(
                f"{stored.file('bias')}: tensor {show(module + _BIAS)}: expected zeros, because the model has no such "
                "bias, found other values; use the config.json that belongs to these weights"
            )

    def packed_slice(
        self, name: str, device: torch.device, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> PackedWeight:
        """Read a part of a quantised weight in its canonical form; only that part of the files is read.

        Args:
            name: of a weight in `readers`.  dim: 0 for rows, 1 for input channels; None: the whole weight.
        Raises:
            ValueError: unknown name; a range that is empty, out of range, or cuts a group of input channels.
        """
        dim, start, stop = self._range(name, dim, start, stop)
        reader = self.readers[name]
        ranges: list[Range] = [(0, size) for size in reader.shape]
        ranges[dim] = start, stop
        with interrupts_wait():
            return reader.read(_Module(self, name.removesuffix(_WEIGHT), device), ranges[0], ranges[1])

    def load(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        dim: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Read a slice onto a device in a dtype; quantised weights are dequantised there."""
        if name not in self.readers:
            return super().load(name, device, dtype, dim, start, stop)
        return self.packed_slice(name, device, dim, start, stop).dequantise(dtype)

    def _read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name not in self.readers:
            return super()._read(name, dim, start, stop)
        return self.packed_slice(name, torch.device("cpu"), dim, start, stop).dequantise(torch.float32)


@dataclass(frozen=True)
class _Module:
    """`StoredTensors` of one module of a checkpoint."""

    checkpoint: QuantisedCheckpoint
    module: str
    device: torch.device

    def has(self, name: str) -> bool:
        return f"{self.module}.{name}" in self.checkpoint.stored_files

    def file(self, name: str) -> Path:
        return self.checkpoint.stored_files[f"{self.module}.{name}"]

    def read(self, name: str, *ranges: Range) -> Tensor:
        stored_name = f"{self.module}.{name}"
        return self.checkpoint._read_ranges(self.file(name), stored_name, *ranges).to(self.device)

    def read_order(self, name: str, group_size: int) -> Tensor | None:
        if not self.has(name):
            return None
        order = self.read(name).long()
        lowest, highest = int(order.min()), int(order.max())
        if highest == lowest == -1:  # not set
            return None
        num_groups = ceil_div(len(order), group_size)
        if lowest < 0 or highest >= num_groups:
            raise UserError(
                f"{self.file(name)}: tensor {show(f'{self.module}.{name}')}: expected groups 0 .. {num_groups - 1}, "
                f"found {lowest} .. {highest}; download the file again"
            )
        is_in_order = torch.equal(order, torch.arange(len(order), device=order.device) // group_size)
        return None if is_in_order else order


def with_stored_formats(folder: Path, config: LlamaConfig) -> LlamaConfig:
    """Return the configuration with what the files tell of quantised weights, and config.json does not.

    - `ignore`: modules whose weights are not quantised, if the method names none.
    - `has_order`, where files order channels though config.json denies it: some writers store groups of permuted
      channels with `desc_act: false` or `actorder: static`.

    Files that cannot be read change nothing: `QuantisedCheckpoint.open` names what is wrong with them.
    """
    quantisation = config.quantisation
    if quantisation is None:
        return config
    try:
        entries, files = read_headers(folder, lambda _: True, ALL_DTYPES)
        ordered = _ordered_schemes(entries, files, quantisation)
    except UserError:
        return config
    modules = [name.removesuffix(_WEIGHT) for name in entries if name.endswith(_WEIGHT)]
    plain = () if quantisation.names_modules else tuple(name for name in modules if _is_plain(name, entries))
    changed = {"has_order": True, "order_is_announced": False}
    groups = tuple(
        SchemeTarget(targets=group.targets, scheme=group.scheme.model_copy(update=changed))
        if group.scheme in ordered
        else group
        for group in quantisation.groups
    )
    update = {"groups": groups, "ignore": (*quantisation.ignore, *plain)}
    return config.model_copy(update={"quantisation": quantisation.model_copy(update=update)})


def _is_plain(module: str, entries: dict[str, TensorEntry]) -> bool:
    """Whether the files hold the weights of a linear module as they are."""
    stored = entries.get(module + _WEIGHT)
    return module.rpartition(".")[2] in _LINEAR and stored is not None and stored.dtype in FLOAT_DTYPES


def _may_have_order(group: SchemeTarget) -> bool:
    """Whether files can order channels that config.json leaves in order."""
    scheme = group.scheme
    return scheme.layout in ("gptq", "pack-quantized") and not scheme.has_order and scheme.group_size != -1


def _ordered_schemes(
    entries: dict[str, TensorEntry], files: dict[str, Path], quantisation: QuantisationConfig
) -> list[WeightScheme]:
    """Schemes that announce no order of channels, of which the files hold one.

    Raises:
        UserError: files, or an order, that are not what they should be.
    """
    if not any(map(_may_have_order, quantisation.groups)):
        return []
    checkpoint, found = QuantisedCheckpoint({}, {}, stored_files=files), []
    for name, entry in entries.items():
        module, _, part = name.rpartition(".")
        if part not in _ORDERS or entry.dtype != "I32" or len(entry.shape) != 1:
            continue
        scheme = quantisation.scheme_of(module)
        if scheme is None or scheme.has_order or scheme in found:
            continue
        size = WeightReader(scheme, (0, *entry.shape)).group_size
        if size and _Module(checkpoint, module, torch.device("cpu")).read_order(part, size) is not None:
            found.append(scheme)
    return found


def _unused(quantisation: QuantisationConfig, entries: dict[str, TensorEntry]) -> str | None:
    """Settings and tensors of quantised activations and of a quantised KV cache."""
    names = [name for name in entries if name.endswith(_UNUSED)]
    tensors = [f"{len(names)} tensors such as {show(names[0])}"] if names else []
    return ", ".join([*quantisation.unused, *tensors]) or None


def _choose_readers(
    plain: dict[str, tuple[int, ...]], quantisation: QuantisationConfig, entries: dict[str, TensorEntry]
) -> dict[str, WeightReader]:
    """The readers of quantised weights by name."""
    readers: dict[str, WeightReader] = {}
    for name, shape in plain.items():
        module = name.removesuffix(_WEIGHT)
        if module.rpartition(".")[2] not in _LINEAR:
            continue
        scheme = quantisation.scheme_of(module)
        if scheme is not None and (quantisation.names_modules or not _is_plain(module, entries)):
            if quantisation.method == "fp8" and scheme.rows_per_scale == -1 and f"{module}{_INVERSE}" in entries:
                # Transformers names one scale so, vLLM `weight_scale`; both multiply by it.
                scheme = scheme.model_copy(update={"scale_name": _INVERSE[1:]})
            readers[name] = _READERS[scheme.layout](scheme, (shape[0], shape[1]))
    return readers


def _summary(name: str, reader: WeightReader, entries: dict[str, TensorEntry]) -> TensorEntry:
    """An entry that stands for all tensors of a quantised weight."""
    stored = (entries.get(f"{name.removesuffix(_WEIGHT)}.{part}") for part in reader.tensors())
    kind = "fp8" if reader.scheme.layout == "fp8" else f"int{reader.scheme.bits}"
    return TensorEntry(kind, reader.shape, 0, sum(entry.num_bytes for entry in stored if entry is not None))
