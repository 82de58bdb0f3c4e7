"""Formats reports and their rows as lines of text."""

UNITS = {"copy_gb_per_s": "GB/s", "matmul_tflop_per_s": "TFLOP/s"}
COLUMNS = "{:24} {:17} {:17} {:>9} {:>17} {:>8} {:>9} {:>8} {:>9} {:>6}  {}"


def title(report: dict) -> str:
    versions = [f"{package} {version}" for package, version in report["versions"].items()]
    ceilings = [f"{report['ceilings'][name]:.0f} {unit}" for name, unit in UNITS.items()]
    return ", ".join([report["gpu"], f"driver {report['driver']}", *versions, *ceilings])


def header(op: str, ceiling: str) -> str:
    unit = UNITS[ceiling]
    columns = COLUMNS.format(
        op, "provider", "pass", "ms", "20 to 80 %", unit, "of limit", "MiB", "host us", "error", ""
    )
    return f"\n{columns.rstrip()}"


def format_row(row: dict) -> str:
    """One line of the table. Missing figures stay blank."""
    if row["status"] != "ok":
        outcome = f"{row['status']}: {row['reason']}"
        return COLUMNS.format(row["shape"], row["provider"], outcome, *[""] * 8).rstrip()
    return COLUMNS.format(
        row["shape"], row["provider"], row["pass"], f"{row['ms']:.4f}", f"{row['ms_20']:.4f}-{row['ms_80']:.4f}",
        f"{row['rate']:.0f}", format_share(row),
        f"{row['peak_mib']:.0f}" if "peak_mib" in row else "", f"{row['host_us']:.1f}", f"{row['error']:.2f}",
        row.get("reason", ""),
    ).rstrip()  # fmt: skip


def format_share(row: dict) -> str:
    """Percentage of the ceiling; or the multiple of the limit's time if the limit is a measured time."""
    return f"{row['ratio']:.2f} x" if "ratio" in row else f"{100 * row['share']:.1f} %"
