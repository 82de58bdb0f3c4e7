"""The structure of the package and of its tests: imports go down only and in no circle, and a name has one meaning."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import ligermodels
from ligermodels.lazy_imports import names_of_stub
from tests import conftest

PACKAGE = Path(ligermodels.__file__).parent
# The rooms from the lowest floor up: a file imports its own room and those below it, as far as they are listed.
MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "aliases": set(),
    "plot_style": set(),
    "lazy_imports": {"errors"},
    "gpus": {"errors", "units"},
    "distributed": {"errors", "gpus"},
    "losses": {"errors"},
    "kernels": {"losses"},  # a fused op's reference is the loss of the logits
    "ops": {"kernels"},
    "nn": {"kernels", "ops"},
    "configs": {"errors"},
    "weights": {"errors", "units", "distributed", "configs", "kernels"},  # how stored numbers are decoded
    "generation": {"errors", "units", "lazy_imports", "configs", "kernels", "weights"},
    "layers": {"errors", "configs", "kernels", "weights", "generation"},
    "vision": {"errors", "configs", "kernels", "weights", "generation", "layers"},
    "adapters": {"errors", "configs", "kernels", "weights", "layers", "vision"},
    "memory": {"configs", "kernels", "weights", "generation", "layers", "vision"},
    "architectures": {"errors", "configs", "layers", "vision", "weights"},
    "tokenizer": {"errors", "lazy_imports", "weights"},
    "images": {"errors", "weights", "tokenizer"},
    "hub": {
        *("errors", "units", "lazy_imports", "configs", "weights", "layers", "vision", "adapters", "architectures"),
        *("tokenizer", "images"),
    },
    "training": {
        *("errors", "units", "aliases", "plot_style", "lazy_imports", "distributed", "losses"),
        *("kernels", "weights", "generation", "layers", "vision", "adapters", "memory", "architectures", "tokenizer"),
        *("images", "hub"),
    },
    "verify": {
        *("errors", "plot_style", "configs", "weights", "generation", "layers", "vision", "tokenizer", "hub"),
    },
    "board": {"errors", "units", "aliases", "weights", "generation", "layers", "tokenizer", "hub", "training"},
    "cli": {
        *("errors", "units", "aliases", "plot_style", "gpus", "lazy_imports", "distributed", "kernels", "configs"),
        *("weights", "generation", "layers", "adapters", "memory", "architectures", "tokenizer", "images", "hub"),
        *("training", "verify", "board", "__version__"),
    },
    "integrations": {"errors", "distributed", "architectures", "generation", "hub", "layers", "weights"},
    "__main__": {"cli"},
    "__init__": {"lazy_imports"},
}
# The same of the rooms within a room; "" are the files beside them.
DATA = {"settings", "data.formats", "data.rows", "data"}
BELOW_PLANS = {*DATA, "data.preferences", "optimizers", "checkpoints", "reporting", "run", "parallel"}
BELOW_OBJECTIVES = {*BELOW_PLANS, "planning"}
MAY_IMPORT_WITHIN = {
    "kernels": {
        "": set(),
        "activations": {""},
        "losses": {""},
        "quant": {""},
        "optim": {""},
        "norms": {"", "activations"},
        "linear_attention": {"", "norms"},
        "attention": {"", "activations", "norms"},
        "linear": {"", "activations", "losses", "norms", "quant"},
        "moe": {"", "activations", "quant"},
        "decoding": {"", "activations", "attention", "linear", "losses", "moe", "norms", "quant"},
    },
    "training": {
        "settings": set(),
        "data.formats": {"settings"},
        "data.rows": {"settings", "data.formats"},
        "data": {"settings", "data.formats", "data.rows"},
        "data.preferences": DATA,
        "reward_function": {*DATA, "data.preferences"},
        "optimizers": set(),
        "checkpoints": {"optimizers"},
        "reporting": set(),
        "run": {*DATA, "data.preferences", "checkpoints", "reporting"},
        "parallel": {"settings"},
        "planning": BELOW_PLANS,
        "objectives": BELOW_OBJECTIVES,
        "objectives.preference": {*BELOW_OBJECTIVES, "objectives"},
        "objectives.grpo": {*BELOW_OBJECTIVES, "objectives", "objectives.preference", "reward_function"},
        "objectives.distillation": {*BELOW_OBJECTIVES, "objectives", "objectives.preference", "objectives.grpo"},
        "": {
            *BELOW_OBJECTIVES,
            *("objectives", "objectives.preference", "objectives.grpo", "objectives.distillation"),
        },
    },
}


class Source(NamedTuple):
    """What the tests read of a file. The trees of all files would take a worker too much memory."""

    imports: list[ast.Import | ast.ImportFrom]
    first_imports: list[ast.Import | ast.ImportFrom]  # outside of functions
    docstrings: list[str]
    names: list[str]  # at the top level


@cache  # parsing takes most of these tests' time
def source(path):
    tree = ast.parse(path.read_text())
    nodes = [*ast.walk(tree)]
    documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return Source(
        imports=[node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)],
        first_imports=[node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)],
        docstrings=[*filter(None, map(ast.get_docstring, documented))],
        names=[*top_level_names(tree)],
    )


def imports_of(path):
    """Modules of the package that a file imports, as paths from the package: 'kernels.rope'."""
    for node in source(path).imports:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "ligermodels"
                else [node.module]
            )
        yield from (name.removeprefix("ligermodels.") for name in names if name and name.startswith("ligermodels."))


def part_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_imports_go_down_only():
    for path in PACKAGE.rglob("*.py"):
        part = part_of(path)
        upward = {name for name in imports_of(path) if name.split(".")[0] not in MAY_IMPORT[part] | {part}}
        assert not upward, f"{path.relative_to(PACKAGE)} imports {sorted(upward)}"


def lines_of_configs(path):
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return sum(node.end_lineno - node.lineno + 1 for node in classes if node.name.endswith("Config"))


NEARBY = ("errors", "configs.", "layers.", "vision.")


def test_an_architecture_imports_layers_and_the_weight_mapping_only():
    for path in (PACKAGE / "architectures").glob("[!_]*.py"):
        foreign = {n for n in imports_of(path) if not n.startswith(NEARBY) and n != "weights.mapping"}
        assert not foreign, f"{path.name} imports {sorted(foreign)}"
        assert 20 <= len(path.read_text().splitlines()) <= 120 + lines_of_configs(path), path.name


def test_the_limited_processes_have_nothing_of_the_package():
    rewards = "training/objectives/grpo/reward_worker.py"
    for worker in ("tokenizer/template_worker.py", "training/data/formats/parquet_worker.py", rewards):
        assert not set(imports_of(PACKAGE / worker))


def imports_an_oracle(nodes):
    return {"transformers", "peft"} & {
        name.split(".")[0]
        for node in nodes
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }


def test_the_product_does_not_import_the_oracles():
    """But in one file of `verify`, there not before it is asked to compare, and in `integrations`, imported by none."""
    importing = {path for path in PACKAGE.rglob("*.py") if imports_an_oracle(source(path).imports)}
    reference, integrations = PACKAGE / "verify" / "reference.py", PACKAGE / "integrations"
    assert importing == {reference, integrations / "transformers.py"}
    assert not imports_an_oracle(source(reference).first_imports)
    others = [path for path in PACKAGE.rglob("*.py") if integrations not in path.parents]
    assert not [path for path in others if any(name.startswith("integrations") for name in imports_of(path))]


def module_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def files_imported_by(path, files):
    """The modules of the package that a file imports, a package's `__init__` only where a name of its own is taken."""
    for node in source(path).imports:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ligermodels"):
            module = node.module.removeprefix("ligermodels").removeprefix(".")
            for alias in node.names:
                submodule = f"{module}.{alias.name}".removeprefix(".")
                yield submodule if submodule in files else module


def room_within(part, module):
    """The innermost room that is listed: "data.rows" of training.data.rows.packing."""
    name = f"{module}.".removeprefix(f"{part}.")
    return max((room for room in MAY_IMPORT_WITHIN[part] if room == "" or name.startswith(f"{room}.")), key=len)


@pytest.mark.parametrize("part", MAY_IMPORT_WITHIN)
def test_imports_between_the_rooms_of_a_room_go_down_only(part):
    """A package's `__init__` collects names of its rooms, and may import them all."""
    below = MAY_IMPORT_WITHIN[part]
    TopologicalSorter(below).prepare()  # raises CycleError, which names the rooms
    files = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    for path in (PACKAGE / part).rglob("[!_]*.py"):
        room = room_within(part, module_of(path))
        assert room == ".".join(path.parent.relative_to(PACKAGE / part).parts) or room == path.stem, path
        imported = {name for name in files_imported_by(path, files) if name.startswith(f"{part}.")}
        upward = {name for name in imported if room_within(part, name) not in below[room] | {room}}
        assert not upward, f"{path.relative_to(PACKAGE)} imports {sorted(upward)}"


def test_no_file_imports_itself_by_way_of_others():
    files = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set(files_imported_by(path, files)) - {name, ""} for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def top_level_names(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


# Each command has its `run`; the presets of architectures are made from constants of these names; `T` and
# names that begin with an underscore mean nothing outside their file.
MAY_REPEAT = {"main", "run", "BASE", "HUB", "TINY", "SMALL", "TEXT", "TOWER", "MULTIPLIERS", "T"}


def test_a_name_has_one_meaning():
    places = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in source(path).names:
            if not name.startswith("_") and name not in MAY_REPEAT:
                places[name].add(module_of(path))
    # ops and nn are the face of the kernels: what they define has the kernels' names.
    face = {"ops", "nn"}
    assert not {name: sorted(files) for name, files in places.items() if len(files - face) > 1}


@pytest.mark.parametrize("stub", sorted(PACKAGE.rglob("__init__.pyi")), ids=lambda stub: stub.parent.name)
def test_a_package_has_the_names_of_its_stub(stub):
    package = import_module(".".join(stub.parent.relative_to(PACKAGE.parent).parts))
    names = names_of_stub(package.__file__)
    assert names and {*names} <= {*dir(package)}
    assert all(callable(getattr(package, name)) or home == package.__name__ for name, home in names.items())
    # Importing a submodule makes it an attribute of its package, in place of the name.
    assert not [n for n, home in names.items() if home != package.__name__ and find_spec(f"{package.__name__}.{n}")]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


FRAGMENT = re.compile(r"Of |Those |The same |That of |As those |As `|.*[Mm]ust not know")


def test_docstrings_are_sentences():
    """They have a verb, and do not say what a module may not import: this file does."""
    for path in PACKAGE.rglob("*.py"):
        for text in source(path).docstrings:
            assert not FRAGMENT.match(text), f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}"


def test_slow_tests_are_in_files_that_say_so(tmp_path):
    """`-m slow` imports no other file, so that a slow test elsewhere would never run."""
    files = {name: tmp_path / f"test_{name}.py" for name in ("marked", "chosen", "neither")}
    files["marked"].write_text("@pytest.mark.slow\n")
    files["chosen"].write_text("@pytest.mark.parametrize('name', quick(NAMES, {'a'}))\n")
    files["neither"].write_text("quickly = 1\n")
    config = SimpleNamespace(option=SimpleNamespace(markexpr="slow"))
    assert [name for name, file in files.items() if conftest.pytest_ignore_collect(file, config)] == ["neither"]
    item = SimpleNamespace(
        path=files["neither"], nodeid="it", fixturenames=(), get_closest_marker=lambda name: name == "slow"
    )
    with pytest.raises(pytest.UsageError, match="it is slow, but `-m slow` would not find it"):
        conftest.pytest_collection_modifyitems([item])
