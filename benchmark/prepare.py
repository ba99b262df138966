"""From settings to a checked plan of a run: everything that can be found wrong before anything large is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import Qwen2Config

from benchmark.environment import SIMULATED, is_simulated
from benchmark.generate import FIXED_LENGTH
from benchmark.operator_profile import check_profiler
from benchmark.ranks import Ranks, check_single
from benchmark.sample_checkpoint import sample_checkpoint
from benchmark.workload import Workload, load_tokenizer, make_workload, read_prompts
from npu_tuned_model.checkpoint_layout import Quantised, check_tp_size, converted_tp_size, held_as
from npu_tuned_model.config import read_config, resolve_checkpoint
from npu_tuned_model.deterministic import make_deterministic
from npu_tuned_model.device import resolve_device, resolve_dtype
from npu_tuned_model.errors import UserError
from npu_tuned_model.graph import GraphOptions
from npu_tuned_model.npu_setup import NpuSetup, PreparedSetup, set_up


@dataclass(frozen=True)
class Settings:
    """What was asked for; see the command's --help for each."""

    model_path: str | None
    execute_mode: str
    device: str
    dtype: str
    batch_size: int
    input_max_len: int
    max_new_tokens: int
    prompts: Path | None
    ablation: bool
    compare: bool
    rounds: int
    check_finite: bool
    setup: NpuSetup
    graph: GraphOptions
    attention: str
    lora: Path | None = None
    weight_dtype: str | None = None
    int8_embeddings: bool = True
    deterministic: bool = False
    profile: bool = False


@dataclass(frozen=True)
class Prepared:
    """Settings checked against the machine and the checkpoint; nothing large has been loaded yet."""

    settings: Settings
    device: torch.device
    dtype: torch.dtype
    folder: Path
    config: Qwen2Config
    tokenizer: Any
    workload: Workload
    notes: list[str]
    ranks: Ranks
    process: PreparedSetup


def prepare(
    settings: Settings, console: Console, ranks: Ranks | None = None, process: PreparedSetup | None = None
) -> Prepared:
    """Check everything that can be checked quickly; builds the sample checkpoint when no model was given.

    Args:
        ranks: this process's place among those that run the model together, each of which calls this and `run`; by
            default it runs the model alone.
        process: how this process was set up where that had to be earlier; by default it is done here.

    Raises:
        UserError: for anything that the user has to change.
    """
    transformers.logging.set_verbosity_error()
    ranks = ranks or Ranks()
    device, dtype = resolve_device(settings.device), resolve_dtype(settings.dtype)
    if settings.profile:
        check_profiler(device)
    if process is None:
        if settings.deterministic:
            make_deterministic(device)
        process = set_up(settings.setup, device)
    prompts = None if settings.prompts is None else read_prompts(settings.prompts)
    notes = [SIMULATED] if is_simulated(device) else []
    if settings.model_path is None:
        with ranks.first_rank_first():
            folder = sample_checkpoint(
                lambda path: console.print(f"Building a sample checkpoint of Qwen2-0.5B's shape (1 GB, once): {path}")
            )
        notes.append(
            "no --model_path: a sample checkpoint with Qwen2-0.5B's shape and random weights; its text means nothing"
        )
    else:
        folder = resolve_checkpoint(settings.model_path)
    config = read_config(folder)
    check_tp_size(config, ranks.size)
    if settings.compare and converted_tp_size(config) is not None:
        raise UserError(f"stock transformers can't read the converted checkpoint {folder}: pass --compare=none")
    if settings.lora is not None and (settings.compare or settings.ablation):
        raise UserError("--lora changes the tuned model only: pass --compare=none and no --ablation")
    if settings.weight_dtype is not None and settings.ablation:
        raise UserError("--ablation measures the model with its weights as they are: pass no --weight_dtype")
    tokenizer = load_tokenizer(folder)
    workload = make_workload(
        tokenizer,
        batch_size=settings.batch_size,
        input_max_len=settings.input_max_len,
        max_new_tokens=settings.max_new_tokens,
        context=config.max_position_embeddings,
        prompts=prompts,
        source="built-in texts" if settings.prompts is None else str(settings.prompts),
    )
    notes += workload.warnings
    prepared = Prepared(settings, device, dtype, folder, config, tokenizer, workload, notes, ranks, process)
    if ranks.single is not None:
        check_single(ranks.single, model_entry(prepared), workload_entry(prepared))
    return prepared


def model_entry(prepared: Prepared) -> dict[str, Any]:
    """What the report says of the model."""
    return {
        "path": None if prepared.settings.model_path is None else str(prepared.settings.model_path),
        "random_weights": prepared.settings.model_path is None,
        "layers": prepared.config.num_hidden_layers,
        "hidden_size": prepared.config.hidden_size,
        "heads": prepared.config.num_attention_heads,
        "kv_heads": prepared.config.num_key_value_heads,
        "vocabulary": prepared.config.vocab_size,
        "tied_embeddings": bool(prepared.config.tie_word_embeddings),
        "dtype": prepared.settings.dtype,
        "weight_dtype": _weight_dtype(prepared),
        "lora": None if prepared.settings.lora is None else str(prepared.settings.lora),
    }


def held(prepared: Prepared) -> Quantised:
    """Which weights are int8 once they are loaded."""
    return held_as(prepared.config, prepared.settings.weight_dtype, prepared.settings.int8_embeddings)


def _weight_dtype(prepared: Prepared) -> str:
    quantised, dtype = held(prepared), prepared.settings.dtype
    if not quantised.linears:
        return dtype
    return "int8" if quantised.embeddings else f"int8, embedding and output layer {dtype}"


def workload_entry(prepared: Prepared) -> dict[str, Any]:
    """What the report says of the workload."""
    return {
        "batch_size": prepared.workload.batch_size,
        "input_max_len_tokens": prepared.workload.input_max_len,
        "max_new_tokens": prepared.workload.max_new_tokens,
        "prompt_tokens_per_row": prepared.workload.prompt_tokens,
        "prompts": prepared.workload.source,
        "chat_template": prepared.workload.chat_template,
        "rounds": prepared.settings.rounds,
        "decoding": f"greedy; {FIXED_LENGTH}",
    }
