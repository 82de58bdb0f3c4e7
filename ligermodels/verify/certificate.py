"""The parity certificate: the results of all checks, as JSON and as a self-contained HTML page."""

import html
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ligermodels
from ligermodels.plot_style import BLUE, GREEN, GREY, GRID, INK, RED

PAGE_STYLE = f"""
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 62em; margin: 3em auto; padding: 0 1em; color: {INK} }}
h1 {{ font-size: 1.4em }} h2 {{ font-size: 1em; margin: 2em 0 .4em }} th {{ color: {GREY}; font-weight: 500 }}
table {{ border-collapse: collapse; width: 100% }} td, th {{ text-align: left; vertical-align: top;
padding: .4em .8em .4em 0; border-bottom: 1px solid {GRID} }} .passed {{ color: {GREEN} }}
.failed {{ color: {RED}; font-weight: bold }} .skipped {{ color: {GREY} }} svg {{ width: 100%; font-size: 12px }}
"""
BAR, ROW, LABELS, PICTURE = 480, 26, 130, 700  # widths and heights of the picture, in its units
ORDERS = 3  # of magnitude below what is allowed, where the bars begin


@dataclass(frozen=True)
class Check:
    """The result of one check.

    passed: None if there was nothing to compare. criterion: the condition for passing. measured: the numbers.
    """

    name: str
    passed: bool | None
    result: str
    criterion: str
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        return {True: "passed", False: "failed", None: "skipped"}[self.passed]


@dataclass(frozen=True)
class Certificate:
    """The results of all checks of a model. facts: versions, device, date. json, page: the files written.

    scope: what was compared of images, and how it was computed where that is not the default.
    """

    model: str
    facts: Mapping[str, str]
    scope: Mapping[str, str]
    checks: Sequence[Check]
    json: Path
    page: Path

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)


def write_certificate(
    output: Path, model: str, folder: Path, device: str, checks: Sequence[Check], scope: Mapping[str, str]
) -> Certificate:
    """Writes the JSON file and the HTML page into `output`; their names come from the model."""
    kind = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()
    facts = {
        "model": model, "folder": str(folder.resolve()), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}",
        "device": f"{device}, {kind}", "ligermodels": ligermodels.__version__,
        **{name: version(name) for name in ("transformers", "torch", "triton", "tokenizers")},
        "python": platform.python_version(),
    }  # fmt: skip
    name = file_name(model)
    output.mkdir(parents=True, exist_ok=True)
    certificate = Certificate(model, facts, scope, checks, output / f"{name}.json", output / f"{name}.html")
    certificate.json.write_text(json.dumps(as_json(certificate), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    certificate.page.write_text(as_page(certificate), encoding="utf-8")
    return certificate


def file_name(model: str) -> str:
    """The certificate's file name, org--name: from a Hub id, or from a folder's path (relative to the working directory
    if it is inside it)."""
    path = Path(model)
    if path.is_dir():
        path, here = path.resolve(), Path.cwd()
        path = path.relative_to(here if path != here and path.is_relative_to(here) else path.anchor)
    return "--".join(path.parts)


def as_json(certificate: Certificate) -> dict[str, Any]:
    """The content of the JSON file."""
    checks = [
        {"name": check.name, "outcome": check.outcome, "result": check.result, "criterion": check.criterion}
        | ({"measured": rounded(check.measured)} if check.measured else {})
        for check in certificate.checks
    ]
    return {"passed": certificate.passed, **certificate.facts, "scope": dict(certificate.scope), "checks": checks}


def rounded(value: Any) -> Any:
    """The value with floats rounded to four digits; infinities and NaN, which JSON lacks, become text."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


def parts_of_allowed(checks: Sequence[Check]) -> dict[str, float]:
    """The error of each check that measures errors, as a part of what is allowed; the worst of several."""
    found = {}
    for check in checks:
        pairs = [check.measured, *(value for value in check.measured.values() if isinstance(value, Mapping))]
        if parts := [part_of(pair["error"], pair["allowed"]) for pair in pairs if {"error", "allowed"} <= pair.keys()]:
            found[check.name] = max(parts)
    return found


def part_of(error: float, allowed: float) -> float:
    """error / allowed; infinite where the error is not finite, or nothing is allowed and there is an error."""
    if not math.isfinite(error):
        return math.inf
    return error / allowed if allowed else math.inf if error else 0.0


def as_picture(parts: Mapping[str, float]) -> str:
    """Bars from 10^-ORDERS of the allowed error to ten times it, as SVG."""
    height, unit = ROW * (len(parts) + 1), BAR / (ORDERS + 1)
    marks = {10.0**exponent: round(LABELS + unit * (exponent + ORDERS)) for exponent in range(-ORDERS, 2)}
    lines = [
        f'<line x1="{x}" x2="{x}" y1="0" y2="{height - ROW}" stroke="{INK if part == 1 else GRID}"/><text x="{x}" '
        f'y="{height - 8}" fill="{GREY}" text-anchor="middle">{"allowed" if part == 1 else f"{part:g}"}</text>'
        for part, x in marks.items()
    ]
    for y, (name, part) in zip(range(0, height, ROW), parts.items(), strict=False):
        width, colour = unit * (math.log10(min(max(part, min(marks)), 10)) + ORDERS), BLUE if part <= 1 else RED
        lines.append(
            f'<text x="0" y="{y + 17}" fill="{INK}">{html.escape(name)}</text>'
            f'<rect x="{LABELS}" y="{y + 6}" width="{max(width, 2):.1f}" height="{ROW - 12}" rx="3" fill="{colour}"/>'
            f'<text x="{LABELS + BAR + 12}" y="{y + 17}" fill="{colour}">{part:.2g}</text>'
        )
    head = f'<svg viewBox="0 0 {PICTURE} {height}" role="img" aria-label="errors as parts of what is allowed">'
    return f"{head}{''.join(lines)}</svg>"


def as_page(certificate: Certificate) -> str:
    """The content of the HTML page."""
    verdict = "passed" if certificate.passed else "failed"
    title = f"Parity certificate of {html.escape(certificate.model)}"
    described = {**certificate.scope, **certificate.facts}
    facts = "".join(f"<tr><th>{html.escape(k)}<td>{html.escape(v)}" for k, v in described.items())
    rows = "".join(
        f'<tr><td>{html.escape(check.name)}<td class="{check.outcome}">{check.outcome}'
        f"<td>{html.escape(check.result)}<td>{html.escape(check.criterion)}"
        for check in certificate.checks
    )
    parts = parts_of_allowed(certificate.checks)
    picture = f"<h2>Errors, as parts of what is allowed</h2>\n{as_picture(parts)}\n" if parts else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{PAGE_STYLE}</style>\n'
        f'<h1>{title}: <span class="{verdict}">{verdict}</span></h1>\n'
        f"<table><tr><th>check<th>outcome<th>result<th>criterion{rows}</table>\n{picture}"
        f"<p>Errors are relative: ‖x − truth‖ / ‖truth‖. All numbers are in {html.escape(certificate.json.name)}.</p>\n"
        f"<table>{facts}</table>\n"
    )
