"""One program of a `.pt2` file: its tensors, and the names in its graph."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from shlex import quote
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Comparable, Section, Storage, Unreached
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import limits
from ckpttool.core.schema import TEXT, Kind, check, list_of, object_of
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import content_of_storage
from ckpttool.formats import strict_json
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.tensors import Carried
from ckpttool.formats.zip_read import Archive, Record, read_archive, read_record

CONSTANTS = "constants"  # path of the section of constants; the state dict's is the root

_AGAIN = "copy it or export it again"


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """The payload of one tensor: the record that holds it, and its role in the program.

    `alone`: the record is a torch file of this tensor and nothing else, and can be replaced. `source` has the content
    of a packed tensor.
    """

    record: str
    is_param: bool
    requires_grad: bool
    alone: bool = False
    source: Comparable | None = None

    def content(self) -> bytes | None:
        """See `checkpoint.Comparable`."""
        return None if self.source is None else self.source.content()


@dataclass(frozen=True, slots=True, eq=False)
class RecordOf:
    """The payload of a pickled tensor or object in a record of its own."""

    archive: Archive
    record: Record

    def content(self) -> bytes | None:
        """See `checkpoint.Comparable`: of the object if the record is a torch file, else of the bytes."""
        try:
            inner = read_archive(self.archive.path, self.archive.base + self.record.data, self.record.nbytes)
            _, pickle, storages = torch_zip.open_tree(inner)
        except CkptError:
            return content_of_storage(Storage(self.archive.span(self.record)))
        return Carried(pickle.root, storages).content()


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    """A torch zip that is a record of the file; all its records but the storages are in `folder`."""

    archive: Archive
    folder: str


@dataclass(frozen=True, slots=True)
class Home:
    """A place in the file: a record, or the record `key` (without its folder) of the torch zip in it."""

    record: str
    inner: Inner | None = None
    key: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The file itself, `Checkpoint.container` of this format.

    `layout` says which torch wrote it, `model` is the record of the graph (empty for compiled code), `sections` are the
    state dict and the constants as the file holds them, `indexes` the record that names the entries of each,
    `unreached` storages that these do not refer to. `shared` are records that other programs use too, with these.
    `compiled` is True where the program is code that AOTInductor compiled.
    """

    archive: Archive
    name: str
    layout: str
    model: str
    sections: tuple[Section, ...]
    indexes: Sequence[str] = ()
    homes: Mapping[Storage, Home] = field(default_factory=dict)
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unreached: tuple[Unreached, ...] = ()

    @property
    def compiled(self) -> bool:
        """Whether it is an AOTInductor package: compiled code, and no graph."""
        return not self.model


def program_of(checkpoint: Checkpoint) -> Program | None:
    """Return the program in the checkpoint; None for any other checkpoint."""
    return checkpoint.container if isinstance(checkpoint.container, Program) else None


def root_of(archive: Archive) -> str:
    """Return the folder of all records, with its slash; empty if there is none."""
    first = archive.records[0].name if archive.records else ""
    return first[: first.find("/") + 1]


def read_json(archive: Archive, name: str, kind: Kind, writer: str) -> Any:
    """Return the JSON value of a record, checked to be of the kind that `writer` writes.

    Raises `CkptError`, with the JSON path of every problem, if it is missing, damaged, not JSON, or something else.
    """
    if name not in archive.by_name:
        raise damaged(archive.path, f"its record {name} is missing")
    try:
        value = strict_json.loads(read_record(archive, archive.by_name[name], limits().json_bytes).decode())
    except ValueError as error:
        raise damaged(archive.path, f"its record {name} is not valid JSON: {error}") from error
    check(kind, value, f"{archive.path} is not a program that can be read: {name} is not as {writer} writes it", _AGAIN)
    return value


def damaged(path: str, problem: str) -> CkptError:
    """Return the error for a program that contradicts itself."""
    return CkptError(f"{path} is not a program that can be read: {problem}", hint=_AGAIN)


def compressed(path: str, record: str) -> CkptError:
    """Return the error for a compressed record."""
    code = "import torch, sys; torch.export.save(torch.export.load(sys.argv[1]), sys.argv[2])"
    hint = f'load and save it again with torch: python -c "{code}" {quote(path)} OUT.pt2'
    return CkptError(f"{path} is compressed (record {record}), which torch never does", hint=hint)


def program_sections(weights: Section, constants: Section) -> tuple[Section, ...]:
    """Return the sections of a program; that of its constants only if it has some."""
    return (weights, constants) if constants.tensors or constants.extras else (weights,)


# The field that names a tensor or an object in a specification of each kind, and kinds without (torch/_export/serde).
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
    T_destination _adapt_flat_args _apply _backward_hooks _backward_pre_hooks _boxed_call _buffers _call_impl _code
    _compiled_call_impl _create_node_hooks _deepcopy_hooks _deepcopy_init _dispatch_modules _erase_node_hooks
    _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks
    _forward_pre_hooks_with_kwargs _get_backward_hooks _get_backward_pre_hooks _get_name _graph _guards_fn _in_spec
    _is_full_backward_hook _lineno_map _load_from_state_dict _load_state_dict_post_hooks _load_state_dict_pre_hooks
    _maybe_warn_non_full_backward_hook _modules _named_members _non_persistent_buffers_set _out_spec _parameters
    _print_graph _prologue_start _recompile_submodules _register_create_node_hook _register_deepcopy_hook
    _register_erase_node_hook _register_load_state_dict_pre_hook _register_replace_node_hook
    _register_state_dict_hook _replace_hooks _replicate_for_data_parallel _run_with_interpreter _save_to_state_dict
    _set_replace_hook _slow_forward _state_dict_hooks _state_dict_pre_hooks _tracer_cls _tracer_extras _ty
    _unregister_create_node_hook _unregister_deepcopy_hook _unregister_erase_node_hook _unregister_replace_node_hook
    _version _wrapped_call _wrapped_call_impl adapted add_module add_submodule apply bfloat16 buffers call_super_init
    check_input_constraints children code compile cpu cuda delete_all_unused_submodules delete_submodule double
    dump_patches equality_constraints eval extra_repr finalize flat_args_adapter float forward get_buffer
    get_extra_state get_parameter get_submodule graph graph_module graph_signature half input_placeholders ipu ivals
    load_state_dict meta module_call_graph modules mtia named_buffers named_children named_modules named_parameters
    parameters print_readable process_forward_inputs range_constraints recompile register_backward_hook
    register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook
    register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_
    set_extra_state set_submodule shape_env share_memory state_dict to to_empty to_folder train training type
    type_name validate_inputs xpu zero_grad"""
ATTRIBUTES = frozenset(_ATTRIBUTES.split())


def read_graph(program: Program) -> Any:
    """Return ``models/M.json``. Raises `CkptError` if it has no signature that can be read."""
    model = read_json(program.archive, program.model, _MODEL, "torch.export.save")
    if not all(_specs(model)):
        raise damaged(
            program.archive.path, f"{program.model} is not as torch.export.save writes it: an input of no kind"
        )
    return model


def renamed(program: Program, names: Mapping[str, str]) -> tuple[bytes, list[Problem]]:
    """Return ``models/M.json`` with new `names` for FQNs, and the problems with these."""
    model = read_graph(program)
    kinds = {kind for spec in _specs(model) for kind in spec}
    problems = [
        Problem("the graph has inputs or outputs that are not known, and may name tensors", kind)
        for kind in sorted(kinds - FIELDS.keys() - _NAMELESS)
    ]
    keys = [key for section in program.sections for key in section.keys]
    problems += _unfit(keys, names, model["graph_module"])
    for spec in _specs(model):
        for kind in spec.keys() & FIELDS.keys():
            field = FIELDS[kind]
            spec[kind][field] = names.get(spec[kind][field], spec[kind][field])
    return json.dumps(model).encode(), problems


def _specs(model: Any) -> list[dict[str, Any]]:
    signature = model["graph_module"]["signature"]
    return [*signature["input_specs"], *signature["output_specs"]]


def _unfit(keys: Sequence[str], names: Mapping[str, str], graph: Any) -> Iterator[Problem]:
    """Yield the new names that no module could have; torch makes modules of the graph's calls and subgraphs."""

    def parents(name: str) -> list[str]:
        return [name[: dot.start()] for dot in re.finditer(r"\.", name)]

    modules = {entry["fqn"].partition("@")[0] for entry in graph.get("module_call_graph", ())}
    subgraphs = set(_subgraphs(graph))
    count = Counter(names.get(key, key) for key in keys)
    paths = {path for key in (*count, *modules) for path in parents(key)} | modules
    for new in (names[key] for key in keys if key in names):
        parts = new.split(".")
        taken = [part for part in parts if part in ATTRIBUTES or part.startswith("__") or part in subgraphs]
        below = [path for path in parents(new) if path in count]
        if count[new] > 1 or new in paths:
            yield Problem("the program has a tensor or a module of that name", new)
        elif below:
            yield Problem(f"{below[0]} is a tensor, and has nothing below it", new)
        elif taken or not all(parts):
            yield Problem(f"not a name that a module of torch can have: {taken[0] if taken else 'an empty part'}", new)


def _subgraphs(graph: Any) -> Iterator[str]:
    """Yield the names of the graphs inside the graph (of ``torch.cond`` and the like), at any depth."""
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
