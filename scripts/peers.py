"""Fetch the released kernels of other engines that `--target` can test, into `.peers/`.

They are fetched and never copied into this repository: each stays under its own licence.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".peers"

# Requirement, and the files of its wheel that an adapter loads.
PEERS = {
    "tokenspeed": (
        "tokenspeed==0.1.1",
        (
            "tokenspeed/runtime/execution/cache_loc_kernel.py",
            "tokenspeed/runtime/layers/attention/chunk.py",
        ),
    ),
}


class PeerError(Exception):
    """A peer that can't be fetched; the message is one line that says why."""


def wheel_of(requirement: str) -> Path:
    """Return the wheel of a pinned requirement, downloaded unless it is there.

    Raises:
        PeerError: pip can't download it.
    """
    name, version = requirement.split("==")
    wheels = FOLDER / "wheels"
    there = sorted(wheels.glob(f"{name}-{version}-*.whl"))
    if there:
        return there[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "-d", str(wheels), requirement],
        check=False,
        capture_output=True,
        text=True,
    )
    there = sorted(wheels.glob(f"{name}-{version}-*.whl"))
    if done.returncode or not there:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = f"pip download ended with status {done.returncode}"
        if said:
            reason = said[-1].removeprefix("ERROR: ")
        raise PeerError(f"{requirement} can't be fetched: {reason}")
    return there[0]


def unpack(wheel: Path, folder: Path, files: tuple[str, ...]) -> None:
    """Write some files of a wheel under a folder, without the name of its package.

    Raises:
        PeerError: The wheel is damaged, or lacks one of the files.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in files:
                path = folder / Path(file).relative_to(folder.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(file))
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise PeerError(f"{wheel.name} was damaged, and is deleted: {error}") from error
    except KeyError as error:
        raise PeerError(f"{wheel.name} lacks a file: {error.args[0]}") from error


def main() -> None:
    for name, (requirement, files) in PEERS.items():
        try:
            unpack(wheel_of(requirement), FOLDER / name, files)
        except (PeerError, OSError) as error:
            sys.exit(f"peers: {error}")
        print(f"{requirement}: {len(files)} files in {(FOLDER / name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
