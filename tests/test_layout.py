"""How the project is laid out: who imports whom, what importing does, and what an installed wheel holds."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("mesh", "models", "tools")
BELOW = {  # folder -> prefixes it may not import
    "mesh": ("usp.models", "usp.tools"),
    "usp": ("usp.models", "usp.tools"),
    "models": ("usp.tools",),
    "tools": (),
}
KEPT = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "usp", *PARTS)


def sources(folder: str) -> list[Path]:
    return sorted(
        p for p in (ROOT / folder).rglob("*.py") if p.relative_to(ROOT / folder).parts[0] not in PARTS
    )


def imported(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", BELOW)
def test_imports_point_down(folder: str) -> None:
    assert sources(folder), f"{folder} holds no module"
    for path in sources(folder):
        for name in imported(path):
            assert not name.startswith(BELOW[folder]), f"{path.relative_to(ROOT)} imports {name}"
            assert name.split(".")[0] not in PARTS, f"{path.relative_to(ROOT)} imports {name}"
            if folder == "mesh" and name.split(".")[0] == "usp":
                assert name.startswith("usp.mesh"), f"{path.relative_to(ROOT)} imports {name}"


def python(code: str, *, cwd: Path, path: str = "") -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", PARTS)
def test_bare_import_names_the_right_spelling(name: str) -> None:
    result = python(f"import {name}", cwd=ROOT)
    assert result.returncode != 0
    assert "ImportError" in result.stderr.splitlines()[-1]
    assert f"usp.{name}" in result.stderr.splitlines()[-1]


def test_importing_does_no_work() -> None:
    modules = ["usp"]
    for folder in BELOW:
        for file in sources(folder):
            names = [folder, *file.relative_to(ROOT / folder).with_suffix("").parts]
            names = names if folder == "usp" else ["usp", *names]
            modules.append(".".join(n for n in names if n != "__init__"))
    # Transformers' model classes import torch._dynamo, which names its cache folder in the environment
    with_hf = ("usp.models.hf", "usp.tools.examples", "usp.tools.bench.curves", "usp.tools.bench.entries")
    hf = [name for name in modules if name.startswith(with_hf)]
    own = [name for name in modules if name not in hf]
    code = (
        "import os, importlib; before = dict(os.environ)\n"
        f"for name in {own!r}: importlib.import_module(name)\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
        "import torch._dynamo; before = dict(os.environ)\n"
        f"for name in {hf!r}: importlib.import_module(name)\n"
        "import torch, torch.distributed as dist\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
        "assert not dist.is_initialized()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert torch.get_default_dtype() == torch.float32\n"
    )
    result = python(code, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def clone(target: Path) -> Path:
    """The files of a clean checkout, links as links."""
    target.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in KEPT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, target / name)
    return target


def build(source: Path, wheels: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", "--wheel-dir", str(wheels), str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = build(clone(folder / "clone"), folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(folder.glob("usp-*.whl"))


def test_wheel_holds_real_files_under_usp_only(wheel: Path) -> None:
    want = {p.relative_to(ROOT).as_posix() for p in sources("usp")}
    want |= {f"usp/{p.relative_to(ROOT).as_posix()}" for part in PARTS for p in sources(part)}
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
        assert all(n.split("/")[0] == "usp" or ".dist-info/" in n for n in names)
        assert want <= names
        assert {n for n in names if n.endswith(".py")} == want
        assert archive.read("usp/tools/cli.py") == (ROOT / "tools" / "cli.py").read_bytes()


def test_installed_wheel_runs_beside_a_users_own_folders(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in PARTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    code = "import sys; sys.argv = ['usp', '--help']; import models, usp.models; assert models.mine\n"
    code += "assert usp.models.__file__.endswith('site/usp/models/__init__.py'), usp.models.__file__\n"
    code += "from usp.tools.cli import main; main()"
    result = python(code, cwd=tmp_path, path=str(site))
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout
    assert "convert" in result.stdout


def test_links_that_became_text_are_refused(tmp_path: Path) -> None:
    source = clone(tmp_path / "clone")
    (source / "usp" / "models").unlink()
    (source / "usp" / "models").write_text("../models")
    result = build(source, tmp_path)
    assert result.returncode != 0
    assert "git config core.symlinks true && git checkout -- usp" in result.stdout + result.stderr
    assert not list(tmp_path.glob("*.whl"))
    used = python("import usp", cwd=source)
    assert used.returncode != 0
    assert "git config core.symlinks true && git checkout -- usp" in used.stderr
