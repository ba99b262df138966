"""Load, warm up, measure: from settings to a report (a plain dict, units in its keys)."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import gc
import itertools
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import Qwen2Config

from benchmark.ablation import cumulative_options, run_ablation
from benchmark.ceilings import Ceilings, utilisation
from benchmark.comparison import TUNED, ratios, token_agreement
from benchmark.environment import SIMULATED, environment, is_simulated
from benchmark.generate import FIXED_LENGTH, Subject, generate, load_stock, timed_generation
from benchmark.graph_nodes import graph_node_rows
from benchmark.metrics import PeakMemory, summarise
from benchmark.operator_profile import PROFILED_TOKENS, check_profiler, profile
from benchmark.ranks import Ranks, check_single, parallel_report
from benchmark.sample_checkpoint import sample_checkpoint
from benchmark.workload import Workload, load_tokenizer, make_workload, read_prompts
from npu_tuned_model import TuningOptions, load_model
from npu_tuned_model.check_finite import FiniteCheck
from npu_tuned_model.checkpoint_layout import Quantised, check_tp_size, converted_tp_size, held_as
from npu_tuned_model.config import read_config, resolve_checkpoint
from npu_tuned_model.deterministic import determinism_in_force, make_deterministic
from npu_tuned_model.device import resolve_device, resolve_dtype
from npu_tuned_model.errors import UserError
from npu_tuned_model.graph import GraphOptions, has_cpp_compiler
from npu_tuned_model.kv_cache import FixedKVCache
from npu_tuned_model.npu_setup import NpuSetup, PreparedSetup, prepare_weights, set_up
from npu_tuned_model.tuning import InForce, what_is_in_force
from npu_tuned_model.work import work_of


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
        check_single(ranks.single, _model_entry(prepared), _workload_entry(prepared))
    return prepared


def run(prepared: Prepared, console: Console, trace: Path | None = None) -> dict[str, Any]:
    """Measure. The report's keys are documented by what benchmark/report.py shows of them.

    Args:
        trace: file for a profile's trace, where settings.profile asks for one.

    Raises:
        UserError: for a broken checkpoint, or NaN/Inf where --check_finite looks for it.
    """
    settings, device, workload = prepared.settings, prepared.device, prepared.workload
    notes = list(prepared.notes)
    graph = settings.execute_mode == "dynamo"
    if graph and device.type == "cpu" and not has_cpp_compiler():
        graph = False
        notes.append(
            "running eager: compiling for the CPU needs a C++ compiler and none was found; install g++ (Debian, "
            "Ubuntu: apt-get install g++) or set CXX"
        )
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/yellow]")
    memory = PeakMemory(device)
    memory.reset()
    before_load = memory.read_bytes()
    model = _load_tuned(prepared, notes, console)
    prepare_weights(prepared.process, model)
    model.freeze_gc = settings.setup.frozen_gc
    model.attention = settings.attention
    load_peak = memory.read_bytes()
    if settings.check_finite:
        console.print("Checking every layer's results for NaN and Inf (eager, not timed)")
        with FiniteCheck(model):
            generate(model, workload, device=device)
        notes.append("--check_finite: no NaN or Inf in any layer's result over one whole generation")
    if graph:
        model.run_graph(settings.graph, deterministic=settings.deterministic)
    else:
        model.run_eager(deterministic=settings.deterministic)

    memory.reset()
    tuned = Subject(TUNED, model)
    console.print(f"Warming up the tuned model{' (compiles prefill and decode)' if graph else ''}")
    timed_generation(tuned, workload, device=device)
    tuned_peak = memory.read_bytes()
    graphs_warm = _graphs(model)

    subjects = [tuned]
    if settings.compare:
        console.print(f"Warming up stock transformers {transformers.__version__}")
        subjects = [*load_stock(prepared.folder, device=device, dtype=prepared.dtype), tuned]
        for subject in subjects[:-1]:
            timed_generation(subject, workload, device=device)
    ranks, config = prepared.ranks, prepared.config
    work = work_of(
        config,
        dtype=prepared.dtype,
        batch=workload.batch_size,
        length=workload.input_max_len,
        shard=ranks.shard,
        quantised=_held(prepared),
    )
    rows = workload.batch_size * workload.input_max_len
    ceilings = Ceilings(config, work, device=device, dtype=prepared.dtype, rows=rows, shard=ranks.shard)
    memory.reset()
    rounds, tokens, limits = _rounds(subjects, workload, ceilings, settings.rounds, device, console)
    all_peak = memory.read_bytes()

    # the mean number of tokens that a decode step finds in the cache; padding is not part of them
    cached = sum(workload.prompt_tokens) + workload.batch_size * (workload.max_new_tokens - 1) / 2
    for figures in rounds.values():
        for values, limit in zip(figures, limits):
            values.update(utilisation(values, limit, work, tokens_in_cache=cached))
    report: dict[str, Any] = {
        "format": 1,
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment(device),
        "model": _model_entry(prepared),
        "workload": _workload_entry(prepared),
        "notes": notes,
        "execution": {
            "asked": settings.execute_mode,
            "mode": model.steps.backend or "eager",
            "graphs": dict(_graphs(model)),
            "cpu_decode": getattr(model.steps, "cpu_decode", None) is not None,
            "graphs_after_warm_up": sum(_graphs(model).values()) - sum(graphs_warm.values()),
            "first_call_s": dict(getattr(model.steps, "seconds", {})),
        },
        "in_force": [dataclasses.asdict(row) for row in _in_force(prepared, model)],
        "memory": {
            "measured": memory.kind,
            "weights_bytes": work.weight_bytes,
            "kv_cache_bytes": _kv_cache_bytes(model, workload, work.kv_bytes_per_token),
            "before_load_bytes": before_load,
            "load_peak_bytes": load_peak,
            "tuned_peak_bytes": tuned_peak,
            "all_models_peak_bytes": all_peak,
        },
        "work": {
            "decode_weights_read_bytes": work.step_weight_bytes,
            "decode_mean_read_bytes": work.decode_bytes(cached),
            "prefill_flop": work.prefill_flops,
        },
        "ceilings": {"rounds": limits, "summary": summarise(limits)},
        "variants": {name: {"rounds": figures, "summary": summarise(figures)} for name, figures in rounds.items()},
        "tensor_parallel": None,
        "comparison": None,
        "ablation": None,
        "profile": None,
        "sample_text": None,
    }
    if ranks.size > 1:
        report["tensor_parallel"] = parallel_report(ranks, report, config.hidden_size, work, device, prepared.dtype)
    if settings.model_path is not None:
        report["sample_text"] = prepared.tokenizer.decode(tokens[TUNED][0], skip_special_tokens=True)
    if settings.compare:
        agreement = token_agreement(subjects, tokens, workload, device)
        # the host's times for an NPU's work say nothing about which is faster
        speed_up = dict.fromkeys(("prefill", "decode")) if is_simulated(device) else ratios(rounds)
        report["comparison"] = {**speed_up, "tokens": agreement}
    if settings.profile:
        report["profile"] = _profile(model, workload, device, trace)
    if settings.ablation:
        del model, tuned, subjects, ceilings
        torch._dynamo.reset()
        gc.collect()
        report["ablation"] = _ablation(prepared, graph, console)
    return report


def _profile(model: Any, workload: Workload, device: torch.device, trace: Path | None) -> list[dict[str, Any]] | None:
    def one_generation() -> None:
        generate(model, workload, device=device, steps=min(workload.max_new_tokens, PROFILED_TOKENS))

    if trace is None:
        # another rank's profile needs this one's part in the sums
        one_generation()
        return None
    return profile(one_generation, device, trace)


def _model_entry(prepared: Prepared) -> dict[str, Any]:
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


def _held(prepared: Prepared) -> Quantised:
    return held_as(prepared.config, prepared.settings.weight_dtype, prepared.settings.int8_embeddings)


def _weight_dtype(prepared: Prepared) -> str:
    held, dtype = _held(prepared), prepared.settings.dtype
    if not held.linears:
        return dtype
    return "int8" if held.embeddings else f"int8, embedding and output layer {dtype}"


def _workload_entry(prepared: Prepared) -> dict[str, Any]:
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


def _load_tuned(prepared: Prepared, notes: list[str], console: Console) -> Any:
    console.print(f"Loading {escape(str(prepared.folder))}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = load_model(
            prepared.folder,
            device=prepared.device,
            dtype=prepared.dtype,
            options=TuningOptions(),
            parallel=prepared.ranks.parallel,
            lora=prepared.settings.lora,
            weight_dtype=prepared.settings.weight_dtype,
            int8_embeddings=prepared.settings.int8_embeddings,
        )
    for warning in caught:
        notes.append(str(warning.message))
        console.print(f"[yellow]{escape(str(warning.message))}[/yellow]")
    return model


def _in_force(prepared: Prepared, model: Any) -> list[InForce]:
    rows = what_is_in_force(
        model.options,
        prepared.device,
        model.steps.backend,
        model.steps.torchair_mode,
        packed=model.is_packed(),
        tied=prepared.config.tie_word_embeddings,
        why_no_native_kernels=model.why_no_native_kernels(),
    )
    return [*rows, determinism_in_force(model), *_npu_graph_rows(prepared, model), *prepared.process.in_force()]


def _npu_graph_rows(prepared: Prepared, model: Any) -> list[InForce]:
    """Which attention operators an NPU runs, how its graphs are made, and what they consist of."""
    if model.device.type != "npu":
        return []
    options, workload = prepared.settings.graph, prepared.workload
    rows = [InForce("attention", True, True, str(model.attention_plan()))]
    if model.steps.backend == "torchair":
        cache = options.compile_cache
        rows += [
            InForce("graph_mode", True, True, options.torchair_mode),
            InForce("frozen_parameter", options.frozen_parameter, options.frozen_parameter, "weights stay in place"),
            InForce(
                "compile_cache", cache is not None, cache is not None, "switched off" if cache is None else str(cache)
            ),
        ]
    if model.steps.torchair_mode == "max-autotune":
        rows += graph_node_rows(
            prepared.folder,
            model.options,
            attention=prepared.settings.attention,
            dtype=prepared.settings.dtype,
            batch=workload.batch_size,
            prompt=workload.input_max_len,
            new_tokens=workload.max_new_tokens,
        )
    return rows


def _graphs(model: Any) -> Counter[str]:
    return Counter(getattr(model.steps, "graphs", {}))


def _rounds(
    subjects: list[Subject],
    workload: Workload,
    ceilings: Ceilings,
    count: int,
    device: torch.device,
    console: Console,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Tensor], list[dict[str, Any]]]:
    """Every subject and the ceilings in turn, `count` times: figures and last tokens by subject, ceilings by round."""
    figures: dict[str, list[dict[str, Any]]] = {subject.name: [] for subject in subjects}
    tokens: dict[str, Tensor] = {}
    limits = []
    with _progress(console) as progress:
        task = progress.add_task("measuring", total=count * (len(subjects) + 1))
        for number in range(1, count + 1):
            for subject in subjects:
                progress.update(task, description=f"round {number} of {count}: {subject.name}")
                result, tokens[subject.name] = timed_generation(subject, workload, device=device)
                figures[subject.name].append(result)
                progress.advance(task)
            progress.update(task, description=f"round {number} of {count}: memory and matmul limits")
            limits.append(ceilings.measure())
            progress.advance(task)
    return figures, tokens, limits


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _kv_cache_bytes(model: Any, workload: Workload, bytes_per_token: int) -> int:
    capacity = workload.input_max_len + workload.max_new_tokens
    cache = model.new_cache(workload.batch_size, capacity)
    if isinstance(cache, FixedKVCache):
        return sum(tensor.nbytes for tensor in cache.keys + cache.values)
    return workload.batch_size * capacity * bytes_per_token


def _ablation(prepared: Prepared, graph: bool, console: Console) -> list[dict[str, Any]]:
    rows = 2 + len(cumulative_options(prepared.device, graph=graph))
    console.print(f"Ablation: {rows} variants, each measured in turn with the one above it")
    with _progress(console) as progress:
        task = progress.add_task("ablation", total=rows)
        done = itertools.count()

        def on_row(label: str) -> None:
            progress.update(task, description=f"ablation: {label}", completed=next(done))

        return run_ablation(
            prepared.folder,
            prepared.workload,
            device=prepared.device,
            dtype=prepared.dtype,
            rounds=prepared.settings.rounds,
            graph=prepared.settings.graph if graph else None,
            # each model has its own say about what can be prepared
            prepare=lambda model: prepare_weights(copy.deepcopy(prepared.process), model),
            on_row=on_row,
        )
