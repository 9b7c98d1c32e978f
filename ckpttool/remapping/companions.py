"""Files next to the weights: which follow a rename, and which are copied."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

from ckpttool.containers import strict_json
from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import Refused
from ckpttool.core.plan import Plan
from ckpttool.core.schema import TEXT, TEXTS, list_of, record, row
from ckpttool.core.text import Info, Note, listed
from ckpttool.core.values import dataclass
from ckpttool.formats.folders import companions, optimizers_in
from ckpttool.formats.registry import recognize
from ckpttool.io.files import is_dir, names_in
from ckpttool.io.paths import is_url, join, parent
from ckpttool.io.paths import name as name_of
from ckpttool.kinds.adapters import Adapter, adapter_of
from ckpttool.kinds.quantized import quantized_weights
from ckpttool.operands.checkpoint import split
from ckpttool.operands.output import Target, same_folder
from ckpttool.remapping.adapter_config import (
    ADAPTER_CONFIG,
    follow,
    moved_modules,
    shown,
    with_full_names,
)
from ckpttool.remapping.options import FLOATS

# The loader of a folder with these files wants the keys that they describe.
CONFIG, _QUANTIZATION = "config.json", "quantization_config"
_DTYPE = ("dtype", "torch_dtype")  # the second one up to transformers 4.55
_DESCRIBES_NAMES = re.compile(r"config\.json|\w*quant\w*_config\.json")


@dataclass(frozen=True, slots=True)
class Companions:
    """What happens to the files next to the weights.

    `files`: name in OUT -> path of the file to copy, or its new content. `left_out`: name -> why it
    is not in OUT. `before`: the old content of what is rewritten.
    """

    files: Mapping[str, str | bytes] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    before: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def copied(self) -> tuple[str, ...]:
        return tuple(name for name, content in self.files.items() if isinstance(content, str))

    @property
    def rewritten(self) -> tuple[str, ...]:
        return tuple(name for name, content in self.files.items() if isinstance(content, bytes))

    def __str__(self) -> str:
        parts = {
            "copied": self.copied,
            "rewritten": self.rewritten,
            "not copied": self.left_out,
        }
        texts = []
        for what, names in parts.items():
            if names:
                texts.append(f"{what}: {', '.join(names)}")
        return "; ".join(texts)


COMPANIONS = record(
    Companions,
    {
        "copied": TEXTS,
        "rewritten": TEXTS,
        "left_out": list_of(row({"name": TEXT, "reason": TEXT})),
    },
    called={"left_out": lambda companions: list(companions.left_out.items())},
)


def companions_of(
    source: Checkpoint,
    plan: Plan,
    result: Checkpoint,
    target: Target,
    new_base: Sequence[str] = (),
    described: bool = False,
) -> Companions:
    """Return what happens to the files next to `source` when `result`, which `plan` makes of it, is
    written to `target`.

    `new_base` are the tensors of the model that loads the output, if another one. `described`: the
    keys of the output are described by ``config.json``. Raise `Refused` if an adapter's
    configuration cannot follow into the folder of the output.
    """
    path, section = split(source.source)
    if section is not None or source.in_memory:
        return Companions()
    folder = target.folder if is_dir(path) else None
    to_folder = folder is not None
    stays = folder is not None and same_folder(path, folder)
    decisions = _Decisions()
    if to_folder and not stays:
        decisions.copy(path, source, result.other_files)
    elif is_dir(path) and target.folder is None and ADAPTER_CONFIG in names_in(path):
        text = f"{ADAPTER_CONFIG} is not copied, and PEFT needs it: write a folder, -o OUT/"
        decisions.notes.append(Note(text, "remap"))
    if plan.dropped:
        decisions.note_optimizers_keep_state()
    if all(output.is_unchanged for output in plan.outputs):
        return decisions.companions()
    if described or _keeps_keys(plan):
        before, after = _float_dtypes(source), _float_dtypes(result)
        if before != after:
            decisions.follow_dtype(path, after, stays=stays)
    else:
        is_dequantized = _is_dequantized(source, plan)
        out = target.folder or ""
        decisions.leave_out_configs(path, out, stays=stays, is_dequantized=is_dequantized)
        if not stays:
            decisions.note_optimizers_keep_order()
    decisions.follow_adapter(path, plan, new_base, to_folder=to_folder)
    return decisions.companions()


class _Decisions:
    """What happens to the files next to the weights, as far as it is decided."""

    def __init__(self) -> None:
        self.files: dict[str, str | bytes] = {}
        self.left_out: dict[str, str] = {}
        self.before: dict[str, bytes] = {}
        self.notes: list[str] = []

    def companions(self) -> Companions:
        return Companions(self.files, self.left_out, tuple(self.notes), self.before)

    def copy(self, folder: str, source: Checkpoint, other_files: Sequence[str]) -> None:
        """Copy the files that belong to the weights in a folder."""
        self.files.update(companions(folder))
        for name in other_files:
            self.files[name] = join(folder, name)
        self.left_out.update(_others(folder, source, self.files))

    def leave_out_configs(
        self, folder: str, out: str, *, stays: bool, is_dequantized: bool
    ) -> None:
        """Leave files out that describe the old keys, or say what to check if the output `stays` in
        the folder. A configuration that describes the keys without quantization too loses only how
        it is quantized.
        """
        names = names_in(folder) if stays else list(self.files)
        for name in filter(_DESCRIBES_NAMES.fullmatch, names):
            path = join(folder, name)
            plain = _without_quantization(path) if is_dequantized and name == CONFIG else None
            if plain is not None:
                self.before[name], self.files[name] = plain
                self.notes.append(f"{name} is written without its {_QUANTIZATION}")
            elif stays:
                self.notes.append(
                    f"the keys changed, and {path} did not: check that it describes the new keys"
                )
            else:
                del self.files[name]
                self.left_out[name] = "it describes the keys of CKPT, and OUT has others"
                self.notes.append(
                    f"not copied: {name}, which describes the keys of {folder}. If OUT's keys fit"
                    f" it, run `cp {quote(path)} {quote(join(out, name))}`"
                )

    def note_optimizers_keep_order(self) -> None:
        """Say that copied optimizers keep the order of the parameters."""
        for name in optimizers_in(list(self.files)):
            self.notes.append(
                f"{name} is copied unchanged: its ids keep the parameter order of the model that"
                " saved them"
            )

    def note_optimizers_keep_state(self) -> None:
        """Say that copied optimizers do not lose the state of parameters that are left out."""
        for name in optimizers_in(list(self.files)):
            self.notes.append(
                f"{name} is not changed: it still has the state of all parameters, also of"
                " parameters that are left out"
            )

    def follow_dtype(self, folder: str, dtypes: Collection[str], *, stays: bool) -> None:
        """Let the dtype of a model's configuration follow the weights, which have `dtypes` now."""
        if CONFIG not in (names_in(folder) if stays else self.files):
            return
        config, old_text = _read_config(join(folder, CONFIG))
        name = next((name for name in _DTYPE if name in config), "")
        old = config.get(name)
        if old is None or list(dtypes) == [old]:
            return
        if old not in FLOATS or len(dtypes) != 1:
            actual = ", ".join(sorted(dtypes))
            self.notes.append(
                f"{CONFIG} still says {name} {old}, to which from_pretrained converts the weights;"
                f" they are {actual}"
            )
            return
        (new,) = dtypes
        _set_dtype(config, old, new)
        self.files[CONFIG] = _as_json(config, old_text)
        self.before[CONFIG] = old_text
        text = f"{CONFIG} is written with {name} {new} instead of {old}"
        self.notes.append(Info(text, "remap"))

    def follow_adapter(
        self, path: str, plan: Plan, new_base: Sequence[str], *, to_folder: bool
    ) -> None:
        """Let an adapter's configuration follow the keys, or say what changes."""
        folder = path if is_dir(path) else parent(path)
        renames = list(_old_and_new_keys(plan))
        if is_dir(folder) and ADAPTER_CONFIG in names_in(folder):
            config = _adapter_config(join(folder, ADAPTER_CONFIG), renames, new_base, to_folder)
            if config.note:
                self.notes.append(config.note)
            if to_folder and config.new_text is not None:
                self.files[ADAPTER_CONFIG] = config.new_text
                self.before[ADAPTER_CONFIG] = config.text
            return
        adapter = adapter_of(old for old, _ in renames)
        if adapter is not None:
            self.notes += _on_target_modules(adapter, moved_modules(renames))


def _keeps_keys(plan: Plan) -> bool:
    """Return True if each tensor has the key that it had; its dtype may be another one."""
    for output in plan.outputs:
        if ex.without_cast(output.source) != ex.Ref(output.key):
            return False
    return True


def _float_dtypes(checkpoint: Checkpoint) -> set[str]:
    """Return the plain floating-point dtypes of the tensors in its state dicts."""
    dtypes = set[str]()
    for section in checkpoint.state_dicts:
        dtypes.update(entry.dtype for entry in section.tensors if entry.dtype in FLOATS)
    return dtypes


def _is_dequantized(source: Checkpoint, plan: Plan) -> bool:
    """Return True if all that the plan changes are the quantized weights, each of which becomes one
    tensor under the name that a model without quantization has for it.
    """
    if len(source.state_dicts) != 1:
        return False
    (section,) = source.state_dicts
    parts: set[str] = set()
    plain: set[str] = set()
    for weight in quantized_weights(section):
        parts.update(weight.keys)
        plain.add(weight.plain)
    if not plain:
        return False
    written = set()
    changed = set()
    for output in plan.outputs:
        written.add(output.key)
        if not output.is_unchanged:
            changed.add(output.key)
    return changed == plain and written == plain.union(section.keys) - (parts - plain)


def _without_quantization(path: str) -> tuple[bytes, bytes] | None:
    """Return the text of a model's configuration, and the text without how it is quantized; None if
    the configuration does not say that.
    """
    config, text = _read_config(path)
    if _QUANTIZATION not in config:
        return None
    del config[_QUANTIZATION]
    return text, _as_json(config, text)


def _read_config(path: str) -> tuple[dict[str, Any], bytes]:
    """Return a model's configuration and its text. One that is not an object is empty."""
    config, text = _read_json(path)
    return config if isinstance(config, dict) else {}, text


def _read_json(path: str) -> tuple[object, bytes]:
    """Return what the file holds, and its text."""
    return strict_json.read_value_and_text(path, "copy it again")


def _set_dtype(config: dict[str, Any], old: str, new: str) -> None:
    """Write `new` for the dtype `old` in a configuration and in the configurations of its parts."""
    for name, value in config.items():
        if name in _DTYPE and value == old:
            config[name] = new
        elif isinstance(value, dict) and name.endswith("_config") and name != _QUANTIZATION:
            _set_dtype(value, old, new)


def _as_json(config: object, old_text: bytes) -> bytes:
    """Return the file of a configuration, which ends as the old one did."""
    end = b"\n" if old_text.endswith(b"\n") else b""
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + end


def _others(folder: str, source: Checkpoint, copied: Collection[str]) -> dict[str, str]:
    """Return the files of the folder that are not copied, with the reason. Files that the
    checkpoint was read from are not among them.
    """
    weights = recognize(folder).path
    read = {*copied}
    if weights != folder:
        read.add(name_of(weights))
    shards = getattr(source.container, "shards", {})
    if isinstance(shards, Mapping):
        read.update(shards)
    left: dict[str, str] = {}
    for name in names_in(folder):
        if name in read or name.endswith((".distcp", ".metadata")):
            continue
        if not is_url(folder) and is_dir(join(folder, name)):
            left[name] = "a folder"
        elif name.startswith("."):
            left[name] = "a hidden file"
        elif weights != folder:
            left[name] = "other weights"
    return left


def _old_and_new_keys(plan: Plan) -> Iterator[tuple[str, str]]:
    for output in plan.outputs:
        for old in ex.refs(output.source):
            yield old, output.key


def _on_target_modules(adapter: Adapter, modules: Mapping[str, str]) -> list[str]:
    """Return a note on the new names of adapted modules, whose configuration is not there; empty if
    they keep their names.
    """
    changes = set()
    for path in adapter.modules:
        _, _, name = path.rpartition(".")
        _, _, new_name = modules.get(path, "").rpartition(".")
        if new_name not in ("", name):
            changes.add(f"{name} is {new_name} now")
    if not changes:
        return []
    return [f"target_modules in the adapter's {ADAPTER_CONFIG}: {', '.join(sorted(changes))}"]


class _AdapterConfig(NamedTuple):
    """The text of an adapter's configuration, the new text if it changes, and a note on what does
    not follow the keys.
    """

    text: bytes
    new_text: bytes | None = None
    note: str = ""


def _adapter_config(
    path: str, keys: Sequence[tuple[str, str]], new_base: Sequence[str], to_folder: bool
) -> _AdapterConfig:
    """Let the configuration follow the keys. Raise `Refused` if it cannot, in a folder."""
    config, text = _read_json(path)
    if not isinstance(config, dict):
        note = f"{path} is not an object, as PEFT writes it: it was not compared with the new keys"
        return _AdapterConfig(text, note=note)
    new, problems = follow(config, keys, new_base)
    fields = [problem.key for problem in problems]
    values = {field: value for field, value in new.items() if value != config[field]}
    if problems:
        values.update(with_full_names(config, fields, keys, new_base))
    advice = _advice_on_fields(values, fields)
    if problems and to_folder:
        raise Refused(
            f"{path} names modules of the old base, and cannot follow the keys",
            hint="name the weights alone as CKPT and a file as OUT, and copy"
            f" {ADAPTER_CONFIG} next to it {advice}",
            problems=problems,
        )
    changes = []
    for field, value in new.items():
        if value != config[field]:
            changes.append(f"{field} = {shown(value)}")
    new_text = _as_json(new, text) if changes else None
    for problem in problems:
        changes.append(f"{problem.key}: {problem.problem}")
    note = ""
    if changes and not to_folder:
        names = "; ".join(changes)
        note = f"{path} is not changed, and names modules of the old base: {names}"
        if problems:
            note += f". Write it {advice}"
    return _AdapterConfig(text, new_text, note)


def _advice_on_fields(values: Mapping[str, Any], fields: Collection[str]) -> str:
    """Return with which values of an adapter's configuration PEFT finds the renamed modules."""
    parts = []
    if values:
        parts.append(f"with these values: {json.dumps(values, ensure_ascii=False)}")
    unknown = [field for field in fields if field not in values]
    if unknown:
        are = "value is" if len(unknown) == 1 else "values are"
        parts.append(f"with {listed(unknown)} for the new modules, whose {are} not known here")
    return ", and ".join(parts)
