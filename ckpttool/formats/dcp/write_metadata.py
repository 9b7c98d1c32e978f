"""``.metadata`` of torch.distributed.checkpoint, written afresh: the nodes of torch's own classes, as a pickle."""

from __future__ import annotations

from typing import Any

from ckpttool.formats.containers.pickle_tree import Call, Global, Pickle, dumps
from ckpttool.formats.dcp.items import BytesItem, Item, Metadata, Place

VERSION = "1.0.0"

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"


def spelled(metadata: Metadata) -> bytes:
    """The pickle of `metadata`, as torch reads it."""
    writer = _Nodes()
    places = {}
    described = {}
    for key, item in metadata.items.items():
        described[key] = writer.item(item)
        if isinstance(item, BytesItem):
            places[writer.index(key, None)] = writer.place(item.place)
        else:
            places.update((writer.index(key, chunk.offsets), writer.place(chunk.place)) for chunk in item.chunks)
    state = {
        "state_dict_metadata": described,
        "planner_data": {key: metadata.paths[key] for key in described},
        "storage_data": places,
        "storage_meta": None,
        "version": VERSION,
    }
    return dumps(Pickle(writer.made(_MODULE, "Metadata", state), 4))


class _Nodes:
    """Makes the nodes of torch's classes; every class is named once."""

    def __init__(self) -> None:
        self.globals: dict[tuple[str, str], Global] = {}
        self.layout = Call(self.name("torch.serialization", "_get_layout"), ("torch.strided",))
        self.format = Call(self.name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))

    def name(self, module: str, name: str) -> Global:
        return self.globals.setdefault((module, name), Global(module, name))

    def made(self, module: str, name: str, state: Any) -> Call:
        made = Call(self.name(module, name), (), "NEWOBJ")
        made.state = state
        return made

    def size(self, sizes: tuple[int, ...]) -> Call:
        return Call(self.name("torch", "Size"), (sizes,))

    def item(self, item: Item) -> Call:
        if isinstance(item, BytesItem):
            return Call(self.name(_MODULE, "BytesStorageMetadata"), (), "NEWOBJ")
        properties = (self.name("torch", item.dtype), self.layout, False, self.format, False, *item.more)
        return self.made(
            _MODULE,
            "TensorStorageMetadata",
            {
                "properties": self.made(_MODULE, "TensorProperties", properties),
                "size": self.size(item.shape),
                "chunks": [
                    self.made(
                        _MODULE,
                        "ChunkStorageMetadata",
                        {"offsets": self.size(chunk.offsets), "sizes": self.size(chunk.sizes)},
                    )
                    for chunk in item.chunks
                ],
            },
        )

    def index(self, key: str, offsets: tuple[int, ...] | None) -> Call:
        place = None if offsets is None else self.size(offsets)
        return self.made(_MODULE, "MetadataIndex", {"fqn": key, "index": None, "offset": place})

    def place(self, place: Place) -> Call:
        state = {"relative_path": place.name, "offset": place.offset, "length": place.length}
        return self.made(_STORAGE_MODULE, "_StorageInfo", state)
