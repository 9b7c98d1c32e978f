"""The programs of a `.pt2` file: their tensors and graphs, in the layout of each range of torch
versions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from shlex import quote
from typing import Any

from ckpttool.containers import strict_json
from ckpttool.containers.nodes import pairs_of
from ckpttool.containers.pickle_read import Call, Pickle
from ckpttool.containers.program import CONSTANTS, OUTSIDE, Program, Role, StoragePlace
from ckpttool.containers.tensors import Carried, Storages, entry_of, is_parameter, is_tensor
from ckpttool.containers.tree import extra_of, unreached_storages
from ckpttool.containers.write_tree import dumped
from ckpttool.containers.zip_read import STORED, Archive, Record, read_archive, read_record
from ckpttool.core.checkpoint import ExtraEntry, Payload, Section, Storage, TensorEntry, Unreached
from ckpttool.core.dtypes import BY_PT2, itemsize
from ckpttool.core.errors import CkptError, Problem, same_problem
from ckpttool.core.limits import limits
from ckpttool.core.schema import (
    COUNT,
    FLAG,
    SHAPE,
    TEXT,
    JsonKind,
    check,
    items,
    list_of,
    map_of,
    nullable,
    object_of,
)
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import content_of_storage
from ckpttool.formats import torch_zip

_AGAIN = "copy it or export it again"


@dataclass(frozen=True, slots=True, eq=False)
class RecordOf(Payload):
    """The payload of a pickled tensor or object that has its own record."""

    archive: Archive
    record: Record

    def content(self) -> bytes | None:
        """Return the content of the object if the record is a torch file, else of the bytes."""
        try:
            inner = read_archive(
                self.archive.path, self.archive.base + self.record.data, self.record.nbytes
            )
            _, pickle, storages = torch_zip.open_tree(inner)
        except CkptError:
            return content_of_storage(Storage(self.archive.span(self.record)))
        return Carried(pickle.root, storages).content()


def read_json(archive: Archive, name: str, kind: JsonKind, writer: str) -> Any:
    """Return the JSON value of a record, checked to be of the kind that `writer` writes.

    Raises `CkptError`, with the JSON path of every problem, if it is missing, damaged, not JSON, or
    something else.
    """
    if name not in archive.by_name:
        raise damaged(archive.path, f"its record {name} is missing")
    try:
        value = strict_json.loads(
            read_record(archive, archive.by_name[name], limits().json_bytes).decode()
        )
    except ValueError as error:
        raise damaged(archive.path, f"its record {name} is not valid JSON: {error}") from error
    check(
        kind,
        value,
        f"{archive.path} is not a program that can be read: {name} is not as {writer} writes it",
        _AGAIN,
    )
    return value


def damaged(path: str, problem: str) -> CkptError:
    return CkptError(f"{path} is not a program that can be read: {problem}", hint=_AGAIN)


def compressed(path: str, record: str) -> CkptError:
    code = "import torch, sys; torch.export.save(torch.export.load(sys.argv[1]), sys.argv[2])"
    hint = f'load and save it again with torch: python -c "{code}" {quote(path)} OUT.pt2'
    return CkptError(f"{path} is compressed (record {record}), which torch never does", hint=hint)


_Contents = tuple[tuple[TensorEntry, ...], tuple[ExtraEntry, ...]]


def _sections(weights: _Contents, constants: _Contents) -> tuple[Section, ...]:
    """Return the sections of a program; the constants are one only if there are some."""
    state_dict = Section("", "state_dict", *weights, has_runtime_names=True)
    if not any(constants):
        return (state_dict,)
    return state_dict, Section(CONSTANTS, "other", *constants)


# The field that names a tensor or an object in a specification of each kind, and kinds without
# (torch/_export/serde).
FIELDS = {
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
    "custom_obj": "custom_obj_name",
    "buffer_mutation": "buffer_name",
    "parameter_mutation": "parameter_name",
    "gradient_to_parameter": "parameter_name",
}
_INPUTS = ("user_input", "constant_input", "token")
_OUTPUTS = ("user_output", "loss_output", "gradient_to_user_input", "user_input_mutation")
_NAMELESS = frozenset((*_INPUTS, *_OUTPUTS))
_SPECS = list_of(object_of({}, {kind: object_of({field: TEXT}) for kind, field in FIELDS.items()}))
_SIGNATURE = object_of({"input_specs": _SPECS, "output_specs": _SPECS})
_CALLS = list_of(object_of({"fqn": TEXT}))
_GRAPH = object_of({"signature": _SIGNATURE}, {"module_call_graph": _CALLS})
_MODEL = object_of({"torch_version": TEXT, "graph_module": _GRAPH})

# The attributes of the modules that torch makes of a program: names that a tensor cannot have.
_ATTRIBUTES = """
    T_destination _adapt_flat_args _apply _backward_hooks _backward_pre_hooks _boxed_call _buffers
    _call_impl _code _compiled_call_impl _create_node_hooks _deepcopy_hooks _deepcopy_init
    _dispatch_modules _erase_node_hooks _forward_hooks _forward_hooks_always_called
    _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs _get_backward_hooks
    _get_backward_pre_hooks _get_name _graph _guards_fn _in_spec _is_full_backward_hook _lineno_map
    _load_from_state_dict _load_state_dict_post_hooks _load_state_dict_pre_hooks
    _maybe_warn_non_full_backward_hook _modules _named_members _non_persistent_buffers_set _out_spec
    _parameters _print_graph _prologue_start _recompile_submodules _register_create_node_hook
    _register_deepcopy_hook _register_erase_node_hook _register_load_state_dict_pre_hook
    _register_replace_node_hook _register_state_dict_hook _replace_hooks
    _replicate_for_data_parallel _run_with_interpreter _save_to_state_dict _set_replace_hook
    _slow_forward _state_dict_hooks _state_dict_pre_hooks _tracer_cls _tracer_extras _ty
    _unregister_create_node_hook _unregister_deepcopy_hook _unregister_erase_node_hook
    _unregister_replace_node_hook _version _wrapped_call _wrapped_call_impl adapted add_module
    add_submodule apply bfloat16 buffers call_super_init check_input_constraints children code
    compile cpu cuda delete_all_unused_submodules delete_submodule double dump_patches
    equality_constraints eval extra_repr finalize flat_args_adapter float forward get_buffer
    get_extra_state get_parameter get_submodule graph graph_module graph_signature half
    input_placeholders ipu ivals load_state_dict meta module_call_graph modules mtia named_buffers
    named_children named_modules named_parameters parameters print_readable process_forward_inputs
    range_constraints recompile register_backward_hook register_buffer register_forward_hook
    register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module
    register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_
    set_extra_state set_submodule shape_env share_memory state_dict to to_empty to_folder train
    training type
    type_name validate_inputs xpu zero_grad"""
ATTRIBUTES = frozenset(_ATTRIBUTES.split())


def read_graph(program: Program) -> Any:
    """Return ``models/M.json``. Raises `CkptError` if it has no signature that can be read, and for
    compiled code.
    """
    if program.compiled:
        raise CkptError(
            f"{program.archive.path} is compiled code, which does not say how its model loads and"
            " saves weights",
            hint="name the file that torch.export.save wrote, or a function that makes the model",
        )
    model = read_json(program.archive, program.model, _MODEL, "torch.export.save")
    if not all(_specs(model)):
        raise damaged(
            program.archive.path,
            f"{program.model} is not as torch.export.save writes it: an input of no kind",
        )
    return model


def renamed_graph(program: Program, names: Mapping[str, str]) -> tuple[bytes, list[Problem]]:
    """Return ``models/M.json`` with new `names` for FQNs, and the problems with these."""
    model = read_graph(program)
    specs = _specs(model)
    unknown = set(chain(*specs)).difference(FIELDS, _NAMELESS)
    text = "the graph has inputs or outputs that are not known, and may name tensors"
    problems = same_problem(text, sorted(unknown))
    keys: list[str] = []
    for section in program.sections:
        keys += section.keys
    problems += _unfit(keys, names, model["graph_module"])
    for spec in specs:
        for kind in spec.keys() & FIELDS.keys():
            field = FIELDS[kind]
            spec[kind][field] = names.get(spec[kind][field], spec[kind][field])
    return json.dumps(model).encode(), problems


def _specs(model: Any) -> list[dict[str, Any]]:
    signature = model["graph_module"]["signature"]
    return [*signature["input_specs"], *signature["output_specs"]]


def _unfit(keys: Sequence[str], names: Mapping[str, str], graph: Any) -> Iterator[Problem]:
    """Yield the new names that no module could have; torch makes modules of the graph's calls and
    subgraphs.
    """
    modules = {entry["fqn"].partition("@")[0] for entry in graph.get("module_call_graph", ())}
    reserved = ATTRIBUTES.union(_subgraphs(graph))
    count = Counter(names.get(key, key) for key in keys)
    paths = modules.union(*map(_parents, (*count, *modules)))
    for key in keys:
        if key not in names:
            continue
        name = names[key]
        below = [path for path in _parents(name) if path in count]
        impossible = _impossible_part(name, reserved)
        if count[name] > 1 or name in paths:
            yield Problem("the program has a tensor or a module of that name", name)
        elif below:
            yield Problem(f"{below[0]} is a tensor, and has nothing below it", name)
        elif impossible is not None:
            yield Problem(f"not a name that a module of torch can have: {impossible}", name)


def _impossible_part(name: str, reserved: Container[str]) -> str | None:
    """Return a part of the name that no module can have; None if a module can have all of them."""
    parts = name.split(".")
    for part in parts:
        if part in reserved or part.startswith("__"):
            return part
    return None if all(parts) else "an empty part"


def _parents(name: str) -> list[str]:
    """Return the paths of the modules around a name: ``a`` and ``a.b`` of ``a.b.c``."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _subgraphs(graph: Any) -> Iterator[str]:
    left = [graph]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            inner = value.get("as_graph")
            if isinstance(inner, dict):
                yield str(inner.get("name"))
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


SINCE_2_9 = "torch>=2.9"

_LAYOUTS = {
    1: "sparse_coo",
    2: "sparse_csr",
    3: "sparse_csc",
    4: "sparse_bsr",
    5: "sparse_bsc",
    6: "mkldnn",
    7: "strided",
}


_SIZE = object_of({"as_int": COUNT})  # a weight has no symbolic sizes
_TENSOR = object_of(
    {
        "dtype": COUNT,
        "sizes": list_of(_SIZE),
        "strides": list_of(_SIZE),
        "storage_offset": _SIZE,
        "layout": COUNT,
        "requires_grad": FLAG,
    }
)
_PAYLOAD = object_of(
    {"path_name": TEXT, "is_param": FLAG, "use_pickle": FLAG, "tensor_meta": nullable(_TENSOR)}
)
_CONFIG = object_of({"config": map_of(_PAYLOAD)})


def read_since_2_9(archive: Archive, root: str, name: str) -> Program:
    """Read the program `name`. Raises `CkptError` if its configs are not as torch.export.save
    writes them.
    """
    homes: dict[Storage, StoragePlace] = {}
    configs: list[str] = []
    entries: list[_Contents] = []
    for kind in ("weights", "constants"):
        folder = f"{root}data/{kind}/"
        config = f"{folder}{name}_{kind}_config.json"
        configs.append(config)
        entries.append(_payloads(archive, folder, config, homes))
    return Program(
        archive, name, SINCE_2_9, f"{root}models/{name}.json", _sections(*entries), configs, homes
    )


def renamed_config(program: Program, index: str, names: Mapping[str, str]) -> bytes:
    value = read_json(program.archive, index, _CONFIG, "torch.export.save")
    value["config"] = {names.get(fqn, fqn): meta for fqn, meta in value["config"].items()}
    return json.dumps(value).encode()


def _payloads(
    archive: Archive, folder: str, config: str, homes: dict[Storage, StoragePlace]
) -> _Contents:
    """Return the tensors and the other objects that the config lists; their records are in the
    folder.
    """
    value = read_json(archive, config, _CONFIG, "torch.export.save")
    tensors: list[TensorEntry] = []
    objects: list[ExtraEntry] = []
    storages: dict[str, Storage] = {}
    try:
        for fqn, meta in value["config"].items():
            record = archive.by_name.get(f"{folder}{meta['path_name']}")
            if record is None:
                raise damaged(archive.path, f"the record {meta['path_name']} of {fqn} is missing")
            if meta["tensor_meta"] is None:
                objects.append(ExtraEntry(fqn, RecordOf(archive, record)))
            else:
                tensors.append(_tensor(archive, record, fqn, meta, storages))
    except ValueError as error:
        raise damaged(
            archive.path, f"{config} is not as torch.export.save writes it: {error}"
        ) from error
    for path, storage in storages.items():
        homes[storage] = StoragePlace(path)
    return tuple(tensors), tuple(objects)


def _tensor(
    archive: Archive,
    record: Record,
    fqn: str,
    meta: Mapping[str, Any],
    storages: dict[str, Storage],
) -> TensorEntry:
    tensor = meta["tensor_meta"]
    if tensor["dtype"] not in BY_PT2:
        raise damaged(
            archive.path,
            f"{fqn} has the dtype number {tensor['dtype']!r}, which ckpttool does not know",
        )
    dtype = BY_PT2[tensor["dtype"]].name
    shape = tuple(size["as_int"] for size in tensor["sizes"])
    stride = tuple(size["as_int"] for size in tensor["strides"])
    offset = tensor["storage_offset"]["as_int"]
    if len(shape) != len(stride):
        raise ValueError(f"{fqn} has {len(shape)} sizes and {len(stride)} strides")
    pickled = meta["use_pickle"]
    source = RecordOf(archive, record) if pickled else None
    payload = Role(record.name, meta["is_param"], tensor["requires_grad"], pickled, source)
    layout = "subclass" if pickled else _LAYOUTS.get(tensor["layout"], "unknown")
    entry = TensorEntry(fqn, dtype, shape, stride, offset, None, layout, record.nbytes, payload)
    reach = entry.end * itemsize(dtype)
    if layout == "strided" and reach and not record.nbytes:
        return replace(entry, layout="meta")  # exported with fake weights: no values were saved
    if layout != "strided":
        return entry
    if reach > record.nbytes:
        raise damaged(
            archive.path, f"{fqn} needs {reach} bytes, its record {record.name} has {record.nbytes}"
        )
    if record.method != STORED:
        raise compressed(archive.path, record.name)
    # tensors without elements may share a record without sharing anything
    new = Storage(archive.span(record))
    storage = storages.setdefault(record.name, new) if reach else new
    return replace(entry, storage=storage, packed_bytes=0)


GRAPH = "serialized_exported_program.json"  # of torch up to 2.7
UP_TO_2_7, IN_2_8 = "torch<=2.7", "torch 2.8"


def read_up_to_2_7(archive: Archive, _root: str, name: str) -> Program:
    """Read the only program of the file. Raises `CkptError` if its state dict or its constants
    cannot be read.
    """
    records = []
    for stem in ("serialized_state_dict", "serialized_constants"):
        is_json = f"{stem}.json" in archive.by_name
        records.append(f"{stem}.json" if is_json else f"{stem}.pt")
    return _read_nested(archive, name, UP_TO_2_7, GRAPH, records)


def read_2_8(archive: Archive, root: str, name: str) -> Program:
    """Read the program `name`. Raises `CkptError` if its state dict or its constants cannot be
    read.
    """
    records = [f"{root}data/{kind}/{name}.pt" for kind in ("weights", "constants")]
    return _read_nested(archive, name, IN_2_8, f"{root}models/{name}.json", records)


def _read_nested(
    archive: Archive, name: str, layout: str, model: str, records: list[str]
) -> Program:
    homes: dict[Storage, StoragePlace] = {}
    left: list[Unreached] = []
    weights = _nested_entries(archive, records[0], homes, left)
    constants: _Contents = ((), ())
    if records[1] in archive.by_name:  # torch 2.1 wrote no constants
        constants = _nested_entries(archive, records[1], homes, left)
    return Program(
        archive,
        name,
        layout,
        model,
        _sections(weights, constants),
        records,
        homes,
        unreached=tuple(left),
    )


def renamed_until_2_8(
    program: Program, index: str, names: Mapping[str, str]
) -> tuple[Archive, bytes]:
    """Return the torch zip `index` of the program, and its pickle with new `names` for the
    entries.
    """
    pickle, _, inner = open_record(program.archive, index)
    pairs = {names.get(key, key): node for key, node in (pairs_of(pickle.root) or {}).items()}
    root: Any = pairs
    if type(pickle.root) is Call:
        root = pickle.root
        root.pairs = pairs
    return inner, dumped(root, pickle.protocol)[0]


def _nested_entries(
    archive: Archive, record: str, homes: dict[Storage, StoragePlace], left: list[Unreached]
) -> _Contents:
    """Return the tensors and the other objects of the dict in the record."""
    pickle, storages, inner = open_record(archive, record)
    pairs = pairs_of(pickle.root)
    if pairs is None or not {str}.issuperset(map(type, pairs)):
        raise damaged(archive.path, f"its record {record} is not a state dict")
    tensors: list[TensorEntry] = []
    objects: list[ExtraEntry] = []
    for key, node in pairs.items():
        if is_tensor(node):
            entry = entry_of(key, node, storages)
            tensors.append(replace(entry, payload=payload_of(record, entry)))
        else:
            objects.append(extra_of(key, node, storages))
    sizes = torch_zip.sizes_in(inner, torch_zip.folder_of(inner))
    for storage in unreached_storages(pickle.root, storages, sizes):
        left.append(replace(storage, path=f"{record}: {storage.path}"))
    homes.update(_homes(record, inner, storages))
    return tuple(tensors), tuple(objects)


def _homes(record: str, inner: Archive, storages: Storages) -> dict[Storage, StoragePlace]:
    """Return the place of each storage in the torch zip `inner`, which is the content of the
    record.
    """
    by_key = storages.by_key.items()
    return {storage: StoragePlace(record, inner, f"data/{key}") for key, storage in by_key}


def payload_of(record: str, entry: TensorEntry) -> Role:
    """Return the role of a tensor: its node says whether it is a Parameter."""
    assert isinstance(entry.payload, Carried)
    node = entry.payload.node
    return Role(
        record,
        is_parameter(node),
        is_parameter(node) and node.args[1] is True,
        source=entry.payload,
    )


def open_record(archive: Archive, name: str) -> tuple[Pickle, Storages, Archive]:
    record = archive.by_name.get(name)
    if record is None:
        raise damaged(archive.path, f"its record {name} is missing")
    if record.method != STORED:
        raise compressed(archive.path, name)
    inner = read_archive(archive.path, archive.base + record.data, record.nbytes)
    _, pickle, storages = torch_zip.open_tree(inner)
    return pickle, storages, inner


COMPILED = "data/aotinductor/"
AOTINDUCTOR = "AOTInductor"
_WEIGHTS_CONFIG = "weights_config.json"
_KIND = re.compile(r"constants_info_\[(\d+)\]\.type = [^;\n]*ConstantType::(\w+)\)")
_FQN = re.compile(r'constants_info_\[(\d+)\]\.original_fqn = "([^"\n]*)"')
_LIFTED = ("TensorConstant", "FoldedConstant")
_WEIGHTS = map_of(items(TEXT, SHAPE, SHAPE, COUNT))  # the record, sizes, strides, offset


def compiled_models(archive: Archive, root: str) -> list[str]:
    """Return the names of the folders in ``data/aotinductor``."""
    names: dict[str, None] = {}
    for record in archive.by_name:
        if record.startswith(root + COMPILED):
            name, slash, _ = record.removeprefix(root + COMPILED).partition("/")
            if slash:
                names[name] = None
    return list(names)


def read_compiled(archive: Archive, root: str, name: str) -> Program:
    """Read the compiled model `name`; it has no sections if its weights are inside the code."""
    files = [r.name for r in archive.records if r.name.startswith(f"{root}{COMPILED}{name}/")]
    config = f"{root}{COMPILED}{name}/{_WEIGHTS_CONFIG}"
    if config not in files:
        inside = "compiled into its shared library, or left out of the package"
        if any(file.endswith((".blob", "_weights.bin")) for file in files):
            inside = "one block of bytes without names"
        return Program(
            archive,
            name,
            AOTINDUCTOR,
            "",
            (),
            notes=(f"the weights of {name} are {inside}: {OUTSIDE}",),
        )
    entries, homes = _compiled_entries(archive, root, config)
    lifted = _lifted(archive, files)
    weights = tuple(entry for entry in entries if entry.key not in lifted)
    constants = tuple(entry for entry in entries if entry.key in lifted)
    note = (
        f"{name} is compiled code: weights that it does not use are not in the file, and small"
        " ones "
        "(up to 8 elements in one dimension) are in the code itself"
    )
    sections = _sections((weights, ()), (constants, ()))
    return Program(
        archive, name, AOTINDUCTOR, "", sections, (), homes, _shared(archive, root, name), (note,)
    )


def _lifted(archive: Archive, files: list[str]) -> set[str]:
    """Return the constants of the model's code, which are not weights, by the C++ source in the
    package.
    """
    constants: set[str] = set()
    for file in files:
        record = archive.by_name[file]
        if not file.endswith(".cpp") or record.nbytes > limits().json_bytes:
            continue
        code = read_record(archive, record, limits().json_bytes).decode(errors="replace")
        kinds = {match[1]: match[2] for match in _KIND.finditer(code)}
        for match in _FQN.finditer(code):
            if kinds.get(match[1]) in _LIFTED:
                constants.add(match[2])
    return constants


def _compiled_entries(
    archive: Archive, root: str, config: str
) -> tuple[tuple[TensorEntry, ...], dict[Storage, StoragePlace]]:
    """Return the weights: each is ``tensor.as_strided(sizes, strides, offset)`` of the one tensor
    in its record.
    """
    entries: list[TensorEntry] = []
    homes: dict[Storage, StoragePlace] = {}
    complete: dict[str, TensorEntry] = {}
    try:
        weights = read_json(archive, config, _WEIGHTS, "torch")
        for fqn, (file, sizes, strides, offset) in weights.items():
            record = f"{root}data/weights/{file}"
            if record not in complete:
                pickle, storages, inner = open_record(archive, record)
                if not is_tensor(pickle.root):
                    raise damaged(archive.path, f"its record {record} is not a tensor")
                tensor = entry_of(record, pickle.root, storages)
                complete[record] = replace(tensor, payload=payload_of(record, tensor))
                homes.update(_homes(record, inner, storages))
            if len(sizes) != len(strides):
                raise ValueError(f"{fqn} has {len(sizes)} sizes and {len(strides)} strides")
            tensor = complete[record].under(fqn)
            view = replace(tensor, shape=tuple(sizes), stride=tuple(strides), offset=offset)
            reach = view.end * itemsize(view.dtype)
            if view.storage is None or reach > view.storage.nbytes:
                raise ValueError(
                    f"{fqn} needs {reach} bytes of a strided tensor, which its record does not have"
                )
            entries.append(view)
    except ValueError as error:
        raise damaged(archive.path, f"{config} is not as torch writes it: {error}") from error
    return tuple(entries), homes


def _shared(archive: Archive, root: str, name: str) -> Mapping[str, list[str]]:
    """Return for each record the other models whose weights are in it."""
    shared: dict[str, list[str]] = {}
    for other in compiled_models(archive, root):
        config = f"{root}{COMPILED}{other}/{_WEIGHTS_CONFIG}"
        if other == name or config not in archive.by_name:
            continue
        weights = read_json(archive, config, _WEIGHTS, "torch")
        files = {file for file, *_ in weights.values()}
        for file in files:
            shared.setdefault(f"{root}data/weights/{file}", []).append(other)
    return shared
