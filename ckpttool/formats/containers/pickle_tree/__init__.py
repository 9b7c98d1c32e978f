"""A pickle as a tree of inert nodes: read without executing it, and written again as it was.

Scalars, str, bytes, bytearray, tuple, list and dict are Python's own; whatever a pickle would call or import is a node.
What the pickle shares through its memo is one object in the tree, so cycles are possible.
"""

from ckpttool.formats.containers.pickle_tree.nodes import (
    ABSENT,
    ByteString,
    Call,
    Global,
    Persistent,
    Pickle,
    PickledSet,
)
from ckpttool.formats.containers.pickle_tree.opcodes import check_key
from ckpttool.formats.containers.pickle_tree.reader import Origin, check_size, collected, loads, unreadable
from ckpttool.formats.containers.pickle_tree.writer import dangerous_written, dumps

__all__ = [
    "ABSENT",
    "ByteString",
    "Call",
    "Global",
    "Origin",
    "Persistent",
    "Pickle",
    "PickledSet",
    "check_key",
    "check_size",
    "collected",
    "dangerous_written",
    "dumps",
    "loads",
    "unreadable",
]
