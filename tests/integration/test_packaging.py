"""What is built is what is imported: every folder, under its one name, with its data files."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
OUTER = ("envs", "tools", "trainers")


def package_name(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "relax_agent" else ("relax_agent", *parts))


def package_folders() -> list[Path]:
    """Every folder with an ``__init__.py``, stand-ins for other packages left out."""
    return [
        init.parent
        for top in ("relax_agent", *OUTER)
        for init in sorted((ROOT / top).rglob("__init__.py"))
        if "shims" not in init.parts
    ]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy, so that the work tree gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "relax_agent", *OUTER):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(out), str(source)], check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


def test_the_list_of_packages_names_every_folder_with_an_init_file():
    assert sorted(SETUPTOOLS["packages"]) == sorted(map(package_name, package_folders()))


def test_every_folder_with_modules_is_a_package():
    """A folder without ``__init__.py`` would be left out of the wheel without a word."""
    packages = set(package_folders())
    modules = [p for top in ("relax_agent", *OUTER) for p in (ROOT / top).rglob("*.py")]
    assert [p for p in modules if p.parent not in packages and "shims" not in p.parts] == []


def test_a_wheel_holds_every_module_and_data_file_and_no_top_level_besides_relax_agent(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"relax_agent"}
    for folder in package_folders():
        place = package_name(folder).replace(".", "/")
        for module in folder.glob("*.py"):
            assert f"{place}/{module.name}" in names
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / package.replace(".", "/")
        for file in (f for pattern in patterns for f in folder.glob(pattern)):
            assert file.relative_to(ROOT).as_posix() in names


def test_an_installed_wheel_is_imported_and_run_from_a_clean_environment(wheel, tmp_path):
    """The dependencies are lent by this environment, the package itself is not."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    lent = tmp_path / "lent"
    lent.mkdir()
    for item in Path(os.path.dirname(pytest.__file__)).parent.iterdir():
        if "relax_agent" not in item.name and item.suffix != ".pth":
            (lent / item.name).symlink_to(item)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(lent)
    code = (
        "import relax_agent, relax_agent.envs, relax_agent.tools, relax_agent.trainers, sys\n"
        "for m in list(sys.modules.values()):\n"
        "    if (m.__name__ + '.').startswith('relax_agent.'):\n"
        "        assert m.__file__.startswith(sys.argv[1]), m.__file__\n"
    )
    subprocess.run(
        [python, "-c", code, str(site)], check=True, cwd=tmp_path, env=environment, timeout=120
    )
    shown = subprocess.run(
        [python, "-c", "from relax_agent.cli import main; main()", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    assert "train" in shown.stdout


def test_the_command_exists_and_its_function_can_be_called():
    from importlib.metadata import entry_points

    (command,) = entry_points(group="console_scripts", name="relax-agent")
    assert callable(command.load())
