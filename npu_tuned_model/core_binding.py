"""One process per card, each on cores of its own: equal, contiguous shares of the cores, in NUMA order.

Host threads that wander over all cores of an 8-card host meet each other's caches and the other socket's memory, and
decode waits for the host more than anything else does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Iterable, Sequence

from npu_tuned_model.errors import UserError

_NODES = Path("/sys/devices/system/node")


def core_share(card: int, cards: int, cores: Sequence[int]) -> list[int]:
    """The cores for the process of one card: equal shares, contiguous in the order of `cores`.

    192 cores in order on 8 cards: 0-23, 24-47, and so on. Cores that don't divide evenly are left to the system.

    Args:
        card, cards: number of the card, from 0, and how many there are.
        cores: the cores that may be used, in NUMA order.

    Raises:
        UserError: fewer cores than cards.
        ValueError: card is not one of the cards.
    """
    if not 0 <= card < cards:
        raise ValueError(f"card {card} of {cards}: must be 0 to {cards - 1}")
    size = len(cores) // cards
    if size == 0:
        raise UserError(f"{len(cores)} cores are too few to give each of {cards} cards its own; don't bind cores")
    return list(cores[card * size : (card + 1) * size])


def numa_ordered(cores: Iterable[int], nodes: Sequence[Sequence[int]]) -> list[int]:
    """`cores` node by node, by number within each; cores of no node come last."""
    node_of = {core: number for number, node in enumerate(nodes) for core in node}
    return sorted(cores, key=lambda core: (node_of.get(core, len(nodes)), core))


def numa_nodes(folder: Path = _NODES) -> list[list[int]]:
    """The cores of each NUMA node in the order of their numbers; empty where the system doesn't tell."""
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[len("node") :]))
    return [parse_core_list(file.read_text(encoding="ascii")) for file in files]


def parse_core_list(text: str) -> list[int]:
    """The kernel's notation, "0-3,8,10-11", as numbers.

    Raises:
        ValueError: for anything else.
    """
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{text.strip()!r} is no list of cores such as 0-3,8")
        cores += range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)
    return cores


def format_core_list(cores: Sequence[int]) -> str:
    """The other way round: [0, 1, 2, 8] as "0-2,8"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def bind_cores(card: int, cards: int) -> list[int]:
    """Keep this process, and every thread it starts from now on, on its card's share of the cores; returns them.

    Threads that run already stay where they are, so call it before torch starts its own. Only cores that the process
    may use are shared out, so a container's limit is respected.

    Raises:
        UserError: where the system can't bind (no Linux), or there are too few cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("this system can't bind a process to cores; go on without (bind_cores off)")
    share = core_share(card, cards, numa_ordered(os.sched_getaffinity(0), numa_nodes()))
    os.sched_setaffinity(0, share)
    return share
