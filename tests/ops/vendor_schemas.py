"""The vendor's schemas of the operators we call, as text inside the library of a released torch_npu wheel.

``python tests/ops/vendor_schemas.py 2.1.0.post17`` fetches that wheel (27 MB) and writes the file in vendor_schemas/.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from npu_tuned_model import ops

FOLDER = Path(__file__).with_name("vendor_schemas")
OPERATORS = tuple(name for name in ops.__all__ if name != "compressed_causal_mask")
VERSIONS = ("2.1.0.post17", "2.13.0")


def vendor_schemas(version: str) -> dict[str, torch._C.FunctionSchema]:
    """Schema by operator, from the stored text."""
    lines = (FOLDER / f"{version}.txt").read_text(encoding="utf-8").splitlines()
    schemas = [torch._C.parse_schema(line) for line in lines]
    return {schema.name: schema for schema in schemas}


def read_schemas(library: bytes) -> list[str]:
    """The schemas in the data of libtorch_npu.so, one per operator, sorted."""
    found = set()
    for name in OPERATORS:
        pattern = rb"(?<![\w:.])" + name.encode() + rb"\([^\0\n]*?\) -> [^\0\n]+"
        found.add(re.search(pattern, library)[0].decode())  # type: ignore[index]
    return sorted(found)


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, f"torch_npu=={version}", "--dest", folder], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            library = archive.read("torch_npu/lib/libtorch_npu.so")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{version}.txt").write_text("\n".join(read_schemas(library)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
