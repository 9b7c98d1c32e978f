"""Read a pickle whose state dict has NumPy arrays, as the model zoo of detectron2 has them.

Python's ``pickle.load`` would run what the file names; here it becomes a tree of inert nodes.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.containers.pickle_read import Origin, loads
from ckpttool.containers.tensors import Storages, malformed
from ckpttool.containers.tree import read_tree
from ckpttool.core.checkpoint import Checkpoint, Storage
from ckpttool.core.errors import CkptError
from ckpttool.core.limits import Memory, limits
from ckpttool.formats.look import Look
from ckpttool.formats.signatures import unknown
from ckpttool.io.files import opened

FORMAT = "pickle"


def read(path: str) -> Checkpoint:
    """Return the index of the pickle at `path`, whose arrays stay in memory.

    Raises `CkptError` if it is damaged, if bytes follow it, and if no dict in it is one of arrays.
    """
    with opened(path) as file:
        nbytes = file.size
        if nbytes > limits().pickle_bytes:
            raise CkptError(
                f"{path} is a pickle of {nbytes:,} bytes: {limits().named('pickle_bytes', nbytes)}",
                hint="pass --max-memory, or save the arrays as tensors",
            )
        data = bytes(file.read(nbytes))
    # torch.load reads protocol 2 only
    pickle = replace(loads(data, origin=Origin(path, nbytes, end=nbytes)), protocol=2)
    storages = Storages(_no_storage, memory=pickle.memory or Memory(nbytes), pickled=pickle.end)
    checkpoint = read_tree(path, FORMAT, nbytes, pickle, storages, {})
    packings = [section.packed_as for section in checkpoint.sections]
    if pickle.end != nbytes or "arrays" not in packings:
        raise unknown(Look(path))
    return checkpoint


def _no_storage(key: str, nbytes: int) -> Storage:
    raise malformed(f"storage {key} is in no file")
