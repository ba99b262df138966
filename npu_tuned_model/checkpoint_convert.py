"""Convert checkpoints: fuse q, k, v and gate, up for a number of ranks, quantised or not, and take them apart again.

All of it works on the files, row by row: no model is built and memory stays small whatever the model's size.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from npu_tuned_model.checkpoint_dtypes import BY_NAME, Dtype, name_of
from npu_tuned_model.checkpoint_files import WeightSource
from npu_tuned_model.checkpoint_goals import check_tensors, goals_of
from npu_tuned_model.checkpoint_layout import (
    FLOATS,
    INT8,
    LAYOUT_KEY,
    Layout,
    Quantised,
    Shard,
    check_tp_size,
    fused_suffix,
    layout_of,
    parameter_names,
    pieces_of,
    scale_name,
    split_name,
)
from npu_tuned_model.checkpoint_rows import NewTensor, RowReader, Rows, write_safetensors
from npu_tuned_model.config import AnyConfig, read_json, read_sizes
from npu_tuned_model.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
OnBytes = Callable[[int], None]
Recipes = dict[str, list[Rows]]


def merge_recipes(config: AnyConfig, tp_size: int) -> Recipes:
    """The rows that make up each fused tensor for `tp_size` ranks, rank by rank: q, k, v or gate, up of each."""
    recipes = {}
    for name in parameter_names(config):
        if fused_suffix(split_name(name)[0]) is not None:
            ranks = (Shard(rank, tp_size) for rank in range(tp_size))
            pieces = [piece for rank in ranks for piece in pieces_of(name, config, rank)]
            recipes[name] = [Rows(piece.source, piece.start, piece.length) for piece in pieces]
    return recipes


def unmerge_recipes(config: AnyConfig, tp_size: int) -> Recipes:
    """The reverse of `merge_recipes`. Of KV heads that several ranks hold, the first rank's are taken."""
    recipes: Recipes = {}
    for name, parts in merge_recipes(config, tp_size).items():
        fused_row = 0
        for part in parts:
            found = recipes.setdefault(part.source, [])
            if part.start == sum(rows.length for rows in found):
                found.append(Rows(name, fused_row, part.length))
            fused_row += part.length
    return recipes


def new_tensors(source: WeightSource, recipes: Recipes, dtype: Dtype | None, quantised: Quantised) -> list[NewTensor]:
    """The tensors of a converted checkpoint: those of `recipes`, and those that no recipe uses, as they are."""
    stored = source.tensors
    used = {rows.source for parts in recipes.values() for rows in parts}
    kept = {name: [Rows(name, 0, tensor.shape[0])] for name, tensor in stored.items() if name not in used}
    # In the order of the source's files, so that each of them is read from beginning to end.
    order = {name: position for position, name in enumerate(stored)}
    tensors = []
    for name, parts in sorted({**recipes, **kept}.items(), key=lambda item: order[item[1][0].source]):
        first = stored[parts[0].source]
        shape = (sum(part.length for part in parts), *first.shape[1:])
        if quantised.holds(name):
            tensors += _quantised(name, shape, parts)
        else:
            tensors.append(NewTensor(name, shape, dtype or first.dtype, parts))
    return tensors


def _quantised(name: str, shape: tuple[int, ...], parts: list[Rows]) -> list[NewTensor]:
    """A weight's integers and their scales."""
    from npu_tuned_model.quantise import SCALE_DTYPE, quantise_rows, row_scales

    return [
        NewTensor(name, shape, BY_NAME[INT8], parts, lambda rows: quantise_rows(rows)[0]),
        NewTensor(scale_name(name), shape[:1], BY_NAME[name_of(SCALE_DTYPE)], parts, row_scales),
    ]


class Conversion:
    """One checkpoint folder to be written from another. The constructor checks all that can be known before.

    Attributes:
        tp_size: the number of ranks that the fused rows are, or were, laid out for.
        total_bytes: of the tensors to be written.
    """

    def __init__(
        self,
        source: Path,
        output: Path,
        *,
        tp_size: int = 1,
        unmerge: bool = False,
        dtype: str | None = None,
        quantised: Quantised = FLOATS,
        max_shard_bytes: int,
        force: bool = False,
    ) -> None:
        """
        Args:
            source: a plain checkpoint, or with `unmerge` a converted one.
            output: the folder to be made.
            tp_size: the number of ranks to lay the fused rows out for; with `unmerge` the source knows it.
            dtype: of the weights written, such as "bfloat16"; by default as stored.
            quantised: which weights are to become int8 (see quantise.py); not with `unmerge`.
            max_shard_bytes: of one weight file; a single larger tensor gets a file of its own.
            force: whether `output` may replace what is there.

        Raises:
            CheckpointError: a source that is missing, damaged, or of the wrong kind.
            UserError: an output that is in the way, too little room, or a tp_size that does not divide the model.
        """
        self.source, self.output, self.force, self.unmerge = Path(source), Path(output), force, unmerge
        self.dtype = None if dtype is None else BY_NAME[dtype]
        self.max_shard_bytes = max_shard_bytes
        self.quantised = quantised
        config = read_sizes(self.source)
        layout = layout_of(config)
        if unmerge and layout is None:
            raise CheckpointError(f"{source} is a plain checkpoint: there is nothing to unmerge")
        if layout is not None and layout.quantised.linears:
            raise CheckpointError(
                f"{source} is already converted, to int8 for tp_size {layout.tp_size}: convert the plain checkpoint, "
                "which can't be had back from it"
            )
        if not unmerge and layout is not None:
            raise CheckpointError(
                f"{source} is already converted, for tp_size {layout.tp_size}: convert the plain checkpoint, or get it "
                "back with --unmerge of tools/merge_qkv_weight.py"
            )
        self.tp_size = tp_size if layout is None else layout.tp_size
        check_tp_size(config, self.tp_size)
        self._check_output()
        self.weights = WeightSource(self.source)
        goals = goals_of(parameter_names(config), config, Shard(0, self.tp_size), converted=unmerge)
        check_tensors(self.source, self.weights.tensors, goals)
        recipes = unmerge_recipes(config, self.tp_size) if unmerge else merge_recipes(config, self.tp_size)
        self.tensors = new_tensors(self.weights, recipes, self.dtype, quantised)
        self.total_bytes = sum(tensor.nbytes for tensor in self.tensors)
        free = shutil.disk_usage(_existing_folder(self.output)).free
        if free < self.total_bytes:
            raise UserError(
                f"{output} needs {self.total_bytes / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB left: make room "
                "or take another --output_path"
            )

    def _check_output(self) -> None:
        source, output = self.source.resolve(), self.output.resolve()
        if source == output or source in output.parents or output in source.parents:
            raise UserError(f"output {self.output} and input {self.source} overlap: take another --output_path")
        if self.output.is_file():
            raise UserError(f"{self.output} is a file: give the folder to write to")
        if self.output.exists() and not self.force:
            raise UserError(f"{self.output} exists: take another --output_path, or --force to replace it")

    def write(self, on_bytes: OnBytes = lambda count: None) -> None:
        """Write the checkpoint; the output folder appears when it is complete, or not at all.

        Args:
            on_bytes: told how many bytes of tensors were written since the last call.

        Raises:
            UserError: when it can't be written, say because the disk is full.
        """
        try:
            with _new_folder(self.output, force=self.force) as folder, RowReader(self.weights) as reader:
                for file, tensors in self._files(folder):
                    write_safetensors(file, tensors, reader, on_bytes)
                for file in self.source.iterdir():
                    if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name != "config.json":
                        shutil.copy2(file, folder / file.name)
                # Last: what stays of an interrupted conversion has no config.json and does not load.
                (folder / "config.json").write_text(self._config_json(), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self.output} can't be written ({error.strerror or error}), nothing is left of it: make room or take "
                "another --output_path"
            ) from error

    def _files(self, folder: Path) -> list[tuple[Path, list[NewTensor]]]:
        """The weight files to write, and the index of them where there is more than one."""
        groups: list[list[NewTensor]] = [[]]
        for tensor in self.tensors:
            size = sum(other.nbytes for other in groups[-1])
            if groups[-1] and size + tensor.nbytes > self.max_shard_bytes:
                groups.append([])
            groups[-1].append(tensor)
        if len(groups) == 1:
            return [(folder / "model.safetensors", groups[0])]
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        weight_map = {tensor.name: file for file, group in zip(names, groups) for tensor in group}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        return [(folder / name, group) for name, group in zip(names, groups)]

    def _config_json(self) -> str:
        config = read_json(self.source / "config.json")
        config.pop(LAYOUT_KEY, None)
        if not self.unmerge:
            config[LAYOUT_KEY] = Layout(self.tp_size, self.quantised).entry()
        if self.dtype is not None:
            config["dtype" if "dtype" in config else "torch_dtype"] = self.dtype.name
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def verify(plain: Path, converted: Path, on_bytes: OnBytes = lambda count: None) -> int:
    """Compare a converted checkpoint with the plain one it was made from, every tensor of every rank.

    Weights that were cast or quantised are compared with the plain ones, cast or quantised in the same way.

    Returns:
        the number of tensors of `converted` that were compared: all of them.

    Raises:
        CheckpointError: the two are not of one model, or differ; the message names the first tensor that does.
    """
    import torch

    config = read_sizes(converted)
    layout = layout_of(config)
    if layout is None:
        raise CheckpointError(f"{converted} is a plain checkpoint: give a converted one to verify")
    expected_source, found_source = WeightSource(plain), WeightSource(converted)
    check_tensors(plain, expected_source.tensors, goals_of(parameter_names(config), config))
    goals = goals_of(parameter_names(config, layout.quantised), config, Shard(0, layout.tp_size), converted=True)
    check_tensors(converted, found_source.tensors, goals, layout.quantised)
    tensors = new_tensors(expected_source, merge_recipes(config, layout.tp_size), None, layout.quantised)
    if {tensor.name for tensor in tensors} != set(found_source.tensors):
        raise CheckpointError(f"{converted} and {plain} do not hold the same weights: convert again")
    with RowReader(expected_source) as expected, RowReader(found_source) as found:
        for tensor in tensors:
            row = 0
            # compared as they are stored, whatever dtype the conversion cast them to
            tensor = tensor._replace(dtype=found_source.tensors[tensor.name].dtype)
            for part in tensor.rows:
                for theirs in expected.chunks(part):
                    (ours,) = found.chunks(Rows(tensor.name, row, len(theirs)), count=len(theirs))
                    if not torch.equal(_bits(tensor.made_of(theirs)), _bits(ours)):
                        raise CheckpointError(f"{converted}: {tensor.name} differs from {plain}: convert again")
                    on_bytes(ours.nbytes)
                    row += len(theirs)
    return len(tensors)


def _bits(tensor: Tensor) -> Tensor:
    """Bytes, of which also a NaN equals itself."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def _new_folder(output: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside `output` that becomes `output` when the block ends well, and is removed when it does not."""
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield work
        work.chmod(0o755)
        replaced = work.with_name(f"{work.name}-replaced")
        if not (force and output.exists()):
            os.rename(work, output)
            return
        os.rename(output, replaced)
        try:
            os.rename(work, output)
        except OSError:
            os.rename(replaced, output)
            raise
        shutil.rmtree(replaced)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _existing_folder(path: Path) -> Path:
    return next(folder for folder in path.resolve().parents if folder.exists())
