"""A format: how to recognize its files, what it can hold, and the module that reads and writes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.names import Names
from ckpttool.core.pickle_imports import Import
from ckpttool.core.values import dataclass
from ckpttool.formats.look import Look
from ckpttool.io.pieces import Edited, Files, Pieces


@dataclass(frozen=True, slots=True)
class Holds:
    """The contents that a format can hold besides the dense tensors of one state dict.

    `objects`: whatever torch.save pickles: several sections, optimizers, other objects; the writer
    of one such format takes the container of any other. `aliases`: one tensor under two names.
    `versions`: the versions of modules (``_metadata``). `form`: of which form the keys are.
    `metadata`: pairs of texts (``__metadata__``). `subclass_parts`: the list of the parts of
    torchao's tensors. `order`: its keys are in the order of definition. `rank_parts`: parts of
    tensors, which a remap gathers. `programs`: programs, which keep their own names.
    `code_storages`: storages that only its code uses, and that other formats leave out.
    """

    objects: bool = False
    aliases: bool = False
    versions: bool = False
    form: bool = True
    metadata: bool = False
    subclass_parts: bool = False
    order: bool = False
    rank_parts: bool = False
    programs: bool = False
    code_storages: bool = False


def _never(look: Look) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Format:
    """A format. `module` (its full name) is imported when a file of the format is read or written.

    `matches` returns the path to read a checkpoint by if what it looks at is of this format, else
    None; it may raise `CkptError` for a file that is of this format and cannot be read.

    The module has ``read(path) -> Checkpoint``, which raises `CkptError` for a file that is
    truncated, corrupt or unsafe. To write files, it also has ``layout(checkpoint) -> Pieces``, and
    `endings` choose the format for an output. A format that fills a folder has an `index` instead,
    the ending of the file that is read first, and ``layout_files``; `sharded`: its files are made
    with at most so many bytes each. An output in a folder has the format `shards` if the source is
    a file of this format.

    `succeeded_by`: the format that its library writes today instead.

    `package` is the distribution that the format comes from; empty for ckpttool's own.
    """

    name: str
    title: str
    module: str
    matches: Callable[[Look], str | None] = _never
    endings: tuple[str, ...] = ()
    holds: Holds = Holds()
    index: str = ""
    sharded: bool = False
    shards: str = "sharded"
    succeeded_by: str = ""
    package: str = ""

    @property
    def folder(self) -> bool:
        """Whether it is written as the files of a folder."""
        return bool(self.index)

    @property
    def writes(self) -> bool:
        """Whether an output can have the format."""
        return self.folder or (bool(self.endings) and self._has("layout"))

    def read(self, path: str) -> Checkpoint:
        """Return the index of the file or folder at `path`. Raises `CkptError` if it is truncated,
        corrupt or unsafe.
        """
        checkpoint: Checkpoint = self._call("read", path)
        return checkpoint

    def layout(self, checkpoint: Checkpoint) -> Pieces:
        """Return the bytes of the checkpoint's file. Raises `Refused` for entries that the format
        cannot hold.
        """
        if not self._has("layout"):
            raise Refused(
                f"{self.title} is only read",
                hint="choose an output that ends in .safetensors or .pt",
            )
        pieces: Pieces = self._call("layout", checkpoint)
        return pieces

    def layout_files(
        self, checkpoint: Checkpoint, name: str = "", max_shard_size: int | None = None
    ) -> Files:
        """Return the files of the checkpoint's folder; `name` is the name of the index,
        `max_shard_size` is in bytes.

        Raises `Refused` for entries that the format cannot hold.
        """
        files: Files = self._call("layout_files", checkpoint, self.name, name, max_shard_size)
        return files

    def check_holds(self, checkpoint: Checkpoint) -> bool:
        """Raise `Refused` for entries that the format cannot hold, if that is known without a
        layout; else return False.
        """
        return self._has("check_holds") and bool(self._call("check_holds", checkpoint, self.name))

    def layout_in_place(self, checkpoint: Checkpoint, name: str) -> Mapping[str, Edited] | None:
        """Return the edit of the file `name`, or of the files of the folder, that leaves all
        tensors in place.

        None if the format or the change needs everything to be rewritten.
        """
        if not self._has("layout_in_place"):
            return None
        edit: Edited | Mapping[str, Edited] | None = self._call("layout_in_place", checkpoint)
        return {name: edit} if isinstance(edit, Edited) else edit

    def refusal(self, checkpoint: Checkpoint) -> str:
        """Return why the library that reads such files refuses this one; empty if it does not."""
        return str(self._call("refusal", checkpoint)) if self._has("refusal") else ""

    def holds_each_option(self, checkpoint: Checkpoint, path: str) -> bool:
        """Return whether each option of the optimizer at `path` has its own key in the file,
        which its loader asks for.
        """
        return self._has("holds_each_option") and bool(
            self._call("holds_each_option", checkpoint, path)
        )

    @property
    def drops_unused_bytes(self) -> bool:
        """Whether an edit in place can leave bytes behind that a copy does not have."""
        return self._has("holds_unused_bytes")

    def holds_unused_bytes(self, checkpoint: Checkpoint) -> bool:
        """Return whether a copy differs although nothing changes: it drops bytes that the index no
        longer lists, or gets an index that fits.
        """
        return self.drops_unused_bytes and bool(self._call("holds_unused_bytes", checkpoint))

    @property
    def links_pickles(self) -> bool:
        """Whether pickles are in files that stay as they are, and an index lists what is read."""
        return self._has("linked_imports")

    def linked_imports(
        self, imports: Iterable[Import], files: Files, linked: Mapping[str, str]
    ) -> set[str] | None:
        """Return the names of those imports whose pickles are read from the linked files (name ->
        real path); None if everything in such a file is read.
        """
        if not self.links_pickles:
            return None
        names: set[str] = self._call("linked_imports", imports, files, linked)
        return names

    def read_program(self, path: str, name: str | None = None) -> Checkpoint:
        """Return the index of the program `name` in the file (default: its only one), whose weights
        can be replaced.

        Raises `CkptError` if there is no such program, or there are several and `name` is None.
        """
        program: Checkpoint = self._call("read_program", path, name)
        return program

    def layout_program(self, program: Checkpoint) -> Pieces:
        """Return the bytes of the program's file. Raises `Refused`, all problems at once, for
        tensors that it cannot have.
        """
        of_programs = self._has("layout_program")
        pieces: Pieces = self._call("layout_program" if of_programs else "layout", program)
        return pieces

    def program_names(self, path: str, name: str | None = None) -> Names:
        """Return the names of the program's tensors. Raises as `read_program` does."""
        names: Names = self._call("names", path, name)
        return names

    def _has(self, function: str) -> bool:
        return bool(self.module) and hasattr(self._imported(), function)

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call the module's function. An exception of a plug-in's own is an error that names its
        package.
        """
        if not self.package:
            return getattr(self._imported(), function)(*arguments)
        try:
            return getattr(self._imported(), function)(*arguments)
        except CkptError:
            raise
        except Exception as error:
            raise CkptError(
                f"{function} of the format {self.name} failed: {type(error).__name__}: {error}",
                hint=f"report it to the authors of the package {self.package}",
                problems=[Problem("the package of the format", self.package)],
            ) from error

    def _imported(self) -> Any:
        return import_module(self.module)
