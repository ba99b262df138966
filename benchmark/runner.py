"""Load, warm up, measure: from a prepared run to a report (a plain dict, units in its keys)."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import gc
import itertools
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from benchmark.ablation import cumulative_options, run_ablation
from benchmark.ceilings import Ceilings, utilisation
from benchmark.comparison import TUNED, ratios, token_agreement
from benchmark.environment import environment, is_simulated
from benchmark.generate import Subject, generate, load_stock, timed_generation
from benchmark.graph_nodes import graph_node_rows
from benchmark.metrics import PeakMemory, summarise
from benchmark.operator_profile import PROFILED_TOKENS, profile
from benchmark.prepare import Prepared, held, model_entry, workload_entry
from benchmark.ranks import parallel_report
from benchmark.workload import Workload
from npu_tuned_model import TuningOptions, load_model
from npu_tuned_model.check_finite import FiniteCheck
from npu_tuned_model.deterministic import determinism_in_force
from npu_tuned_model.graph import has_cpp_compiler
from npu_tuned_model.kv_cache import FixedKVCache
from npu_tuned_model.npu_setup import prepare_weights
from npu_tuned_model.tuning import InForce, what_is_in_force
from npu_tuned_model.work import work_of


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
        quantised=held(prepared),
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
        "model": model_entry(prepared),
        "workload": workload_entry(prepared),
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
    rows.append(determinism_in_force(model))
    if prepared.device.type == "cuda" and model.steps.backend is not None:
        recorded = prepared.settings.graph.cuda_graphs
        why = "decode's kernels are recorded and started together" if recorded else "switched off"
        rows.append(InForce("cuda_graphs", recorded, recorded, why))
    return [*rows, *_npu_graph_rows(prepared, model), *prepared.process.in_force()]


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
