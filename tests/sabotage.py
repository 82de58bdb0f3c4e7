"""Replaces code of a function in place, so that existing references to the function run the broken code.

Code of a kernel, which Triton reads from its file, is replaced in a copy of its module.
"""

import importlib
import importlib.util
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType


@dataclass(frozen=True)
class Sabotage:
    """Replaces the only `old` in `module:qualified.name` by `new`; the parity case `case` must then fail."""

    where: str
    old: str
    new: str
    case: str

    def apply(self, monkeypatch) -> None:
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(module_name)
        function = module
        for name in path.split("."):
            function = inspect.getattr_static(function, name)
        function = plain_function(function)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.where}: {source.count(self.old)} occurrences of {self.old!r}"
        namespace = dict(vars(module))
        exec(compile(source.replace(self.old, self.new), self.where, "exec"), namespace)
        monkeypatch.setattr(function, "__code__", plain_function(namespace[function.__name__]).__code__)


def broken_copy(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of `module`, in a file in `folder`, with the only `old` replaced by `new`."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__}: {source.count(old)} occurrences of {old!r}"
    file = folder / f"broken_{module.__name__.rpartition('.')[2]}.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def plain_function(found: object) -> FunctionType:
    """The function inside a classmethod, staticmethod, property or decorator."""
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType)
    return found
