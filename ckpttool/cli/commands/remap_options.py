"""What one ``remap`` was asked for, and the table of options that do not go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpttool.edits.remap.plan import FORMS
from ckpttool.errors import CkptError
from ckpttool.names import FSDP_FLAT, SERIALIZED
from ckpttool.naming.wrappers import chain
from ckpttool.operands.checkpoint import split
from ckpttool.optimizer_state import FORMS as KEYS

NO_OPTIMIZERS = "a plan holds no changes of optimizers"


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that say what is to become of the checkpoint, under their names on the command line."""

    ckpt: str
    out: str | None
    model: str | None
    model_kwargs: str
    materialize: bool
    to: str | None
    was: str | None
    select: str | None
    keep_prefix: bool
    trainable_only: bool
    rule: list[str] | None
    rules_file: str | None
    reverse: bool
    drop: list[str] | None
    like: str | None
    to_model: str | None
    optimizer: str | None
    to_optimizer: str | None
    optimizer_keys: str | None
    plan: str | None
    save_plan: str | None
    keep_aliases: bool
    max_shard_size: str | None
    units: list[str] | None
    world_size: int | None
    link: str
    in_place: bool
    force: bool
    dry_run: bool
    verify: bool
    no_fsync: bool

    @property
    def target(self) -> str | None:
        """The path that is to be written, or None where nothing is."""
        return self.ckpt if self.in_place else self.out

    @property
    def has_rules(self) -> bool:
        """Whether there are rules, on the command line or in a file."""
        return bool(self.rule or self.rules_file)

    def check(self) -> None:
        """Raises `CkptError` for options that do not go together, or that name a form that is none."""
        for form in (self.to, self.was):
            if form is not None and form not in (*FORMS, FSDP_FLAT):
                chain.parse(form)
        for excluded, message, hint in _CONFLICTS:
            if excluded(self):
                raise CkptError(message.format(a=self), hint=hint)


def _needs_model(form: str | None) -> bool:
    return form in FORMS and form != SERIALIZED


# What excludes what, the error, and its hint; the first that holds is said.
_CONFLICTS: tuple[tuple[Callable[[Asked], object], str, str], ...] = (
    (lambda a: a.in_place and a.out, "--in-place and -o OUT exclude each other", "choose one"),
    (
        lambda a: a.in_place and split(a.ckpt)[1] is not None,
        "--in-place would leave only one section of the file",
        "name the file without ::SECTION",
    ),
    (
        lambda a: a.target is None and not (a.dry_run or a.save_plan),
        "no output named",
        "-o OUT, --in-place, or --dry-run to see the plan",
    ),
    (
        lambda a: _needs_model(a.to) and not a.model,
        "--to {a.to} needs the model's names",
        "pass --model MODEL",
    ),
    (
        lambda a: _needs_model(a.was) and not a.model,
        "--from {a.was} needs the model's names",
        "pass --model MODEL",
    ),
    (
        lambda a: a.plan and (a.model or a.has_rules),
        "--plan stands alone: it says all that is to be done",
        "leave --model and the rules out",
    ),
    (
        lambda a: a.plan and (a.select or a.trainable_only),
        "--plan stands alone: it says all that is to be done",
        "leave --select and the like out",
    ),
    (
        lambda a: a.reverse and not a.has_rules,
        "--reverse without --rule or --rules",
        "--to runtime and --to serialized are each other's reverse",
    ),
    (lambda a: a.keep_prefix and not a.select, "--keep-prefix without --select", "--select PREFIX names the submodule"),
    (
        lambda a: a.trainable_only and not a.model,
        "--trainable-only asks the model which parameters are frozen",
        "pass --model MODEL",
    ),
    (lambda a: a.like and a.to, "--like and --to both say which names OUT gets", "leave one of them out"),
    (
        lambda a: a.optimizer_keys and a.optimizer_keys not in KEYS,
        "--optimizer-keys {a.optimizer_keys}: no such form",
        f"the forms are {', '.join(KEYS)}",
    ),
    (lambda a: a.optimizer and not a.model, "--optimizer is called with a model", "pass --model MODEL too"),
    (lambda a: a.to_optimizer and not a.model, "--to-optimizer is called with a model", "pass --model MODEL too"),
    (
        lambda a: (a.plan or a.save_plan) and (a.optimizer_keys or a.to_optimizer),
        NO_OPTIMIZERS,
        "write them to OUT: leave the plan out",
    ),
)
