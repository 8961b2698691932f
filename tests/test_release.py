"""What a release consists of says the same everywhere: versions, Pythons, dependencies; and licences are permissive."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import sparsecoll

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
RECIPE, SPACK = (ROOT / "packaging" / name for name in ("conda-forge/recipe.yaml", "spack/package.py"))
BSD_LIKE = {
    "0BSD",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-CMU",
    "Unlicense",
    "Zlib",
}
PERMISSIVE = BSD_LIKE | {"Apache-2.0", "LLVM-exception", "PSF-2.0", "LicenseRef-MPICH", "LicenseRef-OpenMPI"}
CLASSIFIERS = ("MIT License", "BSD License", "Apache Software License", "Python Software Foundation License")


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("CITATION.cff", r"^version: (\S+)$"),
        ("CHANGELOG.md", r"^## (\S+) "),
        ("packaging/conda-forge/recipe.yaml", r'^  version: "(\S+)"$'),
        ("packaging/spack/package.py", r'^    version\("([^"]+)"'),
    ],
)
def test_the_newest_version_named_is_that_of_the_package(path, pattern):
    assert re.search(pattern, (ROOT / path).read_text(), re.M)[1] == sparsecoll.__version__


def test_the_versions_of_python_are_the_same_everywhere():
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    oldest = named[0]
    assert named == [f"3.{minor}" for minor in range(int(oldest[2:]), int(oldest[2:]) + len(named))]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert f'python_min: "{oldest}"' in RECIPE.read_text() and f'"python@{oldest}:"' in SPACK.read_text()
    assert f"python: {named}".replace("'", '"') in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("CITATION.cff", "^license: (.+)$"),
        ("packaging/conda-forge/recipe.yaml", "^  license: (.+)$"),
        ("packaging/spack/package.py", r'^    license\("(.+)"'),
    ],
)
def test_the_licence_is_the_same_everywhere(path, pattern):
    assert re.findall(pattern, (ROOT / path).read_text(), re.M) == [PROJECT["license"]]


def lower_bounds(lines):
    """The oldest version of each package that requirements allow, by its name on PyPI."""
    found = {}
    for line in lines:
        requirement = Requirement(line)
        least = [s.version for s in requirement.specifier if s.operator == ">="]
        if least:
            found[requirement.name] = least[0]
    return found


def test_recipes_need_what_the_package_needs():
    extras = PROJECT["optional-dependencies"]
    run, others = re.split(r"run_constraints:", RECIPE.read_text().partition("  run:\n")[2].partition("\ntests:")[0])
    conda = {kind: re.findall(r"^    - (\S+ .*)$", text, re.M) for kind, text in (("run", run), ("others", others))}
    assert [line.replace(" ", "") for line in conda["run"][1:]] == [re.sub(" ", "", d) for d in PROJECT["dependencies"]]
    with_extras = {"pytorch": lower_bounds(extras["torch"])["torch"], "mpi4py": lower_bounds(extras["mpi"])["mpi4py"]}
    assert lower_bounds(line.replace(" ", "") for line in conda["others"]) == with_extras
    (script,) = PROJECT["scripts"].items()
    assert f"      - {' = '.join(script)}\n" in RECIPE.read_text()
    (build,) = PYPROJECT["build-system"]["requires"]
    assert f"    - {build.replace('>=', ' >=')}\n" in RECIPE.read_text()


def test_the_recipe_of_spack_needs_what_the_package_needs():
    extras = PROJECT["optional-dependencies"]
    always = [*PYPROJECT["build-system"]["requires"], *PROJECT["dependencies"]]
    wanted = {
        (requirement.name, variant): requirement.specifier
        for variant, lines in {"": always, **{name: extras[name] for name in ("mpi", "torch", "plot")}}.items()
        for requirement in map(Requirement, lines)
    }
    found = {
        (name, variant): (least, most)
        for name, least, most, variant in re.findall(
            r'depends_on\("py-([\w-]+?)(?:@([\d.]+):([\d.]*))?"(?:, when="\+(\w+)")?', SPACK.read_text()
        )
    }
    assert found.keys() == wanted.keys()
    for key, (least, most) in found.items():
        bounds = {s.operator: Version(s.version) for s in wanted[key]}
        assert bounds.get(">=") == (Version(least) if least else None), key
        assert ("<" in bounds) == bool(most), key
        if most:  # Spack's end holds all versions that begin with it
            assert wanted[key].contains(f"{most}.999") and Version(most).minor + 1 == bounds["<"].minor, key
    assert set(re.findall(r'variant\("(\w+)"', SPACK.read_text())) == {variant for _, variant in found} - {""}


def requirements(names):
    """The names of installed packages that these need, with them."""
    found, left = {}, list(names)
    while left:
        name = left.pop()
        try:
            about = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.setdefault(name.lower(), about) is about and name != "torch":  # CUDA builds need what NVIDIA licenses
            wanted = [Requirement(text) for text in about.requires or []]
            left += [
                r.name for r in wanted if (r.marker is None or r.marker.evaluate()) and r.name.lower() not in found
            ]
    return found


def test_what_is_installed_with_the_package_has_permissive_licences():
    packages = requirements(["numpy", "numba", "mpi4py", "mpich", "openmpi", "torch", "matplotlib"])
    assert {"numpy", "numba", "llvmlite"} <= packages.keys()
    for name, about in packages.items():
        expression = about.metadata.get("License-Expression") or about.metadata.get("License", "").splitlines()[:1]
        words = re.findall(r"[\w.-]+", expression) if isinstance(expression, str) else []
        classifiers = " ".join(c for c in about.metadata.get_all("Classifier", []) if c.startswith("License"))
        if words:
            assert {*words} - {"AND", "OR", "WITH"} <= PERMISSIVE, (name, expression)
        else:
            text = " ".join([*expression, classifiers])
            assert any(c in classifiers for c in CLASSIFIERS) or re.search("|".join(PERMISSIVE), text), (name, text)
        assert "GNU" not in classifiers, (name, classifiers)
