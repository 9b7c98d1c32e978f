"""What every format promises, as tests that each format inherits.

A subclass says how the format's own library writes and loads a state dict. The library is the
oracle: it writes what ckpttool reads, and loads what ckpttool writes.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool import Checkpoint, CkptError, Refused, plugin
from command import main
from places import ROOT
from surroundings import trust_file_times

State = dict[str, torch.Tensor]
MANY = "3,000 keys"
ALL = "all in one file"
FEW = (ALL, "0-dim", "empty")  # states of a conversion: many dtypes, and files with few bytes
SHARDS = {
    "there.safetensors": "there/model.safetensors.index.json",
    "there.pt": "there/pytorch_model.bin.index.json",
}
_MOST_HELD = 1 << 26  # bytes that reading a small file may hold


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of that dtype with bytes that differ as much as possible."""
    if dtype == torch.bool:
        return torch.arange(math.prod(shape)).remainder(2).bool().reshape(shape)
    count = math.prod(shape) * dtype.itemsize
    return (torch.arange(count) % 120).to(torch.uint8).view(dtype).reshape(shape)


INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NAMES = ("plain", ".leading", "trailing.", "a..b", "foo@1.w", "with space", "ключ.веса", '"q"')
STATES: dict[str, Callable[[], State]] = {
    "0-dim": lambda: {"step": torch.tensor(3.5), "n": torch.tensor(7)},
    "empty": lambda: {
        "none": torch.empty(0),
        "rows": torch.empty(3, 0, dtype=torch.int64),
        "w": torch.ones(2),
    },
    "bool": lambda: {"mask": filled((3, 5), torch.bool)},
    "integers": lambda: {name: filled((4,), getattr(torch, name)) for name in INTEGERS},
    "half": lambda: {"bf16": filled((5, 3), torch.bfloat16), "fp16": filled((5, 3), torch.float16)},
    "fp8": lambda: {name: filled((3, 3), getattr(torch, name)) for name in FLOATS},
    "complex": lambda: {"c64": filled((2, 3), torch.complex64)},
    "names": lambda: {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)},
    MANY: lambda: {
        f"layers.{i // 100}.{i % 100}.weight": torch.full((1,), float(i)) for i in range(3_000)
    },
}


def joined() -> State:
    """Return all states but the largest as one."""
    state: State = {}
    for name, build in STATES.items():
        if name != MANY:
            state.update(build())
    return state


def assert_equal(left: State, right: State) -> None:
    """Compare names, dtypes, shapes and bytes."""
    assert left.keys() == right.keys()
    for key in left:
        assert (left[key].dtype, left[key].shape) == (right[key].dtype, right[key].shape), key
        both = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left[key], right[key]))
        assert torch.equal(*both), key


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of the file, or of each file in the folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


def remap(path: Path, out: Path, *options: str) -> Path:
    """Write `out`; return it, or its folder if it is an index."""
    out.parent.mkdir(exist_ok=True, parents=True)
    assert main(["remap", str(path), "-o", str(out), "--no-fsync", *options]) == 0
    return out.parent if out.name.endswith(".index.json") else out


class FormatContract:
    """Inherit it as ``class TestNAME(FormatContract)``."""

    name: str  # of the format
    ending = ""  # of a file that the library writes; empty for a folder
    out = ""  # the name of an output; empty if the format is only read
    keeps_bytes = True  # a rename and its inverse restore the same bytes
    edits = False  # in place, with undo
    objects = False  # an output can hold entries that are no tensors
    lacks: frozenset[torch.dtype] = frozenset()  # dtypes that the library does not write or load
    setup = ""  # code of another process that makes the format known

    def save(self, state: State, path: Path) -> None:
        """Write the state dict with the format's own library."""
        raise NotImplementedError

    def load(self, path: Path) -> State:
        """Load the state dict with the format's own library."""
        raise NotImplementedError

    # Help for the tests

    def state(self, name: str) -> State:
        """Return the state, without the dtypes that the library lacks."""
        state = joined() if name == ALL else STATES[name]()
        return {key: tensor for key, tensor in state.items() if tensor.dtype not in self.lacks}

    def saved(self, state: State, folder: Path) -> Path:
        path = folder / f"in{self.ending}"
        self.save(state, path)
        return path

    def run_without_torch(self, *words: str) -> None:
        """Run a command in a process of its own, and check that it does not import torch."""
        code = "import sys; from ckpttool.cli.app import main; status = main(sys.argv[1:]);"
        code += "sys.exit(status or 'torch' in sys.modules)"
        command = [sys.executable, "-c", self.setup + code, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr

    def broken(
        self, path: Path, folder: Path
    ) -> Iterator[tuple[Path, bytes, Callable[[bytes], Path]]]:
        """Yield each file of the checkpoint, its bytes, and a function that replaces them and
        returns the path of the checkpoint.
        """
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        times = itertools.count(10**18, 10**9)
        for file in files:
            data = file.read_bytes()

            def replaced(new: bytes, file: Path = file) -> Path:
                file.write_bytes(new)
                os.utime(file, ns=(next(times), next(times)))  # no state is read twice
                return path

            yield file, data, replaced
            file.write_bytes(data)

    # Reading

    @pytest.mark.parametrize("name", STATES)
    def test_the_index_is_what_the_library_loads(self, name: str, tmp_path: Path) -> None:
        state = self.state(name)
        if not state:
            return
        path = self.saved(state, tmp_path)
        checkpoint = ckpttool.open_checkpoint(path)
        assert checkpoint.format == self.name
        outlines = {
            entry.key: (entry.dtype, entry.shape, entry.nbytes)
            for section in checkpoint.sections
            for entry in section.tensors
        }
        assert outlines == {
            key: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size())
            for key, t in self.load(path).items()
        }

    def test_values_equal_those_in_memory(self, tmp_path: Path) -> None:
        state = self.state(ALL)
        path = str(self.saved(state, tmp_path))
        assert ckpttool.diff(path, state, values=True).identical
        key = next(key for key, tensor in state.items() if tensor.dtype == torch.float32)
        changed = {**state, key: state[key] + 1}
        entries = ckpttool.diff(path, changed, values=True).entries
        assert [entry.left for entry in entries if entry.status == "value"] == [(key,)]

    def test_torch_is_not_imported(self, tmp_path: Path) -> None:
        path = self.saved(self.state("0-dim"), tmp_path)
        self.run_without_torch("inspect", str(path))
        if self.out:
            out = str(tmp_path / "renamed" / Path(self.out).name)
            (tmp_path / "renamed").mkdir()
            self.run_without_torch("remap", str(path), "-o", out, "--rule", "step => steps")

    # Damaged and hostile files

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Read files that were written just now without waiting for the clock."""
        trust_file_times(monkeypatch)

    def test_a_file_that_is_cut_at_any_byte_is_refused(self, tmp_path: Path) -> None:
        path = self.saved(self.state("0-dim"), tmp_path)
        for file, data, replaced in self.broken(path, tmp_path):
            for length in range(len(data.rstrip(b"\n"))):
                where = replaced(data[:length])
                with pytest.raises(CkptError):  # noqa: PT012 (which length it was)
                    self.read_all(where)
                    pytest.fail(f"{file.name} was read with {length} of {len(data)} bytes")

    def test_huge_numbers_cost_no_memory(self, tmp_path: Path) -> None:
        """Whatever sizes a file claims, reading holds little, and every tensor is inside of it."""
        path = self.saved(self.state("0-dim"), tmp_path)
        tracemalloc.start()
        try:
            for _, data, replaced in self.broken(path, tmp_path):
                for offset in range(0, len(data), 8):
                    hostile = data[:offset] + b"\xff" * 8 + data[offset + 8 :]
                    self.check_bounds(replaced(hostile[: len(data)]))
            peak = tracemalloc.get_traced_memory()[1]
            assert peak < _MOST_HELD, f"{peak:,} bytes"
        finally:
            tracemalloc.stop()

    def read_all(self, path: Path) -> Checkpoint:
        checkpoint = ckpttool.open_checkpoint(path)
        ckpttool.inspect(checkpoint, stats=True)
        return checkpoint

    def check_bounds(self, path: Path) -> None:
        try:
            checkpoint = ckpttool.open_checkpoint(path)
        except CkptError:
            return
        for section in checkpoint.sections:
            for entry in section.tensors:
                data = None if entry.storage is None else entry.storage.data
                if isinstance(data, plugin.Span):
                    size = Path(data.path).stat().st_size
                    assert data.offset + data.length <= size, (entry, size)

    # Conversion

    @pytest.mark.parametrize("name", FEW)
    @pytest.mark.parametrize("target", ["there.safetensors", "there.pt"])
    def test_a_conversion_and_its_inverse_restore_the_values(
        self, target: str, name: str, tmp_path: Path
    ) -> None:
        state = self.state(name)
        path = self.saved(state, tmp_path)
        if Path(target).suffix == Path(self.out).suffix:  # the same format: as shards
            target = SHARDS[target]
        there = remap(path, tmp_path / target, "--verify")
        assert ckpttool.diff(str(there), state, values=True).identical
        if self.out:
            back = remap(there, tmp_path / "back" / self.out)
            assert_equal(self.load(back), state)

    def test_a_conversion_refuses_all_that_has_no_place(self, tmp_path: Path) -> None:
        if not self.out:
            return
        content = {"model": {"w": torch.ones(2)}, "epoch": 3, "note": "text"}
        torch.save(content, tmp_path / "objects.pt")
        if self.objects:
            remap(tmp_path / "objects.pt", tmp_path / "out" / self.out, "--rule", "w => v")
            return
        out = tmp_path / "out" / Path(self.out).name
        out.parent.mkdir()
        with pytest.raises(Refused) as caught:
            ckpttool.convert(str(tmp_path / "objects.pt"), str(out))
        assert [problem.key for problem in caught.value.problems] == ["epoch", "note"]

    # Renames

    @pytest.mark.parametrize("name", [*FEW, MANY])
    def test_a_rename_and_its_inverse_restore_the_bytes(self, name: str, tmp_path: Path) -> None:
        if not self.out:
            return
        state = self.state(name)
        path = self.saved(state, tmp_path)
        renamed = remap(path, tmp_path / self.out, "--rule", "{k*} => deep.er.{k*}")
        expected = {f"deep.er.{key}": tensor for key, tensor in state.items()}
        assert_equal(self.load(renamed), expected)
        back = remap(renamed, tmp_path / "back" / self.out, "--rule", "deep.er.{k*} => {k*}")
        assert_equal(self.load(back), state)
        if self.keeps_bytes:
            assert contents(back) == contents(path)

    def test_an_edit_in_place_is_undone(self, tmp_path: Path) -> None:
        path = self.saved(self.state("names"), tmp_path)
        before = contents(path)
        words = ["remap", str(path), "--in-place", "--no-fsync", "--rule", "plain => other"]
        assert main(words) == (0 if self.edits else 1)
        if not self.edits:
            assert contents(path) == before
            return
        assert "other" in self.load(path)
        assert main(["undo", str(path)]) == 0
        assert contents(path) == before
