"""Which releases of the NPU stack fit together: torch_npu, torch, CANN, driver (Ascend HDK) and Python.

The tables are data copied by hand; where they are silent the answers below are None, never a guess. Sources, as
published in 2026: COMPATIBILITY.md and the release notes 26.2.0 of torch_npu (gitcode.com/Ascend/pytorch) for torch,
CANN and Python; the release notes of CANN 8.5.0, 9.1.0 and 9.1.1 (hiascend.com) for the driver.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

# torch_npu's wheel version says which torch it is for; the product line behind it says which CANN.
_PRODUCT_LINES = {
    "2.1.0": "5.0.0",
    "2.1.0.post4": "6.0.RC1",
    "2.1.0.post6": "6.0.RC2",
    "2.1.0.post8": "6.0.RC3",
    "2.1.0.post10": "6.0.0",
    "2.1.0.post12": "7.0.0",
    "2.1.0.post13": "7.1.0",
    "2.1.0.post17": "7.2.0",
    "2.2.0": "6.0.RC1",
    "2.2.0.post2": "6.0.RC2",
    "2.3.1": "6.0.RC2",
    "2.3.1.post2": "6.0.RC3",
    "2.3.1.post4": "6.0.0",
    "2.3.1.post6": "7.0.0",
    "2.4.0": "6.0.RC3",
    "2.4.0.post2": "6.0.0",
    "2.4.0.post4": "7.0.0",
    "2.5.1": "7.0.0",
    "2.5.1.post1": "7.1.0",
    "2.6.0": "7.1.0",
    "2.6.0.post3": "7.2.0",
    "2.6.0.post5": "7.3.0",
    "2.7.1": "7.2.0",
    "2.7.1.post2": "7.3.0",
    "2.7.1.post4": "26.0.0",
    "2.7.1.post8": "26.1.0",
    "2.7.1.post11": "26.2.0",
    "2.8.0": "7.2.0",
    "2.8.0.post2": "7.3.0",
    "2.8.0.post4": "26.0.0",
    "2.9.0": "7.3.0",
    "2.9.0.post2": "26.0.0",
    "2.9.0.post6": "26.1.0",
    "2.9.0.post9": "26.2.0",
    "2.10.0": "26.0.0",
    "2.10.0.post4": "26.1.0",
    "2.10.0.post7": "26.2.0",
    "2.11.0": "26.1.0",
    "2.11.0.post3": "26.2.0",
    "2.12.0": "26.1.0",
    "2.12.0.post3": "26.2.0",
    "2.13.0": "26.2.0",
    "2.14.0": "26.2.0",
}

# product line: first and last CANN it is released for or declared compatible with
_CANN = {
    "5.0.0": ("7.0.0", "7.0.0"),
    "6.0.RC1": ("8.0.RC1", "8.0.RC1"),
    "6.0.RC2": ("8.0.RC2", "8.0.RC2"),
    "6.0.RC3": ("8.0.RC3", "8.0.RC3"),
    "6.0.0": ("8.0.RC2", "8.3.RC1"),
    "7.0.0": ("8.0.RC2", "8.3.RC1"),
    "7.1.0": ("8.0.RC2", "8.3.RC1"),
    "7.2.0": ("8.0.RC2", "8.3.RC1"),
    "7.3.0": ("8.0.0", "9.2.0"),
    "26.0.0": ("8.1.RC1", "9.2.0"),
    "26.1.0": ("8.5.0", "9.2.0"),
    "26.2.0": ("8.5.0", "9.2.0"),
}

# torch: first and last minor version of Python 3 that a torch_npu for it was built for
_PYTHON = {
    "2.1.0": (8, 11),
    "2.2.0": (8, 10),
    "2.3.1": (8, 11),
    "2.4.0": (8, 11),
    "2.5.1": (9, 11),
    "2.6.0": (9, 11),
    "2.7.1": (9, 13),
    "2.8.0": (9, 13),
    "2.9.0": (10, 14),
    "2.10.0": (10, 14),
    "2.11.0": (10, 14),
    "2.12.0": (10, 14),
    "2.13.0": (10, 14),
    "2.14.0": (10, 14),
}

# CANN series: oldest driver that the release notes call compatible
_OLDEST_DRIVER = {"8.5": "25.0.RC1", "9.0": "25.0.RC1", "9.1": "25.2.0"}


@dataclass(frozen=True)
class Span:
    """Releases from `first` to `last`; patches and release candidates of the last one's series belong to it."""

    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"

    def holds(self, found: str) -> bool | None:
        """Whether `found` lies in it; None when `found` is no version."""
        version = parse(found)
        if version is None:
            return None
        first, last = Version(self.first), Version(self.last)
        return first <= version and version.release[:2] <= last.release[:2]


def parse(text: str) -> Version | None:
    """A version as the vendor writes it ("8.0.RC2.alpha003", "25.3.rc1.2") or as Python does; else None."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*(?:\.?rc\d+)?(?:\.post\d+)?)", text, re.IGNORECASE)
    if match is None:
        return None
    try:
        return Version(match.group(1))
    except InvalidVersion:
        return None


def first_three(version: str) -> str | None:
    """ "2.1.0.post17+abc" to "2.1.0"; None when there are no three numbers."""
    parsed = parse(version)
    if parsed is None or len(parsed.release) < 3:
        return None
    return ".".join(str(part) for part in parsed.release[:3])


def cann_for(torch_npu: str) -> Span | None:
    """The CANN releases that fit this torch_npu; None for one that the table doesn't know.

    A patch release that isn't listed counts as the listed release before it.
    """
    version, base = parse(torch_npu), first_three(torch_npu)
    listed = sorted((Version(name), line) for name, line in _PRODUCT_LINES.items() if first_three(name) == base)
    if version is None or not listed:
        return None
    line = [line for name, line in listed if name <= version][-1:] or [listed[0][1]]
    return Span(*_CANN[line[0]])


def newest_torch_npu_for(torch: str) -> str | None:
    """The newest torch_npu for this torch, None when there is none in the table."""
    base = first_three(torch)
    listed = [Version(name) for name in _PRODUCT_LINES if first_three(name) == base]
    return str(max(listed)) if listed else None


def python_for(torch: str) -> Span | None:
    """The Python releases that torch_npu is built for with this torch; None for a torch that the table doesn't know."""
    minors = _PYTHON.get(first_three(torch) or "")
    return None if minors is None else Span(f"3.{minors[0]}", f"3.{minors[1]}")


def oldest_driver_for(cann: str) -> str | None:
    """The oldest driver that this CANN is declared compatible with; None where the release notes at hand don't say."""
    version = parse(cann)
    return None if version is None else _OLDEST_DRIVER.get(".".join(str(part) for part in version.release[:2]))
