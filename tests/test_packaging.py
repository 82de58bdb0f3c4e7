"""What is published: the sdist and the wheel, and the files that repeat versions, limits or names of others."""

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
import yaml

import ligermodels
from tests.pages import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
LARGEST_WHEEL = 2e6  # bytes
# Tests that read the repository's pages and scripts while they are collected: from an sdist, those that lie in it.
READERS = ("tests/test_packaging.py", "tests/test_docs.py", "tests/test_layering.py", "tests/training/test_fitting.py")
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|ligermodels\.egg-info/.*")


def built(kind, source, folder):
    """Builds an sdist or a wheel of the source tree, as `python -m build` does; returns the file."""
    subprocess.run([sys.executable, "-c", BUILD, f"build_{kind}", folder], cwd=source, check=True, capture_output=True)
    (file,) = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return file


@pytest.fixture(scope="module")
def tracked():
    """The files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of the repository")
    return [name for name in listed.stdout.split("\0")[:-1] if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def unpacked(tracked, tmp_path_factory):
    """The folder of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked:
        copy = folder / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    with tarfile.open(built("sdist", folder / "checkout", folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"ligermodels-{ligermodels.__version__}"


@pytest.mark.slow
def test_the_sdist_is_the_repository_and_its_tests_can_be_collected(unpacked, tracked):
    names = [str(file.relative_to(unpacked)) for file in unpacked.rglob("*") if file.is_file()]
    assert sorted(name for name in names if not GENERATED.fullmatch(name)) == sorted(tracked)
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider", *READERS]
    done = subprocess.run(
        collect, cwd=unpacked, env=os.environ | {"PYTHONPATH": str(unpacked)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "tests/test_packaging.py: " in done.stdout


@pytest.mark.slow
def test_the_wheel_is_the_package_with_a_description_that_renders_anywhere(unpacked, tracked, tmp_path):
    file = built("wheel", unpacked, tmp_path)
    assert file.stat().st_size < LARGEST_WHEEL
    with zipfile.ZipFile(file) as wheel:
        files = [name for name in wheel.namelist() if not name.startswith("ligermodels-")]
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(wheel.read(metadata))
    assert sorted(files) == sorted(name for name in tracked if name.startswith("ligermodels/"))
    assert (fields["License-Expression"], fields["Author"]) == ("BSD-2-Clause", "The ligermodels authors")
    assert fields["Description-Content-Type"] == "text/markdown"
    description = fields.get_payload()
    assert description.startswith("# ligermodels\n") and "![" not in description
    assert "described in docs/kernels.md |" in description
    assert "](https://github.com/linkedin/Liger-Kernel)" in description
    assert not re.findall(r"\]\((?!https://)[^)]*\)", description)


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert ligermodels.__version__ == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_pythons_that_are_promised_are_those_that_are_tested():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    tested = jobs["suite"]["strategy"]["matrix"]["python"]
    assert [f"Programming Language :: Python :: {version}" for version in tested] == [
        name for name in PROJECT["classifiers"] if re.search(r":: 3\.\d", name)
    ]
    assert PROJECT["requires-python"] == f">={tested[0]}" and PYPROJECT["tool"]["mypy"]["python_version"] == tested[0]


def test_continuous_integration_runs_the_commands_of_contributing():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    runs = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert {run for run in runs if run not in page} == {"pip install -c constraints.txt ruff", 'pytest -n 4 -m ""'}
    assert jobs["gpu"]["if"] == "github.event.action == 'labeled' && github.event.label.name == 'gpu'"


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_a_template_of_issues_is_a_form(path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": False}
        return
    assert set(form) == {"name", "description", "labels", "body"}
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea") and ("id" in field) == (field["type"] == "textarea")


def test_the_image_installs_the_tested_versions_with_extras_that_exist():
    (install,) = re.findall(r"^RUN pip install .*", (ROOT / "Dockerfile").read_text(), re.M)
    assert " -c constraints.txt -e " in install
    assert set(re.search(r"\[(.+)\]", install)[1].split(",")) <= set(PROJECT["optional-dependencies"])
