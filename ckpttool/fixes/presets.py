"""The preset whose names left has, if it leads to the names of right: its rules also bring values
into the other order, which no rename does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

from ckpttool.containers.strict_json import read_file
from ckpttool.core.errors import CkptError
from ckpttool.core.tables import present
from ckpttool.core.text import Info, shell
from ckpttool.diffing.result import Diff
from ckpttool.fixes.commands import Fixes
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.trial import try_remap
from ckpttool.fixes.unfixed import unfixed_by
from ckpttool.formats.registry import is_program
from ckpttool.io.files import is_file
from ckpttool.io.paths import is_url, join, parent
from ckpttool.naming.templates import template
from ckpttool.operands.checkpoint import is_folder, split
from ckpttool.operands.model import HF
from ckpttool.remapping.options import RemapOptions
from ckpttool.ruleset.parse import Preset, examples_of, rules

_MOST = 1000  # keys that are looked at
_CONFIGS = ("config.json", "params.json")
# size of a preset -> its names in these files
_NAMES_OF_SIZES = {
    "heads": ("num_attention_heads", "n_heads"),
    # without this number there are as many as heads
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_attention_heads", "n_heads"),
}

Templates = frozenset[tuple[str, ...]]


class KnownNames(NamedTuple):
    """A preset for the names of left, in reverse if left has the names that it leads to. `sizes`
    are the model's, as far as they are known.
    """

    preset: Preset
    reverse: bool
    sizes: Mapping[str, int]

    @property
    def is_complete(self) -> bool:
        """Whether all sizes that the preset needs are known."""
        return self.sizes.keys() >= set(self.preset.sizes)

    @property
    def options(self) -> RemapOptions:
        """The remap by the preset; N for a size that is not known."""
        values = [f"{name}={self.sizes.get(name, 'N')}" for name in self.preset.sizes]
        arguments = f"({', '.join(values)})" if values else ""
        return RemapOptions(rules=f"{self.preset.name}{arguments}", reverse=self.reverse)

    @property
    def note(self) -> Info:
        option = shell("--rules", str(self.options.rules))
        if self.reverse:
            option += " --reverse"
        text = (
            "renames alone may leave values in the order of the other code; `ckpttool remap` has a"
            f" preset for these names: {option}"
        )
        return Info(text, "other-names")


def known_names(question: DiffQuestion) -> KnownNames | None:
    """Return the preset for the names that differ; None if there is none."""
    if question.diff.asks not in ("load", "pair"):
        return None
    sides = present((question.left, question.right))
    if any(map(is_program, sides)):
        return None
    left_keys: list[str] = []
    right_keys: list[str] = []
    for entry in question.diff.entries:
        if entry.status in ("unexpected", "missing", "renamed", "shape"):
            left_keys += entry.left
            right_keys += entry.right
    left, right = _templates(left_keys[:_MOST]), _templates(right_keys[:_MOST])
    if not left or not right:
        return None
    for preset, reverse in product(rules(), (False, True)):
        for example in examples_of(preset):
            before, after = map(_templates, reversed(example) if reverse else example)
            if _has_most(left, before - after) and _has_most(right, after - before):
                return KnownNames(preset, reverse, _sizes(question, preset))
    return None


def with_preset(question: DiffQuestion, names: KnownNames) -> Diff | None:
    """Return the diff with the remap by the preset; None if a size that it needs is not known, or
    if it does not fit. That left has the values that go with these names is a guess.
    """
    trial = try_remap(question, names.options, "renamed") if names.is_complete else None
    if trial is None:
        return None
    is_partial = not trial.after.identical
    unfixed = unfixed_by(question, trial)
    fixes = Fixes((trial.fix,), (), is_partial, is_inferred=True, unfixed=unfixed)
    return fixes.added_to(question.diff)


def _templates(keys: Iterable[str]) -> Templates:
    return frozenset(template(key)[0] for key in keys)


def _has_most(templates: Templates, names: Templates) -> bool:
    """Return whether most names are among the templates, and most of these among the names."""
    common = len(templates & names)
    return 2 * common > len(names) and 2 * common > len(templates)


def _sizes(question: DiffQuestion, preset: Preset) -> dict[str, int]:
    """Return the sizes that the preset needs, from configurations next to a side or the model. Two
    that disagree tell nothing.
    """
    if not preset.sizes:
        return {}
    values: dict[str, set[int]] = {size: set() for size in preset.sizes}
    for folder, name in product(_folders(question), _CONFIGS):
        config = _read(join(folder, name))
        for size in preset.sizes:
            value = _size_in(config, size)
            if value is not None:
                values[size].add(value)
    return {size: several.pop() for size, several in values.items() if len(several) == 1}


def _size_in(config: Mapping[str, Any], size: str) -> int | None:
    for name in _NAMES_OF_SIZES.get(size, ()):
        value = config.get(name)
        if isinstance(value, int):
            return value
    return None


def _folders(question: DiffQuestion) -> list[str]:
    """Return the folders of the model and of the two sides that are on this machine."""
    folders = []
    model = question.options.model
    if isinstance(model, str) and model.startswith(HF):
        folders.append(model.removeprefix(HF))
    for checkpoint in (question.left, question.right):
        if checkpoint is None or checkpoint.in_memory or is_url(checkpoint.source):
            continue
        path = split(checkpoint.source)[0]
        folders.append(path if is_folder(path) else parent(path))
    return folders


def _read(path: str) -> dict[str, Any]:
    """Return the configuration at the path; empty if there is none."""
    if not is_file(path):
        return {}
    try:
        config = read_file(path, "")
    except CkptError:
        return {}
    return config if isinstance(config, dict) else {}
