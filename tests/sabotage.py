"""Replaces code of a function in place, so that existing references to the function run the broken code."""

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from types import FunctionType


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


def plain_function(found: object) -> FunctionType:
    """The function inside a classmethod, staticmethod, property or decorator."""
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType)
    return found
