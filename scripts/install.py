"""Install pagefault and what it needs into the environment of this interpreter.

Packages that the environment has are left as they are: a torch built for its GPU is never
replaced. Where everything is there, no registry is asked.
"""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def is_satisfied(requirement: str) -> bool:
    """Return whether the environment has a package in the range asked for."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # Every pip brings one, under a name of its own.
        from pip._vendor.packaging.requirements import Requirement
    wanted = Requirement(requirement)
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return wanted.specifier.contains(version, prereleases=True)


def refuse_to_replace(requirement: str) -> None:
    """Stop where a torch or triton is there, but out of the range asked for."""
    name = requirement.split(">")[0]
    if name in ("torch", "triton") and is_satisfied(name):
        version = importlib.metadata.version(name)
        sys.exit(f"{name} {version} is installed, but pagefault needs {requirement}")


def pip(*arguments: str) -> None:
    """Run pip install, or stop with its exit status."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"{' '.join(command)} failed with exit status {status}")


def is_installed_from_here() -> bool:
    """Return whether this checkout is installed as it stands."""
    try:
        distribution = importlib.metadata.distribution("pagefault")
    except importlib.metadata.PackageNotFoundError:
        return False
    origin = distribution.read_text("direct_url.json") or ""
    installed_at = Path(distribution.locate_file("pagefault-0.dist-info")).parent
    newest = max((ROOT / name).stat().st_mtime for name in ("pyproject.toml", "src/pagefault"))
    metadata = next(installed_at.glob("pagefault-*.dist-info/direct_url.json"), None)
    return ROOT.as_uri() in origin and metadata is not None and metadata.stat().st_mtime > newest


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    missing = [requirement for requirement in wanted if not is_satisfied(requirement)]
    for requirement in missing:
        refuse_to_replace(requirement)
    # On a machine without a network the linters may be missing; the tests do not need them.
    if missing:
        names = [
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
        ]
        kept = [line for line in names if not is_satisfied(line.split("==")[0])]
        constraints = ROOT / ".constraints-missing.txt"
        constraints.write_text("\n".join(kept) + "\n")
        try:
            pip("--constraint", str(constraints), *missing)
        finally:
            constraints.unlink()
    if missing or not is_installed_from_here():
        pip("--no-index", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))


if __name__ == "__main__":
    main()
