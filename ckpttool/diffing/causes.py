"""Why two names or two tensors differ: a stable code with arguments, and its words."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache

from ckpttool.core.names import NAMED_EXTRA_STATE
from ckpttool.core.tables import present
from ckpttool.core.values import dataclass
from ckpttool.formats.remarks import PLACEHOLDER
from ckpttool.naming.wrappers import TABLE

Sides = tuple[str, str]  # what a sentence calls the two sides
SIDES: Sides = ("left", "right")
FIELDS: Sides = ("{left}", "{right}")  # in the words of a `Note` that is `about` the two sides


class Code(Enum):
    """A code of `ckpttool.core.codes`, and one of its sentences.

    ``{0}`` is an argument, ``{left}`` and ``{right}`` are the sides.
    """

    def __init__(self, code: str, words: str) -> None:
        self.code, self.words = code, words

    # Keys
    MISSING = "missing", "missing from {left}"
    UNEXPECTED = "unexpected", "not in {right}"
    OPTIONAL = "optional", "loading does not need it"
    TIED = "tied", "tied: saved under only one of its names, as save_pretrained does"
    SECOND_NAME = "second-name", "second name of a tensor that both sides have"
    CALL_VARIANT = "call-variant", "call variant of a tensor that both sides have"
    COUNTER = "counter", "the counter of an AveragedModel, which programs do not have"
    STATE_OF_CODE = "state-of-code", "state of the model's code, which programs do not have"
    STORAGE = "storage", "a storage that belongs to no known tensor"
    FLAT = (
        "flat-parameter",
        (
            "FSDP1 flat parameter: all parameters of its module end to end, split over the files of"
            " all ranks"
        ),
    )
    # Names
    WRAPPED_LEFT = "wrapper-prefix", "{left} {0}"
    WRAPPED_RIGHT = "wrapper-prefix", "{right} {0}"
    WRAPPERS_REORDERED = "wrapper-prefix", "same wrappers in a different order"
    HOOK = "hook", "state_dict hook {0}"
    SAVING = "hook", "saving {0}"
    RUNTIME_KEY = "runtime-key", "{left} has the runtime name; the state_dict hook {0}"
    LOAD_HOOK = "load-hook", "a load hook accepts the keys of {left}"
    LOAD_HOOK_CHANGES = "load-hook", "loading does not take this value as it is"
    LOAD_HOOK_DROPS = "load-hook", "a load hook removes it without an error"
    RUNTIME_NAME = (
        "runtime-name",
        (
            "runtime name changed, key did not: affects exported programs and optimizers that use"
            " names"
        ),
    )
    # Tensors
    SHAPE = "shape", "different shape"
    RANK_SHAPE = "shape", "different shape on another rank"
    SPLIT_LEFT = "split-tensor", "split between {0} ranks of {left}"
    SPLIT_RIGHT = "split-tensor", "split between {0} ranks of {right}"
    SPLIT_BOTH = "split-tensor", "split between {0} ranks of {left} and {1} of {right}"
    PLACEHOLDER = "placeholder", PLACEHOLDER
    KIND = "kind", "different kind of tensor"
    DTYPE = "dtype", "{0} instead of {1}"
    QUANTIZED = (
        "quantized",
        "part of a quantized weight ({0}): its numbers are the values divided by a scale",
    )
    SCALED = "quantized", "{0} instead of {1}, with the same values through the scales"
    SCALED_VALUE = "quantized", "{0} instead of {1}, compared through the scales"
    VALUE = "value", "different values"
    RANK_VALUE = "value", "different values on another rank"
    CONVERTED = "value", "different values even after conversion"
    UNREAD = "unread-value", "values not compared"
    TIED_VALUE = (
        "tied-value",
        "tied, but the file has different values under another of its names: loading loses one",
    )
    LOST_VALUE = "lost-value", "the model saves this key, and loading this file does not read it"
    ALTERED = (
        "altered-value",
        "loading does not keep this value: the model's tensor is quantized or of another class",
    )
    # Values that are found under another name or in another order
    MOVED = "moved", "{left} `{0}` is {right} `{1}`"
    TRANSPOSED = "transposed", "each is the transpose of the other"
    ROW_ORDER = "row-order", "same rows in a different order"
    ROTARY_LEFT = (
        "rotary-order",
        "rows in rotary order, heads of {0}: adjacent pairs in {left}, halves in {right}",
    )
    ROTARY_RIGHT = (
        "rotary-order",
        "rows in rotary order, heads of {0}: adjacent pairs in {right}, halves in {left}",
    )
    # Entries that are not tensors
    OBJECT = "object", "not a tensor, but the model expects one"
    OBJECT_UNKNOWN = "object", "no safe loader creates it: whether torch loads it is not known"
    OBJECT_ONE_SIDE = "object", "a tensor on one side only"
    OBJECT_TENSORS = "object", "not a tensor, and contains different tensors"
    OBJECT_TENSOR = "object", "not a tensor, and a tensor inside it differs"
    OBJECT_VALUE = "object", "not a tensor, and a different object"
    OBJECT_UNREAD = "object", "not a tensor: copied, not compared"
    EXTRA_STATE = "extra_state", "extra state"
    NAMED_EXTRA_STATE = "named-extra-state", NAMED_EXTRA_STATE
    NOT_READ_BACK = (
        "not-read-back",
        "state_dict() writes the key, and a strict load_state_dict() refuses it",
    )
    INSIDE_OBJECT = "inside-object", "saved inside an entry that is not a tensor"
    # Computed values
    PART = "part", "the other side has the parameter that is computed from it ({0})"
    COMPUTED_FROM = "part", "the other side has the parts it is computed from ({0})"
    COMPUTED = "computed", "computed: {0}"
    OPAQUE = "opaque", "computed by code outside of torch operators"
    BY_HOOK = "computed", "computed by a state_dict hook"
    ADDED_BY_HOOK = "added-by-hook", "added by a hook: no runtime tensor is its source"
    RECOMPUTED = "recomputed", "computed from other tensors, or in another way"
    RUNTIME_TENSORS = "runtime-key", "{left} has the runtime tensors"
    NON_PERSISTENT = "non-persistent", "non-persistent buffer, which the model does not save"
    NOT_SAVED = "not-saved", "state_dict() leaves it out"
    # Optimizers
    GROUP_MISSING = "group", "{left} does not have this param group"
    GROUP_UNEXPECTED = "group", "{right} does not have this param group"
    OPTION_MISSING = "option", "`{0}` is not in the param groups of {left}"
    OPTION_UNEXPECTED = "option", "`{0}` is not in the param groups of {right}"
    OPTION = "option", "different hyperparameter"
    OPTION_REQUIRED = (
        "option-required",
        "`{0}` is not in the param groups of {left}, and loading by name needs it",
    )
    PARAM_MISSING = "param", "parameter missing from {left}; in param group {0} of {right}"
    PARAM_UNEXPECTED = "param", "parameter not in {right}; in param group {0} of {left}"
    OTHER_GROUP = "other-group", "in param group {0} of {left}, {1} of {right}"
    KEY_ORDER = (
        "key-order",
        (
            "the two files list the model's keys in different orders, so equal ids may be different"
            " parameters"
        ),
    )
    POSITION = (
        "position",
        (
            "same parameter, different position: loading by position would give its"
            " state to another one"
        ),
    )
    MISASSIGNED = (
        "position",
        "torch assigns state by position: this parameter would get the state of another one",
    )
    DOUBT = "doubtful-ids", "{0}"
    OPTIMIZER_ID = "position", "optimizer id changed: torch assigns state by id"
    PARAM_REMOVED = "param", "no longer a parameter of the optimizer"
    PARAM_ADDED = "param", "new parameter of the optimizer"
    NO_STATE_LEFT = "no-state", "{left} has no state for this parameter"
    NO_STATE_RIGHT = "no-state", "{right} has no state for this parameter"
    NO_VALUE_LEFT = "no-state", "no `{0}` in the state of {left}"
    NO_VALUE_RIGHT = "no-state", "no `{0}` in the state of {right}"
    NOT_STEPPABLE = (
        "step-needs",
        "the next optimizer step needs it, but the saved state does not have it",
    )
    NO_STATE = (
        "state-required",
        "trainable parameter without state, which set_optimizer_state_dict refuses",
    )
    PYTHON_VALUE = "python-value", "a tensor on one side, a Python value on the other"
    OTHER_VALUE = "value", "different value"
    FORM = "optimizer-keys", "{left} identifies parameters by {0}, {right} by {1}"


# Entries of which one side at least is not a tensor.
OBJECTS = frozenset(
    {
        Code.OBJECT,
        Code.OBJECT_ONE_SIDE,
        Code.OBJECT_TENSORS,
        Code.OBJECT_TENSOR,
        Code.OBJECT_VALUE,
        Code.OBJECT_UNREAD,
        Code.OBJECT_UNKNOWN,
    }
)

# Why one tensor has two names.
NAMES = frozenset(
    {Code.WRAPPED_LEFT, Code.WRAPPED_RIGHT, Code.WRAPPERS_REORDERED, Code.HOOK, Code.RUNTIME_KEY}
)

# What only a checkpoint, or only a program, has besides the weights.
NOT_WEIGHTS = (Code.COUNTER, Code.STATE_OF_CODE, Code.NON_PERSISTENT)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an entry is not the same. `also` are further causes of the same entry."""

    code: Code
    args: tuple[object, ...] = ()
    also: tuple[Cause, ...] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, sides: Sides = SIDES) -> str:
        """Return the sentence, with these names for the two sides."""
        words = self.code.words.format(*self.args, left=sides[0], right=sides[1])
        return "; ".join([words, *(cause.text(sides) for cause in self.also)])

    def has(self, *codes: Code) -> bool:
        """Return True if this cause, or one in `also`, has one of the codes."""
        return self.code in codes or (
            bool(self.also) and any(cause.has(*codes) for cause in self.also)
        )

    @property
    def codes(self) -> tuple[str, ...]:
        """Its code, and the codes of further causes."""
        codes = [self.code.code]
        for cause in self.also:
            codes += cause.codes
        return tuple(codes)

    def and_also(self, *causes: Cause | None) -> Cause:
        """Return this cause with more causes."""
        more = present(causes)
        return Cause(self.code, self.args, (*self.also, *more))


def segment_change(old: str, new: str) -> str:
    """Describe how a name became another: ``hides the segment `layer` ``."""
    removed, added = map(".".join, _changed(old, new))
    if removed and added:
        return f"turns `{removed}` into `{added}`"
    return f"hides the segment `{removed}`" if removed else f"adds the segment `{added}`"


def _changed(old: str, new: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the segments of each name between the first and the last that both share::

    encoder.attn.weight, encoder.mixer.attn.weight     (), (mixer)
    """
    left, right = old.split("."), new.split(".")
    start = _count_shared(left, right)
    left, right = left[start:], right[start:]
    end = _count_shared(left[::-1], right[::-1])
    return tuple(left[: len(left) - end]), tuple(right[: len(right) - end])


def _count_shared(left: Sequence[str], right: Sequence[str]) -> int:
    """Return how many first segments are the same."""
    count = 0
    for segment, other in zip(left, right):
        if segment != other:
            break
        count += 1
    return count


def wrapper_cause(left: str, right: str) -> Cause | None:
    """Return why two names of one tensor differ if only the segments of wrappers do; None if they
    are equal.
    """
    return None if left == right else _wrapper_cause(*_changed(left, right))


@cache
def _wrapper_cause(left: tuple[str, ...], right: tuple[str, ...]) -> Cause:
    causes = []
    in_left, in_right = _more(left, right), _more(right, left)
    if in_left:
        causes.append(Cause(Code.WRAPPED_LEFT, (_wrapped_in(in_left),)))
    if in_right:
        causes.append(Cause(Code.WRAPPED_RIGHT, (_wrapped_in(in_right),)))
    if not causes:
        return Cause(Code.WRAPPERS_REORDERED)
    return causes[0].and_also(*causes[1:])


def _more(segments: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the segments that the others have less often."""
    more = list(segments)
    for segment in others:
        if segment in more:
            more.remove(segment)
    return more


def _wrapped_in(segments: Sequence[str]) -> str:
    """Name the wrappers that add the segments: ``is wrapped in torch.compile (`_orig_mod`)``."""
    by_title: dict[str, list[str]] = {}
    prefix = []
    for segment in segments:
        titles = [row.title for row in TABLE if row.segment == segment]
        # PEFT's only below its `base_model`
        if not titles or (segment == "model" and "base_model" not in segments):
            prefix.append(segment)
        else:
            by_title.setdefault(" or ".join(titles), []).append(segment)
    wrappers = []
    for title, names in by_title.items():
        path = ".".join(dict.fromkeys(names))
        wrappers.append(f"{title} (`{path}`)")
    phrases = []
    if wrappers:
        phrases.append("is wrapped in " + " and ".join(wrappers))
    if prefix:
        phrases.append(f"has the prefix `{'.'.join(prefix)}`")
    return " and ".join(phrases)
