"""What a wheel holds beside Python: the shipped model and the page that the server serves."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")

BUILD = """
import sys
from scikit_build_core.build import build_wheel
print(build_wheel(sys.argv[1], {"wheel.cmake": "false"}))
"""


@pytest.fixture(scope="module")
def names(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of a wheel of this source tree, built without its C++ part."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("folder", ["server/static", "data"])
def test_a_wheel_holds_each_file_of_the_folder(root: Path, names: set[str], folder: str) -> None:
    package = root / "python"
    files = [file for file in (package / "flexinfer" / folder).rglob("*") if file.is_file()]
    assert len(files) > 5
    assert {str(file.relative_to(package)) for file in files} <= names


def test_a_wheel_holds_nothing_but_the_package(names: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flexinfer"}


@pytest.mark.parametrize(("state", "has_module"), [("wheel", False), ("editable", True)])
def test_only_editable_installs_have_the_module_that_injects_faults(
    root: Path, tmp_path: Path, state: str, has_module: bool
) -> None:
    """Configured as scikit-build-core does, not built: what would be installed is known then."""
    options = ("SKBUILD=2", f"SKBUILD_STATE={state}", f"Python_EXECUTABLE={sys.executable}")
    nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True)
    command = ["cmake", "-S", str(root), "-B", str(tmp_path), f"-Dnanobind_DIR={nanobind.strip()}"]
    subprocess.run([*command, *(f"-D{o}" for o in options)], check=True, capture_output=True)
    installed = (tmp_path / "cmake_install.cmake").read_text()
    assert "/_vtensor.c" in installed
    assert ("/_vtensor_testing.c" in installed) == has_module


def test_a_wheel_holds_every_python_file(root: Path, names: set[str]) -> None:
    """The pattern `build*`, meant for the folder at the root, once left engine/build.py out."""
    package = root / "python"
    assert {str(file.relative_to(package)) for file in package.rglob("*.py")} <= names
