"""The doctor: right verdicts on fitting and on mismatched stacks, never a crash, with fake components."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npu_tuned_model import doctor
from npu_tuned_model.doctor import Finding, Found, Host, examine, judge, main

REPOSITORY = Path(__file__).resolve().parents[1]
FITTING = {
    "Python": Found("3.11.7"),
    "torch": Found("2.9.0+cpu"),
    "torch_npu": Found("2.9.0.post2"),
    "torchair": Found("ok"),
    "CANN": Found("9.0.0"),
    "driver": Found("25.5.1"),
    "NPU": Found("8 x Ascend910B3"),
    "transformers": Found("4.37.0"),
    "deepspeed": Found("0.14.4"),
    "protobuf": Found("3.20.3"),
    "compiler": Found("g++ 12"),
}


def verdicts(npu: bool = True, **changes: Found) -> dict[str, Finding]:
    return {finding.component: finding for finding in judge({**FITTING, **changes}, npu=npu)}


def bad(findings: dict[str, Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.bad}


def test_a_fitting_stack_is_ok_throughout() -> None:
    findings = verdicts()
    assert list(findings) == list(FITTING)
    assert {finding.verdict for finding in findings.values()} == {"ok"}
    assert not any(finding.remedy for finding in findings.values())


@pytest.mark.parametrize(
    ("changes", "culprits"),
    [
        ({"torch": Found("2.9.1")}, {"torch", "torch_npu"}),
        ({"torch": Found("2.1.0"), "torch_npu": Found("2.1.0.post12")}, {"CANN"}),
        ({"torch": Found("2.1.0"), "torch_npu": Found("2.1.0.post12"), "CANN": Found("8.1.RC1")}, set()),
        ({"CANN": Found("8.0.RC3")}, {"CANN"}),
        ({"CANN": Found("9.1.0"), "driver": Found("25.0.RC1")}, {"driver"}),
        ({"Python": Found("3.9.18")}, {"Python"}),
        ({"transformers": Found("4.40.0")}, {"transformers"}),
        ({"protobuf": Found("3.12.4")}, {"protobuf"}),
        ({"protobuf": Found()}, {"protobuf"}),
        ({"torch_npu": Found()}, {"torch_npu"}),
        ({"NPU": Found()}, {"NPU"}),
        ({"deepspeed": Found(), "compiler": Found()}, set()),
    ],
)
def test_a_mismatch_is_named_with_a_remedy(changes: dict[str, Found], culprits: set[str]) -> None:
    findings = verdicts(**changes)
    assert bad(findings) == culprits
    assert all(findings[name].remedy for name in culprits)


def test_an_error_is_the_finding() -> None:
    findings = verdicts(torch_npu=Found("2.9.0.post2", "ImportError: libhccl.so: cannot open shared object file"))
    assert findings["torch_npu"].verdict == "broken"
    assert "libhccl.so" in str(findings["torch_npu"].found)
    assert "set_env.sh" in findings["torch_npu"].remedy


def test_what_the_tables_do_not_know_is_no_mismatch() -> None:
    findings = verdicts(torch=Found("9.9.0"), torch_npu=Found("9.9.0"))
    assert findings["CANN"].verdict == "unknown"
    assert bad(findings) == set()


def test_a_cpu_needs_no_npu_stack() -> None:
    nothing = {name: Found() for name in ("torch_npu", "torchair", "CANN", "driver", "NPU", "protobuf", "deepspeed")}
    findings = verdicts(npu=False, **nothing)
    assert bad(findings) == set()
    assert bad(verdicts(npu=True, **nothing)) == {"torch_npu", "torchair", "CANN", "driver", "NPU", "protobuf"}


def test_a_torch_npu_that_breaks_import_torch_is_bad_on_a_cpu_too() -> None:
    assert bad(verdicts(npu=False, torch_npu=Found("2.9.0", "ImportError: libascendcl.so"))) == {"torch_npu"}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine with CANN and a driver where the installers put them."""
    cann, driver = tmp_path / "cann" / "x86_64-linux", tmp_path / "driver"
    cann.mkdir(parents=True)
    driver.mkdir()
    (cann / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    (driver / "version.info").write_text("package_version=25.5.0\nVersion=25.5.0\nfirmware=x\n")
    variables = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "PATH": os.defpath}
    return Host(variables, tmp_path, python="/bin/false")  # files only: importing torch would take seconds


def test_cann_and_driver_are_read_from_their_files(host: Host) -> None:
    facts = examine(host)
    assert (facts["CANN"], facts["driver"]) == (Found("8.5.0"), Found("25.5.0"))


def test_cann_that_is_not_sourced_is_told(host: Host) -> None:
    found = examine(Host({}, host.ascend, host.python))["CANN"]
    assert found.value == "8.5.0"
    assert "set_env.sh" in str(found.error)


@pytest.mark.parametrize("damage", ["no version", "a folder", "no files", "nothing"])
def test_a_damaged_installation_is_a_finding_not_a_crash(host: Host, damage: str) -> None:
    info = host.ascend / "cann" / "x86_64-linux" / "ascend_toolkit_install.info"
    info.unlink()
    if damage == "no version":
        info.write_bytes(b"\xff\xfe nonsense")
    elif damage == "a folder":
        info.mkdir()
    elif damage == "nothing":
        info.parent.rmdir()
        info.parent.parent.rmdir()
    facts = examine(host)
    assert facts["CANN"].value is None
    assert bad({finding.component: finding for finding in judge(facts, npu=True)}) >= {"CANN"}


def test_a_probe_that_raises_shows_its_error(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    def refuse(file: Path) -> Found:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(doctor, "_version_file", refuse)
    facts = examine(host)
    assert "PermissionError" in str(facts["driver"])
    assert "PermissionError" in str(facts["CANN"])


def fake_package(folder: Path, name: str, version: str, code: str | None = None) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    if code is not None:
        (folder / f"{name}.py").write_text(code)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that sees the fake packages first."""
    variables = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}
    command = [sys.executable, "-m", "npu_tuned_model.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def test_on_this_machine_the_cpu_set_up_fits(tmp_path: Path) -> None:
    result = run(tmp_path, "--device=cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == len(FITTING) + 3


def test_an_npu_stack_of_fakes(tmp_path: Path) -> None:
    torch_npu = (
        "class npu:\n device_count = staticmethod(lambda: 2)\n get_device_name = staticmethod(lambda i: 'Fake')\n"
    )
    fake_package(tmp_path, "torch", "2.8.0")
    fake_package(tmp_path, "torch_npu", "2.8.0.post2", torch_npu)
    (tmp_path / "torchair.py").write_text("class CompilerConfig: pass\n")
    result = run(tmp_path)
    assert result.returncode == 1  # there is no CANN
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert re.search(r"2 x Fake .* ok$", lines["NPU"])
    assert re.search(r"2\.8\.0\.post2 .* ok$", lines["torch_npu"])


@pytest.mark.parametrize("code", ["raise RuntimeError('libhccl is gone')", "import os; os.abort()"])
def test_a_broken_torch_npu_is_reported(tmp_path: Path, code: str) -> None:
    fake_package(tmp_path, "torch_npu", "2.1.0.post12", code)
    result = run(tmp_path)
    assert result.returncode == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("torch_npu"))
    assert "broken" in line
    assert "libhccl is gone" in line or "-6" in line
    assert not result.stderr


def test_it_runs_where_torch_can_not_be_imported(tmp_path: Path) -> None:
    fake_package(tmp_path, "torch", "2.13.0", "raise ImportError('libgomp.so.1')")
    result = run(tmp_path, "--device=cpu")
    assert result.returncode == 1
    assert "libgomp.so.1" in result.stdout


def test_no_torch_at_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda package: Found())
    assert main(["--device=npu"], Host(variables={}, ascend=tmp_path)) == 1
    assert "torch, torch_npu, torchair, CANN, driver, NPU, transformers, protobuf" in capsys.readouterr().out


def test_auto_is_the_cpu_where_nothing_of_an_npu_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = Host(variables={"PATH": os.defpath}, ascend=tmp_path)
    versions = {"torch": Found("2.13.0"), "transformers": Found("4.37.0")}
    monkeypatch.setattr(doctor, "_installed", lambda package: versions.get(package, Found()))
    assert main([], bare) == 0
    assert capsys.readouterr().out.startswith("no NPU stack: CPU set-up\n")


def test_the_transformers_it_asks_for_is_the_one_the_package_needs() -> None:
    assert f'"transformers=={doctor.TRANSFORMERS}"' in (REPOSITORY / "pyproject.toml").read_text()
