"""What the flags of other training tools are called here, for the hint of an error: `--lr` is `--learning-rate`.

The other tools are Hugging Face's TrainingArguments and TRL, axolotl, Unsloth, LLaMA-Factory, torchtune and
Liger-Kernel; to generate, also llm, ollama, llama.cpp and vLLM. aliases.txt has the table.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import NamedTuple

OurValue = Callable[[Sequence[str]], str | None]


def flag_of(name: str) -> str:
    """A flag as it is written on a command line."""
    return f"--{name.replace('_', '-')}"


class Alias(NamedTuple):
    """Names that other tools have for one of our flags.

    names: separated by spaces. flag: ours; None where there is none. value: our value for the values given, which may
    be none; None where no value is the same. note: what else differs, or what to do where there is no flag.
    """

    names: str
    flag: str | None
    value: OurValue
    note: str


def hub_source(values: Sequence[str]) -> str | None:
    """A data set of the Hub, or a file, as a source of --data."""
    if len(values) != 1:
        return None
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", values[0]) and not PurePath(values[0]).suffix
    return f"hub:{values[0]}" if is_name else values[0]


FUNCTIONS: dict[str, OurValue] = {
    "": lambda values: values[0] if values else None,
    "all": " ".join,
    "none": lambda values: None,
    "hub_source": hub_source,
    "below_one": lambda values: values[0] if values and values[0].startswith(("0.", ".")) else None,  # not a count
    "lora_targets": lambda values: "all-linear" if list(values) == ["all"] else " ".join(values),
    "loggers": lambda values: None if {*values} & {"none", "all"} else " ".join(values),
    "reference_model": lambda values: f"model:{values[0]}" if values else "model",
    "device": lambda values: None if "auto" in values else values[0] if values else None,
}


def value_of(form: str) -> OurValue:
    """The function that a cell of the table describes."""
    if form in FUNCTIONS:
        return FUNCTIONS[form]
    if form.startswith("="):
        return lambda values: form[1:]
    if "{}" in form:
        return lambda values: form.replace("{}", values[0]) if values else None
    if "/" in form:
        on, off = form.split("/")
        is_off = {"false", "off", "no", "none", "0"}.__contains__
        return lambda values: (off or None) if values and is_off(values[0].lower()) else on
    ours = {theirs: here or theirs for theirs, _, here in (word.partition(":") for word in form.split())}
    return lambda values: next((ours[key] for key in ours if values and values[0].lower().startswith(key)), None)


def read_aliases(command: str) -> Iterator[Alias]:
    """The aliases of the flags of a command."""
    table = files("ligermodels").joinpath("aliases.txt").read_text(encoding="utf-8")
    section = table.partition(f"\n[{command}]\n")[2].partition("\n\n")[0]
    for line in section.splitlines():
        if not line.startswith("#"):
            names, flag, form, note = (*(cell.strip() for cell in line.split("|")), "", "", "")[:4]
            yield Alias(names, flag or None, value_of(form), note)


TRAIN_ALIASES, GENERATE_ALIASES = tuple(read_aliases("train")), tuple(read_aliases("generate"))


def alias_hint(
    name: str, values: Sequence[str], aliases: Sequence[Alias], known: Collection[str],
    spelled: Callable[[str, str | None], str],
) -> str:  # fmt: skip
    """The end of a message about a flag that does not exist: what it is called here; empty if that is not known.

    name: as it was given, with its values. known: the flags that can be given there, with underscores. spelled: a flag
    of ours and its value, as they are written there.
    """
    name = name.lstrip("-").replace("-", "_").lower()
    for alias in (Alias(name, name, FUNCTIONS["none"], ""), *aliases):
        if name in alias.names.split() and (alias.flag is None or alias.flag in known):
            here = [] if alias.flag is None else [f"here it is {spelled(alias.flag, alias.value(values) or None)}"]
            return "".join(f"; {part}" for part in (*here, alias.note) if part)
    return ""
