"""Core binding: equal contiguous shares, NUMA order, nothing shared, and what can't be divided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_tuned_model.core_binding import core_share, format_core_list, numa_nodes, numa_ordered, parse_core_list
from npu_tuned_model.errors import UserError


def test_the_classic_host_192_cores_on_8_cards() -> None:
    shares = [format_core_list(core_share(card, 8, range(192))) for card in range(8)]
    assert shares == ["0-23", "24-47", "48-71", "72-95", "96-119", "120-143", "144-167", "168-191"]


@settings(max_examples=50, deadline=None)
@given(cards=st.integers(1, 16), cores=st.lists(st.integers(0, 300), min_size=16, unique=True))
def test_shares_are_equal_contiguous_and_apart(cards: int, cores: list[int]) -> None:
    shares = [core_share(card, cards, cores) for card in range(cards)]
    assert {len(share) for share in shares} == {len(cores) // cards}
    assert [core for share in shares for core in share] == cores[: len(cores) // cards * cards]


def test_too_few_cores_is_a_clear_error() -> None:
    with pytest.raises(UserError, match="2 cores are too few to give each of 4 cards"):
        core_share(0, 4, [0, 1])


@pytest.mark.parametrize("card", [-1, 4])
def test_a_card_that_is_not_there(card: int) -> None:
    with pytest.raises(ValueError, match="must be 0 to 3"):
        core_share(card, 4, range(8))


def test_numa_order_keeps_a_node_together() -> None:
    # two sockets whose cores are numbered in turn
    nodes = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert numa_ordered(range(8), nodes) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert core_share(1, 2, numa_ordered(range(8), nodes)) == [1, 3, 5, 7]
    # a container that may use some cores only
    assert numa_ordered([7, 0, 2, 5], nodes) == [0, 2, 5, 7]
    assert numa_ordered([3, 9, 1], []) == [1, 3, 9]


def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for node, cores in {"node0": "0-1", "node10": "20", "node2": "4-5,7", "node_other": "99"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes(tmp_path) == [[0, 1], [4, 5, 7], [20]]
    assert numa_nodes(tmp_path / "nowhere") == []


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 400)))
def test_core_lists_survive_being_written_and_read(cores: set[int]) -> None:
    assert parse_core_list(format_core_list(sorted(cores))) == sorted(cores)


@pytest.mark.parametrize("text", ["a", "1-", "-3", "1;2"])
def test_a_damaged_core_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no list of cores"):
        parse_core_list(text)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes to cores")
def test_a_process_and_its_later_threads_are_bound() -> None:
    code = (
        "import os, threading\n"
        "from npu_tuned_model.core_binding import bind_cores\n"
        "before = sorted(os.sched_getaffinity(0))\n"
        "share = bind_cores(len(before) - 1, len(before))\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        "assert seen == [set(share)] and len(share) == 1 and share[0] in before, (seen, share)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[1])
