"""Dated JSON files with measurements, the GPU, its driver and the package versions. Does not know what is measured."""

import datetime
import json
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "results"
PACKAGES = (
    *("torch", "triton", "transformers", "liger-kernel", "flash-attn-4", "quack-kernels", "cut-cross-entropy"),
    *("peft", "bitsandbytes", "unsloth", "flash-linear-attention", "causal-conv1d"),
)


def environment() -> dict:
    """The date, and the GPU, driver and package versions that the figures depend on."""
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "versions": {package: package_version(package) for package in PACKAGES},
    }


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def save(folder: Path, name: str, report: dict) -> Path:
    """Writes `report` to <date and time>-<name>.json in `folder` and returns the path."""
    moment = datetime.datetime.fromisoformat(report["date"])
    path = folder / f"{moment:%Y-%m-%d-%H%M%S}-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def latest(folder: Path) -> dict[str, dict]:
    """The newest report of each op."""
    return {report["op"]: report for report in reports(folder) if "op" in report}


def reports(folder: Path, pattern: str = "*.json") -> Iterator[dict]:
    """The reports in files of such names, from the oldest to the newest."""
    for path in sorted(folder.glob(pattern)):
        yield json.loads(path.read_text())
