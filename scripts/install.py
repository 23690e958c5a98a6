"""Install pagefault and what it needs into the environment of this interpreter.

    python scripts/install.py [EXTRA ...]

Packages that the environment has are left as they are: a torch built for its GPU is never
replaced. Where everything is there, no registry is asked. What an extra names is for tests and
linters: where it can't be had, as on a machine without a network, that is said, and the rest is
done.
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


def pip(*arguments: str) -> bool:
    """Run pip install; return whether it did."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    return subprocess.run(command, check=False).returncode == 0


def install(requirements: list[str]) -> bool:
    """Install requirements under the constraints that the environment does not contradict."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    kept = [pin for pin in pins if not is_satisfied(pin.split("==")[0])]
    constraints = ROOT / ".constraints-missing.txt"
    constraints.write_text("\n".join(kept) + "\n")
    try:
        return pip("--constraint", str(constraints), *requirements)
    finally:
        constraints.unlink()


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


def main(*extras: str) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    needed = [r for r in project["dependencies"] if not is_satisfied(r)]
    for requirement in needed:
        refuse_to_replace(requirement)
    optional = [
        requirement
        for group in (
            pyproject["build-system"]["requires"],
            *(project["optional-dependencies"][extra] for extra in extras),
        )
        for requirement in group
        if not is_satisfied(requirement)
    ]
    if needed and not install(needed):
        sys.exit(f"can't be installed: {', '.join(needed)}")
    if optional and not install(optional):
        print(f"not installed, so what needs it is left out: {', '.join(optional)}")
    here = ("--no-index", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    if (needed or not is_installed_from_here()) and not pip(*here):
        sys.exit(f"{ROOT} can't be installed")


if __name__ == "__main__":
    main(*sys.argv[1:])
