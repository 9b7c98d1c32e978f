"""TorchScript archives (torch.jit.save): the parameters and buffers of their modules, under the
keys of `state_dict()`.

Reading only: the code in the archive calls every tensor by its attribute, so it would not find a
renamed one. New values under the same names are written as for every program, see `formats.pt2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ckpttool.containers.nodes import walk
from ckpttool.containers.pickle_read import Call, Global
from ckpttool.containers.program import Program, StoragePlace, root_of
from ckpttool.containers.tensors import Storages, entry_of, is_tensor
from ckpttool.containers.tree import unreached_storages
from ckpttool.containers.zip_read import Archive, read_archive, read_record
from ckpttool.core.checkpoint import Checkpoint, Section, Storage, TensorEntry, Unreached
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.text import plural
from ckpttool.core.values import many_objects
from ckpttool.formats.torch_zip import (
    check_byteorder,
    find_storage,
    folder_of,
    read_pickle,
    sizes_in,
)
from ckpttool.io.pieces import Pieces

_MAX_CODE = 1 << 28  # bytes of one file of code
_MAX_DEPTH = 200  # modules inside each other
_MAX_MODULES = 1_000_000  # a pickle shares nodes: a small one can hold a tree without end

_CLASS = re.compile(
    r"^class (\w+)\(Module\):\n(?:  __parameters__ = \[(.*)\]\n)?(?:  __buffers__ = \[(.*)\]\n)?",
    re.MULTILINE,
)
_STRING = re.compile(r'"([^"]*)"')


@many_objects()
def read(path: str) -> Checkpoint:
    """Return the index of the archive at `path`, without running its code. Raises `CkptError` if it
    is corrupt.
    """
    archive = read_archive(path)
    folder = folder_of(archive, "torch.jit.save")
    check_byteorder(archive, folder)
    pickle = read_pickle(archive, folder + "data.pkl")
    root = pickle.root
    storages = Storages(partial(find_storage, archive, folder), pickled=pickle.end)
    reader = _ScriptModules(archive, folder, storages)
    tensors = tuple(reader.tensors(root))
    constants = []
    for record in archive.records:
        if record.name.startswith(folder + "constants/"):
            path_inside = record.name.removeprefix(folder)
            constants.append(Unreached(path_inside, Storage(archive.span(record))))
    left = reader.attributes + len(constants)
    notes = (
        (f"plain attributes and constants of its code: {plural(left, 'tensor')}",) if left else ()
    )
    return Checkpoint(
        path,
        "torchscript",
        archive.length,
        (Section("", "state_dict", tensors, has_runtime_names=True),),
        notes=notes,
        unreached=(*unreached_storages(root, storages, sizes_in(archive, folder)), *constants),
    )


def layout(checkpoint: Checkpoint) -> Pieces:
    raise Refused(
        "a TorchScript archive cannot be written: its code calls every tensor by its attribute",
        hint="write its state dict to a .pt or .safetensors file; new values under its own names: "
        "ckpttool swap-weights SCRIPTED.pt NEW.pt -o OUT.pt",
    )


def read_program(path: str, name: str | None = None) -> Checkpoint:
    """Return the index of a TorchScript archive, as a program whose weights can be replaced.

    Its code calls every tensor by its attribute, and is not changed, nor are its constants. Raises
    `CkptError` if it cannot be read, and for a `name`: it has none.
    """
    if name is not None:
        raise CkptError(
            f"{path} holds one program without a name: TorchScript archive",
            hint=f"name {path} alone",
        )
    checkpoint, archive = read(path), read_archive(path)
    records: dict[object, str] = {archive.span(record): record.name for record in archive.records}
    homes: dict[Storage, StoragePlace] = {}
    for section in checkpoint.sections:
        for entry in section.tensors:
            if entry.storage:
                homes[entry.storage] = StoragePlace(records[entry.storage.data])
    program = Program(
        archive, "", "torchscript", f"{root_of(archive)}code", checkpoint.sections, homes=homes
    )
    return replace(checkpoint, container=program)


def layout_program(program: Checkpoint) -> Pieces:
    """Return the archive with the tensors of `program`, which `read_program` returned. Raises as
    `layout` of an exported program does.
    """
    from ckpttool.formats import pt2  # most archives are only read

    return pt2.layout(program)


class _ScriptModules:
    """Walks the modules of the pickle as `state_dict()` does; `attributes` counts the other tensors
    of the modules, also those in lists, dicts and packed weights.
    """

    def __init__(self, archive: Archive, folder: str, storages: Storages) -> None:
        self.archive = archive
        self.folder = folder
        self.storages = storages
        self.attributes = 0
        self.seen: set[int] = set()  # ids of nodes in attributes
        # by record, those in its code
        self.classes: dict[str, dict[str, tuple[list[str], list[str]]]] = {}

    def slots(self, name: Global) -> tuple[list[str], list[str]] | None:
        """Return the names of the class's parameters and buffers, in order; None if the class is
        not a module.
        """
        record = f"{self.folder}code/{name.module.replace('.', '/')}.py"
        if record not in self.classes:
            if record not in self.archive.by_name:
                raise CkptError(
                    f"{self.archive.path}: its record {record} is missing",
                    hint="download or save it again",
                )
            code = read_record(self.archive, self.archive.by_name[record], _MAX_CODE)
            self.classes[record] = _classes_in(code.decode(errors="replace"))
        return self.classes[record].get(name.name)

    def tensors(self, root: Any) -> Iterator[TensorEntry]:
        todo: list[tuple[tuple[str, ...], Any]] = [((), root)]
        left = _MAX_MODULES
        while todo:
            path, node = todo.pop()
            left -= 1
            if left < 0 or len(path) > _MAX_DEPTH:
                raise CkptError(
                    "a TorchScript module holds too many others",
                    hint="the file is damaged or hostile",
                )
            slots = self.slots(node.func) if _is_object(node) else None
            if slots is None:
                continue
            parameters, buffers = slots
            for name in (*parameters, *buffers):
                if is_tensor(node.state.get(name)):
                    yield entry_of(".".join((*path, name)), node.state[name], self.storages)
            modules = []
            for name, value in node.state.items():
                if type(name) is not str or name in parameters or name in buffers:
                    continue
                if _is_object(value):
                    modules.append(((*path, name), value))
                else:
                    self.attributes += self._count_in(value)
            todo += reversed(modules)

    def _count_in(self, value: Any) -> int:
        """Return how many tensors an attribute holds: itself, in a list, or packed for a backend;
        each once.
        """
        count = 0
        for node in walk(value, seen=self.seen):
            if is_tensor(node):
                count += 1
                self.seen.update(map(id, node.args))  # a tensor that another one wraps is a part
        return count


def _classes_in(code: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return the names of each module's parameters and buffers, by the name of its class."""
    classes = {}
    for name, parameters, buffers in _CLASS.findall(code):
        classes[name] = (_STRING.findall(parameters), _STRING.findall(buffers))
    return classes


def _is_object(node: Any) -> bool:
    """Return whether the node is an object of a class in the archive's code; torch's own classes
    have no code there.
    """
    if type(node) is not Call or type(node.func) is not Global or type(node.state) is not dict:
        return False
    module = f"{node.func.module}."
    return module.startswith("__torch__.") and not module.startswith("__torch__.torch.classes.")
