"""What a program's graph says of names: the signature in ``models/M.json``, and the names that torch can put back.

Its inputs and outputs call parameters, buffers and constants by their FQNs; `torch.export.ExportedProgram.module` and
`unflatten` put each of these into a module at its FQN, beside the program's own modules and subgraphs. The operators
are not interpreted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from ckpttool.errors import Problem
from ckpttool.formats.pt2.program import Program, damaged, read_json
from ckpttool.json_schema import TEXT, list_of, object_of

# What names a tensor or an object in a specification of each kind, and the kinds that name none (torch/_export/serde).
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

# The attributes of the modules that torch makes of a program, which a name cannot take the place of.
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
    """``models/M.json``. Raises `CkptError` where it has no signature that can be read."""
    model = read_json(program.archive, program.model, _MODEL, "torch.export.save")
    if not all(_specs(model)):
        raise damaged(
            program.archive.path, f"{program.model} is not as torch.export.save writes it: an input of no kind"
        )
    return model


def renamed(program: Program, names: Mapping[str, str]) -> tuple[bytes, list[Problem]]:
    """``models/M.json`` with FQNs called by their new `names`, and what stands against these."""
    model = read_graph(program)
    kinds = {kind for spec in _specs(model) for kind in spec}
    problems = [
        Problem("the graph has inputs or outputs that are not known, and may name tensors", kind)
        for kind in sorted(kinds - FIELDS.keys() - _NAMELESS)
    ]
    have = [key for section in program.sections for key in section.keys]
    graph = model["graph_module"]
    modules = {entry["fqn"].partition("@")[0] for entry in graph.get("module_call_graph", ())}
    problems += _unfit(have, names, modules, set(_subgraphs(graph)))
    for spec in _specs(model):
        for kind in spec.keys() & FIELDS.keys():
            field = FIELDS[kind]
            spec[kind][field] = names.get(spec[kind][field], spec[kind][field])
    return json.dumps(model).encode(), problems


def _specs(model: Any) -> list[dict[str, Any]]:
    signature = model["graph_module"]["signature"]
    return [*signature["input_specs"], *signature["output_specs"]]


def _unfit(have: Sequence[str], names: Mapping[str, str], modules: Set[str], subgraphs: Set[str]) -> Iterator[Problem]:
    """The new names that no module could have beside the others; `modules` and `subgraphs` are such as torch makes."""
    count = Counter(names.get(key, key) for key in have)
    paths = {path for key in (*count, *modules) for path in _parents(key)} | modules
    for new in (names[key] for key in have if key in names):
        parts = new.split(".")
        taken = [part for part in parts if part in ATTRIBUTES or part.startswith("__") or part in subgraphs]
        below = [path for path in _parents(new) if path in count]
        if count[new] > 1 or new in paths:
            yield Problem("the program has a tensor or a module of that name", new)
        elif below:
            yield Problem(f"{below[0]} is a tensor, and has nothing below it", new)
        elif taken or not all(parts):
            yield Problem(f"no name that a module of torch can have: {taken[0] if taken else 'an empty part'}", new)


def _parents(name: str) -> Iterator[str]:
    """The modules that the name lies in, without the root."""
    return (name[: dot.start()] for dot in re.finditer(r"\.", name))


def _subgraphs(graph: Any) -> Iterator[str]:
    """The names of the graphs inside the graph (of ``torch.cond`` and the like), however deep."""
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
