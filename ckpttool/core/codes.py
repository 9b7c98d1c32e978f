"""The codes of everything that a report says: what each means, an example, and what to do about it.

`ckpttool explain CODE` prints a row, and the documentation lists all of them. Codes are stable; sentences may change.
"""

from __future__ import annotations

from typing import Any

from ckpttool.core.errors import CkptError
from ckpttool.core.schema import TEXT, one_of, record
from ckpttool.core.values import dataclass, public

KINDS = {
    "status": "The status of an entry of `diff`",
    "cause": "Why an entry of `diff` differs",
    "note": "A note or a warning about the operands as a whole",
    "fix": "A note on a suggested fix",
    "problem": "Why a command refuses, or what `check` finds",
}


@public
@dataclass(frozen=True, slots=True)
class Row:
    """A code with its meaning, a line of a report that has it, and how to fix it. `kind` is one of `KINDS`."""

    code: str
    kind: str
    meaning: str
    example: str
    fix: str

    def to_json(self) -> dict[str, Any]:
        """Return the `code` object of the contract."""
        return dict(CODE.write(self))


CODE = record(
    Row,
    {"code": TEXT, "kind": one_of(*KINDS), "meaning": TEXT, "example": TEXT, "fix": TEXT},
    title="ckpttool.code/1",
)

_NOTHING = "Nothing to do."
_RULE = "Pass --rule 'FROM => TO'"
_SCRATCH = "Load the model only, and start the optimizer from scratch."
_ROWS = {
    "status": (
        ("same", "same key, dtype and shape", "same  head.weight", _NOTHING),
        (
            "renamed",
            "same tensor, different name",
            "renamed  layers.0.w -> layers.0.layer.w",
            f"{_RULE} to give them the names that right has.",
        ),
        (
            "transformed",
            "computed from other tensors",
            "transformed  qkv.weight -> q.weight + k.weight + v.weight",
            "Load the checkpoint into the model, and save its state_dict().",
        ),
        (
            "order",
            "state that loading would give to another parameter",
            "order  param_groups.0.params.0",
            "Pass --optimizer to `diff`: it suggests the remap that puts the state in order.",
        ),
        (
            "alias",
            "second name of a tensor",
            "alias  lm_head.weight: same as embed.weight",
            "`remap --model MODEL` writes all names of tied tensors.",
        ),
        (
            "shape",
            "different shape or kind of tensor",
            "shape  head.weight: [10, 4] instead of [12, 4]",
            "Build the model as it was when this was saved (`--model 'model.py:build(classes=10)'`), or slice, pad or "
            "reshape them yourself.",
        ),
        (
            "dtype",
            "different dtype",
            "dtype  head.weight: float16 instead of float32",
            "Loading converts it, so --ignore-dtype accepts it; `cast` in a rules file converts it now.",
        ),
        ("value", "different values", "value  head.weight", "These are two states of training, or two models."),
        (
            "missing",
            "missing from left",
            "missing  head.bias",
            "Copy the values from another checkpoint, or load with strict=False and initialize them. If left has the "
            "keys under other names, pass --rule 'FROM => TO'.",
        ),
        (
            "unexpected",
            "not in right",
            "unexpected  old_head.weight",
            "No fix is suggested because it would lose values. If right has the keys under other names, pass "
            "--rule 'FROM => TO'.",
        ),
        ("not_serialized", "left out by state_dict()", "not_serialized  rope.freqs", _NOTHING),
        ("extra_state", "not a tensor", "extra_state  fp8._extra_state", _NOTHING),
    ),
    "cause": (
        ("optional", "loading does not need the key", "missing  rope.freqs", _NOTHING),
        (
            "tied",
            "tied: saved under only one of its names, as save_pretrained does",
            "missing  lm_head.weight: same as embed.weight",
            "`remap --model MODEL` writes all names of tied tensors.",
        ),
        ("second-name", "second name of a tensor that both sides have", "alias  lm_head.weight", _NOTHING),
        ("call-variant", "an unflattened program's name for another call of a module", "alias  block@1.w", _NOTHING),
        ("storage", "a storage that belongs to no known tensor", "unexpected  data/7", "Compare the programs' code."),
        (
            "flat-parameter",
            "FSDP1 flat parameter: all parameters of its module end to end, split over the files of all ranks",
            "unexpected  block._flat_param",
            "Name the files of all ranks at once, as in 'rank_*.pt', and pass --model.",
        ),
        (
            "wrapper-prefix",
            "the names differ by segments of wrappers (DDP, torch.compile, ...) or by a prefix",
            "renamed  module.head.weight -> head.weight",
            "`remap CKPT -o OUT --model MODEL --to serialized` writes the names of the model without wrappers.",
        ),
        (
            "hook",
            "a state_dict hook, or an overridden state_dict method, renames the key",
            "renamed  layers.0.w -> layers.0.layer.w: _hide (model.py:12)",
            "`remap CKPT -o OUT --model MODEL --to exported` writes runtime names; `--to serialized` writes keys.",
        ),
        (
            "runtime-key",
            "the file has runtime names or tensors, and the model reads what its hooks write",
            "renamed  layers.0.layer.w -> layers.0.w",
            "`remap CKPT -o OUT --model MODEL --to serialized`.",
        ),
        ("load-hook", "a load hook accepts the key, or removes it without an error", "renamed  old.w", _NOTHING),
        (
            "runtime-name",
            "the runtime name changed, the key did not: affects exported programs and optimizers that use names",
            "renamed  block.w -> blocks.0.w",
            "Export the programs again.",
        ),
        (
            "placeholder",
            "no elements, as in a ZeRO-3 placeholder or in what another rank of FSDP holds",
            "shape  head.weight: [0] instead of [10, 4]",
            "The ranks' files hold the values: `ckpttool remap FOLDER -o whole.pt` gathers them.",
        ),
        (
            "kind",
            "different kind of tensor (dense, sparse, quantized, DTensor, ...)",
            "shape  head.weight: quantized instead of dense",
            "Read it where its class is known, and save plain tensors.",
        ),
        ("unread-value", "values that were not compared", "value  head.weight", "Convert both to one plain dtype."),
        (
            "tied-value",
            "tied, but the file has different values under its names: loading keeps one of them",
            "value  lm_head.weight: loading keeps embed.weight",
            "Keep the name with the right values: --drop leaves out the other.",
        ),
        (
            "moved",
            "the values are under another name on the right",
            "value  q.weight: left `q` is right `k`",
            "Pass --rule 'FROM => TO' for each of them to rename all of them at once.",
        ),
        ("transposed", "one is the transpose of the other", "value  fc.weight", "Use `transpose` in a rules file."),
        ("row-order", "the same rows in a different order", "value  embed.weight", "Index them yourself."),
        (
            "rotary-order",
            "rows in the other rotary-embedding order",
            "value  q_proj.weight: heads of 64",
            "`diff LEFT RIGHT --values --suggest rules.toml` writes the rule that reorders them (`permute`).",
        ),
        (
            "object",
            "an entry of which at least one side is not a tensor, with different content",
            "value  config",
            "It is copied unchanged: take it from right.",
        ),
        (
            "named-extra-state",
            "a tensor called _extra_state: state_dict() writes the key, and a strict load_state_dict() refuses it",
            "unexpected  _extra_state",
            "Rename the buffer or parameter in the model's code.",
        ),
        ("inside-object", "saved inside an entry that is not a tensor", "missing  scales", "Load it with the model."),
        (
            "part",
            "one side has a parameter, the other the parts that it is computed from (torch.nn.utils)",
            "unexpected  conv.weight_g + conv.weight_v",
            "Load the file into a model built like the one that saved it, add or remove what computes them there "
            "(torch.nn.utils), and save its state_dict().",
        ),
        (
            "computed",
            "a state_dict hook computes the value with torch operators",
            "transformed  qkv.weight: computed: cat",
            "`remap --model MODEL --to exported` computes the runtime tensors.",
        ),
        (
            "opaque",
            "computed by code outside of torch operators",
            "transformed  packed",
            "`remap --model MODEL` runs the model's own code for these values.",
        ),
        ("added-by-hook", "added by a hook: no runtime tensor is its source", "unexpected  version", _NOTHING),
        (
            "recomputed",
            "the new code computes it from other tensors, or in another way",
            "transformed  qkv.weight",
            "Load old checkpoints with the old code, and save them again with the new.",
        ),
        ("non-persistent", "a non-persistent buffer, which the model does not save", "not_serialized  mask", _NOTHING),
        (
            "not-saved",
            "state_dict() leaves it out, and loading does not restore it",
            "not_serialized  gate",
            "Save it in a hook, or fix the hook that removes it.",
        ),
        ("group", "only one side has the param group", "missing  param_groups.1", "Pass --optimizer."),
        (
            "option",
            "a hyperparameter differs, or only one side has it",
            "value  param_groups.0.lr: 0.1 instead of 0.01",
            "Loading takes the file's hyperparameters. Set them after loading if they must differ.",
        ),
        ("param", "only one optimizer has the parameter", "missing  param_groups.0.params.2", "Pass --optimizer."),
        ("other-group", "the parameter is in another param group", "renamed  param_groups.0.params.w", "See `order`."),
        (
            "position",
            "torch assigns optimizer state by position, and the parameter has another position or id",
            "order  param_groups.0.params.0: gets the state of head.bias",
            "`diff CKPT --model MODEL --optimizer OPTIMIZER` suggests the remap that puts the state in order.",
        ),
        (
            "key-order",
            "the two files list the model's keys in different orders, so equal ids may be different parameters",
            "order  param_groups.0.params.0",
            "Pass --model and --optimizer.",
        ),
        (
            "doubtful-ids",
            "something in the file contradicts the parameters that its optimizer ids stand for",
            "order  param_groups.0.params.0",
            "Name the model that saved the file with --model, and the new one with --to-model.",
        ),
        ("no-state", "one side has no state for the parameter, or a part of it", "missing  state.0.exp_avg", _NOTHING),
        (
            "step-needs",
            "the next optimizer step needs it, but the saved state does not have it",
            "missing  state.0.exp_avg_sq",
            _SCRATCH,
        ),
        (
            "state-required",
            "a trainable parameter without state, which set_optimizer_state_dict refuses",
            "missing  state.head.weight",
            "Load the state with Optimizer.load_state_dict.",
        ),
        ("python-value", "a tensor on one side, a Python value on the other", "dtype  state.0.step", _NOTHING),
        (
            "optimizer-keys",
            "the two optimizers identify parameters in different forms: by id, by name, or in flat keys",
            "renamed  state",
            "`remap --optimizer-keys id` or `fqn`.",
        ),
    ),
    "note": (
        ("reader", "how the file was read, and what the reader found odd", "2 programs: a, b", _NOTHING),
        (
            "rank-part",
            "the file holds one rank's part of its tensors",
            "x.pt is the part of one rank",
            "Name the files of all ranks at once, as in 'rank_*.pt'.",
        ),
        (
            "unreadable",
            "torch.load fails for this file",
            "torch.load() of this version does not read it",
            "Run the printed `ckpttool remap`: it writes a file that torch loads.",
        ),
        (
            "dangerous-import",
            "a pickle imports something that runs code when it is loaded with weights_only=False",
            "1 dangerous import: os.system",
            "Do not load it with weights_only=False. ckpttool never executes it.",
        ),
        (
            "unknown-import",
            "a pickle imports something that ckpttool does not know",
            "my_module.Config",
            "If you trust it: `ckpttool check FILE --allow NAME`.",
        ),
        ("odd-values", "tensors with NaN, infinite values or only zeros", "2 tensors with NaN", "Check the training."),
        ("filter", "--filter hides some tensors", "only what 'head.*' names: 2 of 40 tensors", _NOTHING),
        (
            "not-compared",
            "something was not compared",
            "not compared: optimizer in left only",
            "Compare it by itself: `ckpttool diff LEFT::SECTION RIGHT::SECTION`.",
        ),
        (
            "other-sections",
            "other sections or entries differ; the exit status counts them only with --whole",
            "ema: 2 differences",
            "Run the printed command, or pass --whole.",
        ),
        ("compared-by", "parameters of optimizers are compared by id or position", "compared by id", "Pass --model."),
        (
            "hidden-segment",
            "keys differ by one segment, which a state_dict hook may hide",
            "2 keys in left without the segment `layer`",
            "Pass --model to know.",
        ),
        (
            "adapter",
            "only one side has an adapter (LoRA and the like)",
            "left is a LoRA adapter for 4 modules",
            "PEFT's merge_and_unload() merges it into its base model.",
        ),
        ("torch-error", "what torch says when it loads the file", "torch: Missing key(s)", "Fix what torch names."),
        ("assign", "only load_state_dict(..., assign=True) loads it", "assign=True loads it", "Pass assign=True."),
        ("converts", "loading converts dtypes", "loading converts 2 tensors", "--ignore-dtype allows it."),
        ("nothing-matched", "no tensor has a name of the model", "0 of 9 tensors matched", "Is it another model?"),
        (
            "key-depends-on-place",
            "the key of a tensor depends on the place of the module in a larger model",
            "as a part of another model: ...",
            "Pass the complete model, not a part of it.",
        ),
        (
            "pretrained-keys",
            "the keys are in the form of save_pretrained, which load_state_dict() does not accept",
            "the keys are in the form of save_pretrained",
            "Pass `--model hf:FOLDER` to compare with what from_pretrained loads.",
        ),
        (
            "fqn-modifiers",
            "torch.distributed.checkpoint raises an AttributeError for keys that hooks rename",
            "get_model_state_dict raises an AttributeError",
            "Give the module a method `_fqn_modifiers` (pytorch#146557).",
        ),
        ("roundtrip", "the model does not load what it saves", "head.scale is lost", "Fix the load hook."),
        ("model", "what running the model's code showed", "some keys depend on values", "Check the hooks it names."),
        ("old-keys", "whether the new code loads checkpoints with the old keys", "rejects the old keys", "Remap them."),
        (
            "optimizer-class",
            "the two optimizers are of different classes, and neither loads the other's state",
            "left is the state of SGD, right of AdamW",
            _SCRATCH,
        ),
        (
            "optimizer-order",
            "the order of parameters decides whose state torch loads",
            "the model that saved this file registers its parameters in another order",
            "Pass --optimizer to compare the state.",
        ),
        (
            "optimizer-names",
            "which parameters the optimizer state belongs to, and how ckpttool knows",
            "its ids are in the order of the model's parameters",
            "If it is wrong, name the model that saved the file.",
        ),
        ("no-optimizer-state", "some parameters have no state", "2 parameters without state", _NOTHING),
        ("manifest", "the files differ from the manifest's", "x.pt differs from the manifest's file", _NOTHING),
        (
            "same-shapes",
            "tensors that could be swapped without an error",
            "2 tensors of one shape",
            "Check the values.",
        ),
        ("same-name", "evidence of a likely rename: the names agree", "the same name below `net`", _NOTHING),
        ("evidence", "evidence of a likely rename", "the only ones of shape [3, 4]", "Check the values."),
        ("ignored", "an entry of --ignore matches nothing", "unused ignore entry: shape foo.*", "Remove it."),
        ("no-model", "names were not compared with a model's code", "none is named", "Pass --model."),
        ("remap", "what a remap left out, kept or changed besides names", "_metadata is left out", _NOTHING),
        (
            "companions",
            "other files of a folder, which may describe the old keys",
            "not copied: config.json",
            "Check the file that it names.",
        ),
        ("written", "what was written besides OUT", "names.json is unchanged", _NOTHING),
    ),
    "fix": (
        ("partial-fix", "the command fixes only some of the differences", "1 key is left", "See what is left."),
        (
            "inferred-fix",
            "the rules are inferred from names and shapes",
            "the suggested rules are inferred",
            "Check the values: names and shapes do not show whether they fit.",
        ),
        (
            "incomplete-rules",
            "the suggested rules leave some keys, dtypes or values as they are",
            "the suggested rules do not write 2 keys",
            "Add rules for these keys, or take them from another checkpoint.",
        ),
        ("drops-names", "--drop leaves out second names only", "--drop leaves out second names only", _NOTHING),
        ("program-names", "the program gets all of its weights, and keeps its names", "the program keeps", _NOTHING),
        ("not-read", "values without a counterpart were not compared", "were not compared", "Diff the output."),
        (
            "untried",
            "the command has a placeholder, so it was not tried",
            "not tried, because the result depends on MODEL",
            "Replace the placeholder (MODEL, CKPT, ...) before you run it.",
        ),
        ("no-fix", "no command fixes it", "no remap makes this state fit", _SCRATCH),
    ),
    "problem": (
        (
            "left_over",
            "a key or value that OUT, the model or the program has no place for",
            "x",
            "Pass --drop PATTERN.",
        ),
        ("unknown", "ckpttool cannot tell", "x", "Follow the hint."),
        ("other", "a problem that only its sentence describes", "x", "Follow the hint."),
        ("refused", "a command that would lose, collide or guess was refused (exit status 1)", "", "Follow the hint."),
        ("error", "no answer: wrong usage, or a file that cannot be read (exit status 2)", "", "Follow the hint."),
        ("invalid-file", "the file is not what it should be", "x.toml", "Follow the hint."),
    ),
}
CODES = {code: Row(code, kind, *rest) for kind, rows in _ROWS.items() for code, *rest in rows}


def row(code: str) -> Row:
    """Return the row of a code. Raises `CkptError` if there is none."""
    if code not in CODES:
        raise CkptError(f"unknown code {code!r}", hint=f"use one of {', '.join(CODES)}")
    return CODES[code]


def markdown() -> str:
    """Return the table of all codes as Markdown, for the documentation."""
    parts = []
    for kind, title in KINDS.items():
        rows = [
            f"| `{one.code}` | {one.meaning} | {f'`{one.example}`' if one.example else ''} | {one.fix} |"
            for one in CODES.values()
            if one.kind == kind
        ]
        parts.append(
            "\n".join([f"## {title}", "", "| code | meaning | example | what to do |", "| - | - | - | - |", *rows])
        )
    return "\n\n".join(parts) + "\n"
