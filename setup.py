"""Build-time check: the three links of usp/ must be folders. Everything else stands in pyproject.toml."""

from pathlib import Path

from setuptools import setup


def check_links(root: Path) -> None:
    """Refuse to build a package whose links were turned into text files (a .zip, core.symlinks=false)."""
    broken = [
        name for name in ("mesh", "models", "tools") if not (root / "usp" / name / "__init__.py").is_file()
    ]
    if broken:
        raise SystemExit(
            f"usp/{broken[0]} must be a link to the folder ../{broken[0]}, got something else. "
            "Repair the checkout: git config core.symlinks true && git checkout -- usp"
        )


check_links(Path(__file__).resolve().parent)
setup()
