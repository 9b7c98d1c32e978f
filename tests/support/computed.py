"""Tensors that `remap` computes by the expressions of a names file, and what torch computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ckpttool
from names_files import Json, names_file, operator, ref, runtime, serialized

Tensors = Mapping[str, torch.Tensor]
GETITEM = "getitem"
ROW_MAJOR = {"memory_format": "contiguous_format"}


def item(several: Json, number: Any) -> Json:
    return operator(GETITEM, several, number)


def cast(source: Json, dtype: str) -> Json:
    return operator("aten._to_copy.default", source, dtype={"dtype": dtype})


def narrow(source: Json, *args: Any) -> Json:
    return operator("aten.narrow.default", source, *args)


def clone(source: Json) -> Json:
    return operator("aten.clone.default", source, memory_format=ROW_MAJOR)


def reshape(source: Json, *shape: Any) -> Json:
    return operator("aten.reshape.default", source, list(shape))


def cat(dim: Any, *sources: Json) -> Json:
    return operator("aten.cat.default", [*sources], dim)


def save(tensors: Mapping[str, Any], sources: Mapping[str, Json], folder: Path) -> list[str]:
    """Save the tensors under runtime names, and a names file in which each key is computed; return
    the words of the command that computes them.
    """
    torch.save(dict(tensors), folder / "tensors.pt")
    first = ref(next(iter(sources)))
    named = [runtime(name) for name in tensors]
    for one in named:
        value = tensors[one["fqn"]]
        if isinstance(value, torch.Tensor):
            one |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    keys = [serialized(key, source, size=None) for key, source in sources.items()]
    loaded = dict.fromkeys(tensors, first)
    names_file(folder / "names.json", named, keys, loaded)
    model = ["--model", f"{folder}/names.json", "--from", "runtime", "--to", "serialized"]
    return ["remap", f"{folder}/tensors.pt", *model, "-o", f"{folder}/computed.pt", "--force"]


def computed(
    tensors: Mapping[str, Any], sources: Mapping[str, Json], folder: Path
) -> dict[str, torch.Tensor]:
    """Return the value of each key as torch loads it from the output."""
    save(tensors, sources, folder)
    ckpttool.remap(
        str(folder / "tensors.pt"),
        str(folder / "computed.pt"),
        model=str(folder / "names.json"),
        from_="runtime",
        to="serialized",
        force=True,
        no_fsync=True,
    )
    result: dict[str, torch.Tensor] = torch.load(folder / "computed.pt")
    return result


def by_torch(source: Any, tensors: Tensors) -> Any:
    """Return what torch's own operators compute; raise whatever they raise."""
    if isinstance(source, list):
        return [by_torch(part, tensors) for part in source]
    if not isinstance(source, dict):
        return source
    if "ref" in source:
        return tensors[source["ref"]]
    if "op" not in source:
        ((kind, name),) = source.items()
        if kind == "device":
            return torch.device("cpu")
        return complex(name) if kind == "complex" else getattr(torch, name)
    args = [by_torch(arg, tensors) for arg in source["args"]]
    if source["op"] == GETITEM:
        values, number = args
        if number < 0:
            raise IndexError(number)
        return values[number]
    _, packet, overload = source["op"].split(".")
    keywords = {name: by_torch(value, tensors) for name, value in source["kwargs"].items()}
    return getattr(getattr(torch.ops.aten, packet), overload)(*args, **keywords)
