"""Benchmark Qwen2 over several cards: deepspeed --num_gpus=N benchmark/deepspeed/benchmark_qwen.py --help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click

from benchmark.command import OneLineErrors, user_errors
from benchmark.run_options import run_options
from benchmark.setup_options import setup_options

if TYPE_CHECKING:
    from npu_tuned_model.npu_setup import NpuSetup


@click.command(cls=OneLineErrors)
@click.option("--model_path", help="Checkpoint folder, plain or converted for this number of ranks, or Hub id.")
@run_options
@setup_options
@click.option(
    "--single_report",
    type=click.Path(path_type=Path),
    help="report.json of the same workload on one rank: the report then says how throughput grows with the ranks.",
)
@click.option(
    "--timeout_s",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    help="A rank that waits longer for another ends.",
)
@click.option("--local_rank", type=int, hidden=True, help="The launcher passes it; LOCAL_RANK says the same.")
def main(
    output_dir: Path | None,
    force: bool,
    device: str,
    timeout_s: int,
    single_report: Path | None,
    local_rank: int | None,
    setup: NpuSetup,
    **options: Any,
) -> None:
    """Time prefill and decode of the tuned Qwen2 divided over several cards (tensor parallelism).

    Rank 0 reports. The classic workload is --batch_size=4 --input_max_len=1024 --max_new_tokens=1024.
    """
    import dataclasses

    from rich.console import Console

    from benchmark import report as console_report
    from benchmark import runner
    from benchmark.deepspeed.process_group import errors_of_rank, join
    from benchmark.output import OutputFolder
    from benchmark.prepare import Settings, prepare
    from benchmark.ranks import read_single

    with user_errors(), errors_of_rank():
        single = None if single_report is None else read_single(single_report)
        graph, deterministic = options["execute_mode"] == "dynamo", options["deterministic"]
        ranks, device_name, process = join(device, setup, timeout_s, graph=graph, deterministic=deterministic)
        first = ranks.shard.rank == 0
        console = Console(quiet=not first)
        settings = Settings(device=device_name, compare=False, ablation=False, setup=setup, **options)
        prepared = prepare(settings, console, dataclasses.replace(ranks, single=single), process)
        output = OutputFolder(output_dir, force=force) if first else None
        try:
            report = runner.run(prepared, console, None if output is None else output.trace)
            if output is None:
                return
            console_report.print_report(report, console)
            files = output.write(report)
        finally:
            if output is not None:
                output.discard()
    console.print(f"Written: {', '.join(str(file) for file in files)}", soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    main()
