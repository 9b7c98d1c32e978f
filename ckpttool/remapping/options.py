"""The options of `remap` and `convert`: each once, with its name on the command line and in
Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any

from ckpttool.core.errors import CkptError
from ckpttool.core.names import FSDP_FLAT
from ckpttool.core.optimizer_state import FORMS as KEYS
from ckpttool.core.options import (
    BECOMES,
    IS,
    EditOptions,
    ModelOptions,
    OptimizerOptions,
    Optimizers,
    Option,
    OutputOptions,
    call_of,
    several,
    single_or_by_section,
)
from ckpttool.core.values import dataclass
from ckpttool.naming import convert
from ckpttool.naming.convert import Form, ModelForm
from ckpttool.operands.checkpoint import split

FLOATS = ("bfloat16", "float16", "float32", "float64")

KeepAliases = Annotated[
    bool,
    Option(
        "--keep-aliases", "To safetensors: keep one name of a tensor, record the others.", "Output"
    ),
]


def presets() -> list[str]:
    """Return the names of the preset rules."""
    from ckpttool.ruleset.parse import preset_names

    return list(preset_names())


@dataclass(frozen=True, kw_only=True)
class RemapOptions(OptimizerOptions, EditOptions):
    """All options of a remap. Options that name code (`model`, `optimizer`, …) may be objects."""

    optimizer: Annotated[
        Any,
        Option(
            "--optimizer OPTIMIZER",
            "Its optimizer: 'model.py:make(lr=1)'. Of several: 'muon=model.py:make'.",
            IS,
            repeats=True,
        ),
    ] = None
    # the conversion
    to: Annotated[
        str | None,
        Option(
            "--to FORM", "A naming: `ckpttool help forms`.", BECOMES, choices=convert.form_names
        ),
    ] = None
    like: Annotated[
        Any, Option("--like CKPT", "A checkpoint with the keys to take over.", BECOMES)
    ] = None
    to_model: Annotated[
        Any, Option("--to-model MODEL", "Another model, which will load OUT.", BECOMES)
    ] = None
    to_optimizer: Annotated[
        Any,
        Option(
            "--to-optimizer OPTIMIZER",
            "Another optimizer, which will resume. Of several: 'muon=model.py:make'.",
            BECOMES,
            repeats=True,
        ),
    ] = None
    fill_from: Annotated[
        Sequence[Any] | None,
        Option(
            "--fill-from CKPT",
            "Take missing keys from it; also 'model.py:build'. Repeatable.",
            BECOMES,
        ),
    ] = None
    using: Annotated[
        Any,
        Option(
            "--using FUNCTION",
            "Code that converts a state dict: 'file.py:to_hf(heads=32)'.",
            BECOMES,
        ),
    ] = None
    optimizer_keys: Annotated[
        str | None,
        Option(
            f"--optimizer-keys {'|'.join(KEYS)}",
            "How optimizers call their parameters.",
            BECOMES,
            choices=KEYS,
        ),
    ] = None
    # the input
    from_: Annotated[
        str | None,
        Option("--from FORM", "Its naming; default: recognized.", IS, choices=convert.form_names),
    ] = None
    # Which keys
    select: Annotated[
        str | None, Option("--select PREFIX", "One submodule, under its own names.", "Keys")
    ] = None
    trainable_only: Annotated[
        bool, Option("--trainable-only", "Leave frozen parameters out.", "Keys")
    ] = False
    rule: Annotated[
        Sequence[str] | None,
        Option("--rule RULE", "'FROM => TO': `ckpttool help rules`. Repeatable.", "Keys"),
    ] = None
    rules: Annotated[
        str | None,
        Option(
            "--rules FILE",
            "A rules file or a preset: `ckpttool rules`.",
            "Keys",
            choices=presets,
        ),
    ] = None
    reverse: Annotated[bool, Option("--reverse", "Apply the rules from TO to FROM.", "Keys")] = (
        False
    )
    partial: Annotated[
        bool,
        Option(
            "--partial",
            "Write OUT even if it lacks keys of the model, and name them. Named optimizer state"
            " that is lacking is created.",
            "Keys",
        ),
    ] = False
    drop: Annotated[
        Sequence[str] | None,
        Option("--drop PATTERN", "Leave out: `ckpttool help patterns`. Repeatable.", "Keys"),
    ] = None
    sections: Annotated[
        str | None,
        Option("--sections PATHS", "As in 'model,ema'. Default: all that hold the model.", "Keys"),
    ] = None
    # The output
    keep_aliases: KeepAliases = False

    def __post_init__(self) -> None:
        for name in ("rule", "drop"):
            object.__setattr__(self, name, several(getattr(self, name)))
        for name in ("optimizer", "to_optimizer"):
            object.__setattr__(self, name, single_or_by_section(getattr(self, name)))
        fillers = self.fill_from
        if fillers is not None and not isinstance(fillers, (list, tuple)):
            fillers = (fillers,)
        object.__setattr__(self, "fill_from", None if fillers is None else tuple(fillers))

    @property
    def optimizers(self) -> dict[str, tuple[Any, Any]]:
        """Section -> the optimizer that saved it and the optimizer that will load it, if they are
        named by section.
        """
        saved = self.optimizer if isinstance(self.optimizer, Optimizers) else {}
        loads = self.to_optimizer if isinstance(self.to_optimizer, Optimizers) else {}
        return {path: (saved.get(path), loads.get(path)) for path in {**saved, **loads}}

    @property
    def source_units(self) -> tuple[str, ...]:
        """The modules that have their own flat parameters in the source, if the user names them."""
        return _units(self.from_) or ()

    @property
    def form(self) -> Form | None:
        """The form that the keys get."""
        return None if self.to is None else convert.parse_form(self.to)

    @property
    def source_form(self) -> Form | None:
        """The form of the keys, if the user names it."""
        return (
            None
            if self.from_ is None or _units(self.from_) is not None
            else convert.parse_form(self.from_)
        )

    @property
    def has_rules(self) -> bool:
        """Whether there are rules, on the command line or in a file."""
        return bool(self.rule or self.rules)

    def check(self, ckpt: str | None) -> None:
        """Raise `CkptError` for options that exclude each other, and for unknown values.

        `ckpt` is the operand, or None if the source is in memory.
        """
        if self.to is not None:
            if self.to.startswith("fsdp-"):
                hint = "write a folder that loads on any number of ranks: -o OUT.dcp"
                raise CkptError(f"--to {self.to}: files of ranks are read, not written", hint=hint)
            convert.parse_form(self.to)
        if self.from_ is not None and _units(self.from_) is None:
            convert.parse_form(self.from_)
        for excluded, message, hint in self._conflicts():
            if excluded:
                raise CkptError(message, hint=hint)
        if self.in_place and (ckpt is None or split(ckpt)[1] is not None):
            raise CkptError(
                "--in-place would leave only one section of the file",
                hint="name the file without ::SECTION",
            )

    def _conflicts(self) -> Iterator[tuple[object, str, str]]:
        """Yield a test for each conflict, with the error and its hint; the first one is
        reported.
        """
        yield self.in_place and self.out, "--in-place and -o OUT exclude each other", "choose one"
        no_model, name_it = self.model is None, "pass --model MODEL"
        yield no_model and _needs_model(self.to), f"--to {self.to} needs the model's names", name_it
        yield (
            no_model and _needs_model(self.from_),
            f"--from {self.from_} needs the model's names",
            name_it,
        )
        reverse = self.reverse and not self.has_rules
        yield (
            reverse,
            "--reverse without --rule or --rules",
            "--to runtime and --to serialized are each other's reverse",
        )
        frozen = "--trainable-only asks the model which parameters are frozen"
        yield self.trainable_only and no_model, frozen, name_it
        named = [flag for flag in _NOT_WITH_USING if getattr(self, flag.replace("-", "_"))]
        yield (
            self.using is not None and named,
            f"--using excludes {' and '.join(f'--{flag}' for flag in named)}",
            "use them in two commands, one after the other",
        )
        has_names = not no_model or self.to_model is not None or self.like is not None
        yield (
            self.fill_from and not has_names,
            "--fill-from must know which keys are missing",
            f"{name_it} or --like CKPT",
        )
        yield (
            self.fill_from and (self.select or self.trainable_only),
            "--fill-from is for complete models: --select and --trainable-only exclude it",
            "use them in two commands, one after the other",
        )
        both = self.like is not None and self.to
        yield both, "--like and --to both say which names OUT gets", "leave one of them out"
        for flag, optimizer in (
            ("--optimizer", self.optimizer),
            ("--to-optimizer", self.to_optimizer),
        ):
            yield (
                isinstance(optimizer, (list, tuple)),
                f"{flag} names several optimizers, and not their sections",
                f"{flag} SECTION=OPTIMIZER for each: `ckpttool inspect` lists the sections",
            )
        keys = self.optimizer_keys
        yield (
            keys and keys not in KEYS,
            f"--optimizer-keys {keys}: no such form",
            f"the forms are {', '.join(KEYS)}",
        )
        yield (
            self.optimizer is not None and no_model,
            "--optimizer is called with a model",
            f"{name_it} too",
        )
        alone = self.to_optimizer is not None and no_model and self.to_model is None
        yield alone, "--to-optimizer is called with a model", f"{name_it} too"
        yield (
            self.source_units and no_model,
            f"--from {self.from_} needs the model's modules",
            name_it,
        )


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(ModelOptions, OutputOptions):
    """All options of a conversion."""

    keep_aliases: KeepAliases = False
    max_shard_size: Annotated[
        str | None,
        Option("--max-shard-size SIZE", "Maximum size of a shard, for example 5GB.", "Output"),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            f"--dtype {'|'.join(FLOATS)}",
            "Cast all floating-point tensors of state dicts.",
            BECOMES,
            choices=FLOATS,
        ),
    ] = None
    metadata: Annotated[
        Sequence[str] | None,
        Option("--metadata KEY=VALUE", "Add to __metadata__ of safetensors. Repeatable.", BECOMES),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", several(self.metadata))

    @property
    def as_remap(self) -> RemapOptions:
        """The remap that renames nothing."""
        names = [field.name for field in fields(RemapOptions) if hasattr(self, field.name)]
        return RemapOptions(**{name: getattr(self, name) for name in names})

    @property
    def pairs(self) -> dict[str, str]:
        """The pairs of `metadata`. Raise `CkptError` for a text without a key."""
        pairs = {}
        for text in self.metadata or ():
            key, sign, value = text.partition("=")
            if not key or not sign:
                raise CkptError(f"{text!r} is not KEY=VALUE", hint="as in --metadata license=mit")
            pairs[key] = value
        return pairs

    def check(self) -> None:
        """Raise `CkptError` for a dtype that is not a floating-point one."""
        if self.dtype not in (None, *FLOATS):
            raise CkptError(
                f"{self.dtype} is not one of {', '.join(FLOATS)}",
                hint="a rule casts to any dtype: `ckpttool help rules`",
            )

    @property
    def shard_size(self) -> int | None:
        """The maximum size of a shard in bytes. Raises `CkptError` if it is not a size."""
        return None if self.max_shard_size is None else parse_size(self.max_shard_size)


_NOT_WITH_USING = ("model", "to", "like", "trainable-only")


def _units(form: str | None) -> tuple[str, ...] | None:
    """Read ``fsdp-flat(units=["layers.*"])``: the modules with their own flat parameters; None for
    other forms.

    Raise `CkptError` for arguments that it does not have.
    """
    if form is None or form.partition("(")[0] != FSDP_FLAT:
        return None
    _, arguments = call_of(form)
    units = arguments.pop("units", ())
    units = [units] if isinstance(units, str) else units
    are_texts = isinstance(units, (list, tuple)) and all(isinstance(unit, str) for unit in units)
    if arguments or not are_texts:
        hint = f"as in '{FSDP_FLAT}(units=[\"layers.*\"])'"
        raise CkptError(f"{form}: these are not its arguments", hint=hint)
    return tuple(units)


def _needs_model(word: str | None) -> bool:
    return word in convert.WORDS and word != ModelForm.SERIALIZED.value


def parse_size(text: str) -> int:
    """Return the bytes of ``5GB`` (10^9), ``512MiB`` (2^20) or ``1000``. Raises `CkptError` for any
    other text.
    """
    match = re.fullmatch(
        r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGTkmgt])([Ii]?)[Bb]|[Bb])?", text.strip()
    )
    size = 0
    if match:
        power = " KMGT".index((match[2] or " ").upper())
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if not size:
        raise CkptError(f"{text!r} is not a size", hint="as in 5GB, 500MB, 2GiB or 1000000 (bytes)")
    return size
