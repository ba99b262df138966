"""Where a checkpoint's tensors go in the tuned model, and whether they are what it asks for; headers tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from npu_tuned_model.checkpoint_files import StoredTensor, not_a_weight
from npu_tuned_model.checkpoint_layout import (
    FLOATS,
    INT8,
    VOCABULARY,
    WHOLE,
    Piece,
    Quantised,
    Shard,
    pieces_of,
    some,
    split_name,
)
from npu_tuned_model.config import AnyConfig
from npu_tuned_model.errors import CheckpointError

_WEIGHT_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Old checkpoints carry this table; the model computes its own.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class Goal(NamedTuple):
    """Where a piece of a checkpoint goes: the parameter of that name."""

    target: str
    piece: Piece


def goals_of(names: Iterable[str], config: AnyConfig, shard: Shard = WHOLE, converted: bool = False) -> dict[str, Goal]:
    """Checkpoint name -> Goal for the parameters `names` of the tuned model; tied ones have one target."""
    goals = {}
    for name in names:
        for piece in pieces_of(name, config, shard, converted=converted):
            goals[piece.source] = Goal(target_of(name, config), piece)
    return goals


def target_of(name: str, config: AnyConfig) -> str:
    """The parameter that holds what `name` names: the embedding's for a tied output layer."""
    module_name, attribute = split_name(name)
    return f"{VOCABULARY[0]}.{attribute}" if config.tie_word_embeddings and module_name == VOCABULARY[1] else name


def check_tensors(
    folder: Path, tensors: dict[str, StoredTensor], goals: dict[str, Goal], quantised: Quantised = FLOATS
) -> None:
    """Raise CheckpointError where the tensors of a checkpoint are not what `goals` ask for.

    Args:
        quantised: which of them have to be int8.
    """
    left_over = [name for name in tensors if name not in goals and not name.endswith(_IGNORED_SUFFIX)]
    if left_over:
        raise CheckpointError(f"{folder} has weights that the model of its config.json does not: {some(left_over)}")
    # Of tied parameters one name is enough.
    needed: dict[tuple[str, int], str] = {}
    for name, (target, piece) in goals.items():
        needed.setdefault((target, piece.target_start), name)
    coming = {(target, piece.target_start) for name, (target, piece) in goals.items() if name in tensors}
    missing = [name for place, name in needed.items() if place not in coming]
    if missing:
        raise CheckpointError(f"{folder} lacks weights that its config.json asks for: {some(missing)}")
    for name, stored in tensors.items():
        if name not in goals:
            continue
        expected = goals[name].piece.source_shape
        if quantised.holds(name) and stored.dtype.name != INT8:
            raise CheckpointError(f"{stored.file}: {name} is of {stored.dtype}, config.json says int8: convert again")
        if not quantised.holds(name) and stored.dtype.name not in _WEIGHT_DTYPES:
            raise not_a_weight(stored.file, name, stored.dtype)
        if stored.shape != expected:
            raise CheckpointError(
                f"{stored.file}: {name} has shape {stored.shape}, config.json asks for {expected}: "
                "the two are not of the same model"
            )
