"""Does the stack on this machine fit together? ``python -m npu_tuned_model.doctor``: one line per component.

Nothing is imported into this process that could fail: packages are looked up by their metadata and tried in a process
of their own, files are read where the vendor's installers put them. A probe that fails shows its error as its finding.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Mapping, Sequence

from packaging.version import Version

from npu_tuned_model.npu_versions import (
    cann_for,
    first_three,
    newest_torch_npu_for,
    oldest_driver_for,
    parse,
    python_for,
)

TRANSFORMERS = "4.37.0"
OLDEST_TORCH = "2.1.0"
OLDEST_PYTHON = "3.9"
OLDEST_PROTOBUF = "3.13"
_PACKAGES = ("torch", "torch_npu", "transformers", "deepspeed", "protobuf")
_IMPORT_SECONDS = 300
_TRY_TORCH = "import torch; print('torch: ok')"
_TRY_NPU = """
import torch_npu
print("torch_npu: ok", flush=True)
import torchair
torchair.CompilerConfig()
print("torchair: ok", flush=True)
count = torch_npu.npu.device_count()
print(f"NPU: {count} x {torch_npu.npu.get_device_name(0)}" if count else "NPU: none", flush=True)
"""


@dataclass(frozen=True)
class Found:
    """What a probe saw: a version or name, or None where there is nothing, or the error it ran into."""

    value: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        parts = [part for part in (self.value, self.error) if part]
        return ": ".join(parts) if parts else "not found"


@dataclass(frozen=True)
class Host:
    """Where to look."""

    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ascend: Path = Path("/usr/local/Ascend")
    python: str = sys.executable


@dataclass(frozen=True)
class Finding:
    """One line of the answer. Verdicts: "ok", "mismatch", "broken", "missing", "not needed", "unknown"."""

    component: str
    found: Found
    expected: str
    verdict: str
    remedy: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict in ("mismatch", "broken", "missing")


def examine(host: Host) -> dict[str, Found]:
    """What is there, by component; never raises."""
    facts = {"Python": Found(platform.python_version())}
    for package in _PACKAGES:
        facts[package] = _guard(lambda package=package: _installed(package))  # type: ignore[misc]
    facts["CANN"] = _guard(lambda: _cann(host))
    facts["driver"] = _guard(lambda: _version_file(host.ascend / "driver" / "version.info"))
    facts["compiler"] = _guard(lambda: _compiler(host))
    facts["torchair"], facts["NPU"] = Found(), Found()
    if facts["torch"].value:
        tried = _try(host, _TRY_TORCH, autoload="0")
        facts["torch"] = Found(facts["torch"].value, None if "torch" in tried else tried["error"])
    if facts["torch_npu"].value:
        tried = _try(host, _TRY_NPU, autoload="1")
        failure = tried["error"]
        for component in ("torch_npu", "torchair", "NPU"):
            version = facts["torch_npu"].value if component == "torch_npu" else tried.get(component)
            facts[component] = Found(None if version == "none" else version, None if component in tried else failure)
            if component not in tried:
                failure = "not tried, because of the error above"
    return facts


def has_npu_stack(facts: Mapping[str, Found], host: Host) -> bool:
    """Whether any part of the NPU's software or hardware is on this machine."""
    traces = [str(facts[name]) != "not found" for name in ("torch_npu", "CANN", "driver")]
    return any(traces) or shutil.which("npu-smi", path=host.variables.get("PATH")) is not None


def judge(facts: Mapping[str, Found], *, npu: bool) -> list[Finding]:
    """One finding per component, for a machine that is to run on an NPU or on its CPU (or GPU) only."""
    torch, torch_npu, cann = (facts[name].value for name in ("torch", "torch_npu", "CANN"))
    findings = [_judge_python(facts["Python"], torch, npu=npu), _judge_torch(facts["torch"], torch_npu)]
    findings.append(_judge_torch_npu(facts["torch_npu"], torch, npu=npu))
    findings.append(
        _judge(
            "torchair",
            facts["torchair"],
            "inside torch_npu",
            needed=npu,
            remedy="reinstall torch_npu, or the protobuf that its error names",
        )
    )
    findings.append(_judge_cann(facts["CANN"], torch_npu or newest_torch_npu_for(torch or ""), npu=npu))
    findings.append(_judge_driver(facts["driver"], cann, npu=npu))
    findings.append(
        _judge("NPU", facts["NPU"], "1 or more", needed=npu, remedy="see npu-smi info, and dmesg for the driver")
    )
    findings.append(
        _judge(
            "transformers",
            facts["transformers"],
            TRANSFORMERS,
            fits=lambda found: first_three(found) == TRANSFORMERS,
            remedy=f"pip install transformers=={TRANSFORMERS}",
        )
    )
    findings.append(
        _judge("deepspeed", facts["deepspeed"], "for several cards", needed=False, remedy="pip install deepspeed")
    )
    findings.append(
        _judge(
            "protobuf",
            facts["protobuf"],
            f"{OLDEST_PROTOBUF} or newer, for torchair",
            needed=npu,
            fits=lambda found: _at_least(found, OLDEST_PROTOBUF),
            remedy="pip install protobuf",
        )
    )
    findings.append(
        _judge(
            "compiler",
            facts["compiler"],
            "g++ or clang++, for graphs on a CPU",
            needed=False,
            remedy="apt-get install g++, or set CXX; without one a CPU runs eager",
        )
    )
    return findings


def _judge(
    component: str,
    found: Found,
    expected: str,
    *,
    needed: bool = True,
    fits: Callable[[str], bool | None] = lambda found: True,
    remedy: str = "",
) -> Finding:
    if found.error:
        return Finding(component, found, expected, "broken", remedy)
    if found.value is None:
        return Finding(component, found, expected, "missing" if needed else "not needed", remedy if needed else "")
    verdict = {True: "ok", False: "mismatch", None: "unknown"}[fits(found.value)]
    return Finding(component, found, expected, verdict, "" if verdict == "ok" else remedy)


def _judge_python(found: Found, torch: str | None, *, npu: bool) -> Finding:
    span = python_for(torch) if npu and torch else None
    if span is None:
        return _judge(
            "Python",
            found,
            f"{OLDEST_PYTHON} or newer",
            fits=lambda version: _at_least(version, OLDEST_PYTHON),
            remedy=f"make the environment with Python {OLDEST_PYTHON} or newer",
        )
    remedy = f"make the environment with Python {span}: torch_npu has no wheel for another with torch {torch}"
    return _judge("Python", found, str(span), fits=span.holds, remedy=remedy)


def _judge_torch(found: Found, torch_npu: str | None) -> Finding:
    wanted = first_three(torch_npu) if torch_npu else None
    if wanted is None:
        return _judge(
            "torch",
            found,
            f"{OLDEST_TORCH} or newer",
            fits=lambda version: _at_least(version, OLDEST_TORCH),
            remedy=f"pip install 'torch>={OLDEST_TORCH}'",
        )
    return _judge(
        "torch",
        found,
        f"{wanted}, as torch_npu",
        fits=lambda version: first_three(version) == wanted,
        remedy=f"pip install torch=={wanted}, or the torch_npu for this torch",
    )


def _judge_torch_npu(found: Found, torch: str | None, *, npu: bool) -> Finding:
    base, newest = first_three(torch or ""), newest_torch_npu_for(torch or "")
    remedy = f"pip install torch_npu=={newest}" if newest else "install a torch that torch_npu is released for"
    if found.error:
        remedy = "source CANN's set_env.sh; if that was done, the releases in these lines don't fit together"
    return _judge(
        "torch_npu",
        found,
        f"{base}, as torch" if base else "the release for torch",
        needed=npu,
        fits=lambda version: None if base is None else first_three(version) == base,
        remedy=remedy,
    )


def _judge_cann(found: Found, torch_npu: str | None, *, npu: bool) -> Finding:
    span = cann_for(torch_npu) if torch_npu else None
    expected = str(span) if span else "what torch_npu is released for"
    return _judge(
        "CANN",
        found,
        expected,
        needed=npu,
        fits=lambda version: span.holds(version) if span else None,
        remedy=f"install CANN, {expected}, and source its set_env.sh",
    )


def _judge_driver(found: Found, cann: str | None, *, npu: bool) -> Finding:
    oldest = oldest_driver_for(cann) if cann else None
    expected = f"{oldest} or newer" if oldest else "what CANN's release notes name"
    return _judge(
        "driver",
        found,
        expected,
        needed=npu,
        fits=lambda version: _at_least(version, oldest) if oldest else None,
        remedy=f"install the Ascend HDK's driver and firmware, {expected}",
    )


def _at_least(found: str, oldest: str) -> bool | None:
    version = parse(found)
    return None if version is None else version >= Version(oldest)


def _guard(probe: Callable[[], Found]) -> Found:
    # whatever a probe trips over on a machine nobody here has seen is an answer, not a crash
    try:
        return probe()
    except Exception as error:
        return Found(error=f"{type(error).__name__}: {_one_line(str(error))}")


def _one_line(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _installed(package: str) -> Found:
    try:
        return Found(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Found()


def _cann(host: Host) -> Found:
    home = host.variables.get("ASCEND_HOME_PATH") or host.variables.get("ASCEND_TOOLKIT_HOME")
    if home:
        return _install_info(Path(home))
    for folder in (host.ascend / "ascend-toolkit" / "latest", host.ascend / "cann", host.ascend / "latest"):
        if folder.is_dir():
            found = _install_info(folder)
            return Found(found.value, f"installed in {folder}, but its set_env.sh is not sourced in this shell")
    return Found()


def _install_info(home: Path) -> Found:
    if not home.is_dir():
        return Found(error=f"ASCEND_HOME_PATH is {home}, which is no folder")
    files = sorted(home.glob("ascend_*_install.info")) + sorted(home.glob("*-linux/ascend_*_install.info"))
    if not files:
        return Found(error=f"no ascend_*_install.info in {home}")
    return _version_file(files[0])


def _version_file(file: Path) -> Found:
    if not file.is_file():
        return Found()
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == "version" and value.strip():
            return Found(value.strip())
    return Found(error=f"{file} has no line version=...")


def _compiler(host: Host) -> Found:
    path = host.variables.get("PATH")
    for name in (host.variables.get("CXX"), "g++", "clang++"):
        compiler = shutil.which(name, path=path) if name else None
        if compiler:
            result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True)
            return Found(_one_line(result.stdout.splitlines()[0], 60))
    return Found()


def _try(host: Host, code: str, *, autoload: str) -> dict[str, str]:
    """Run `code` in a process of its own: its "name: result" lines, and under "error" how it ended if it failed."""
    # torch imports torch_npu by itself unless this is 0, and the question here is which of the two fails
    variables = {**host.variables, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    try:
        result = subprocess.run(
            [host.python, "-c", code], capture_output=True, text=True, env=variables, timeout=_IMPORT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": _one_line(str(error))}
    tried = dict(line.split(": ", 1) for line in result.stdout.splitlines() if ": " in line)
    last = (result.stderr.strip() or f"ended with {result.returncode} and no message").splitlines()[-1]
    tried["error"] = _one_line(last)
    return tried


def table(findings: Sequence[Finding]) -> str:
    """The findings as aligned columns, one line each."""
    rows = [("component", "found", "expected", "verdict", "remedy")]
    rows += [(row.component, str(row.found), row.expected, row.verdict, row.remedy) for row in findings]
    widths = [max(len(row[column]) for row in rows if len(row[column]) <= 40) for column in range(4)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, host: Host | None = None) -> int:
    """Print the table; 0 when everything needed is there and fits, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m npu_tuned_model.doctor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "npu"), default="auto", help="what is to run here; auto: what is installed"
    )
    device = parser.parse_args(arguments).device
    host = host or Host()
    facts = examine(host)
    npu = device == "npu" or (device == "auto" and has_npu_stack(facts, host))
    print("NPU set-up" if npu else "no NPU stack: CPU set-up" if device == "auto" else "CPU set-up")
    findings = judge(facts, npu=npu)
    print(table(findings))
    bad = [finding.component for finding in findings if finding.bad]
    print(f"{len(bad)} to put right: {', '.join(bad)}" if bad else "everything fits")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
