"""HCCL on the simulated NPU: ranks meet through gloo, and a collective works on the memory behind the npu tensors."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

# groups that C++ hands back lose what Python knows of them unless something holds them here
_groups: list[dist.ProcessGroupGloo] = []


class HostGroup(dist.ProcessGroupGloo):
    """A process group of the host that answers torchair's question after HCCL's name for it."""

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """One name on every rank."""
        return f"simulated_group_of_{self.size()}"


def install() -> None:
    """Let ``init_process_group("hccl")`` make groups that gloo serves.

    The device hands an operator's tensors to the host, so the group serves the host's tensors, too.
    """
    backend: Any = dist.Backend
    backend._plugins["HCCL"] = backend._BackendPlugin(_make_group, False)
    backend.backend_capability["hccl"] = ["npu", "cpu"]


def _make_group(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> HostGroup:
    group = HostGroup(store, rank, size, timeout=timeout)
    _groups.append(group)
    return group
