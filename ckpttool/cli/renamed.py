"""Spellings of other tools and of earlier versions: each fails, and its hint is the command to run instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ckpttool.core.errors import CkptError
from ckpttool.core.options import call_text
from ckpttool.core.text import shell

Words = list[str]


def check(args: Sequence[str]) -> None:
    """Raise `CkptError` if the command line has an option that is written in another way."""
    for word in args:
        flag = word.partition("=")[0]
        for (command, option), rewritten in RENAMED.items():
            if flag == option and command in (args[0], "*"):
                hint = f"run it as {shell('ckpttool', *rewritten(list(args)))}"
                raise CkptError(f"no such option: {flag}", hint=hint)


def _taken(args: Words, flag: str) -> tuple[Words, Words]:
    """Return the values of an option, and the other words."""
    values, rest, words = [], [], iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
        else:
            values.append(value if equals else next(words, "..."))
    return values, rest


def _diff3(args: Words) -> Words:
    (base, *_), rest = _taken(args, "--base")
    return ["diff3", base, *rest[1:]]


def _convert(args: Words) -> Words:
    """A remap that is about the shards, or about all bytes of a file."""
    rest = [word for word in args if word not in ("--copy", "--compact")]
    return ["convert", *rest[1:]]


def _undo(args: Words) -> Words:
    return ["undo", *(word for word in args[1:] if word != "--undo")]


def _with_arguments(flag: str, option: str) -> Callable[[Words], Words]:
    """Return what moves the JSON of ``--model-kwargs`` into the operand of ``--model``."""

    def rewritten(args: Words) -> Words:
        texts, rest = _taken(args, flag)
        try:
            arguments = json.loads(texts[-1])
            return _replaced(rest, option, lambda operand: call_text(operand, arguments))
        except (ValueError, AttributeError):
            return [*rest, option, "file.py:build(layers=4)"]

    return rewritten


def _sizes(args: Words) -> Words:
    texts, rest = _taken(args, "--size")
    sizes = dict(text.partition("=")[::2] for text in texts)
    call = ", ".join(f"{name}={number}" for name, number in sizes.items())
    return _replaced(rest, "--rules", lambda rules: f"{rules}({call})")


def _ranks(args: Words) -> Words:
    """The arguments of the files of ranks: to write them, or to read them."""
    (sizes, rest), (units, _) = _taken(args, "--world-size"), _taken(args, "--units")
    _, rest = _taken(rest, "--units")
    arguments: dict[str, object] = {"world_size": int(sizes[-1])} if sizes and sizes[-1].isdecimal() else {}
    arguments |= {"units": units} if units else {}
    if not any(word.partition("=")[0] == "--to" and "fsdp" in "".join(rest) for word in rest):
        return [*rest, "--from", call_text("fsdp-flat", arguments)]
    return _replaced(rest, "--to", lambda form: call_text(form, arguments))


def _keep_prefix(args: Words) -> Words:
    prefix = (_taken(args, "--select")[0] or ["PREFIX"])[-1]
    return [*(word for word in args if word != "--keep-prefix"), "--rule", f"{{x*}} => {prefix}.{{x*}}"]


def _replaced(args: Words, flag: str, new: Callable[[str], str]) -> Words:
    """Return the words with another value for the option, or the operand of `trace`."""
    values, rest = _taken(args, flag)
    if not values and args[0] == "trace":
        return [args[0], new(args[1]), *args[2:]]
    return [*rest, flag, new((values or ["..."])[-1])]


# (command, option) -> the words of the new command line, from all words of the old one. "*": of any command.
RENAMED: dict[tuple[str, str], Callable[[Words], Words]] = {
    ("diff", "--base"): _diff3,
    ("*", "--model-kwargs"): _with_arguments("--model-kwargs", "--model"),
    ("remap", "--to-model-kwargs"): _with_arguments("--to-model-kwargs", "--to-model"),
    ("remap", "--size"): _sizes,
    ("remap", "--units"): _ranks,
    ("remap", "--world-size"): _ranks,
    ("remap", "--keep-prefix"): _keep_prefix,
    ("remap", "--plan"): lambda args: ["--rules" if word == "--plan" else word for word in args],
    ("remap", "--undo"): _undo,
    ("remap", "--copy"): _convert,
    ("remap", "--compact"): _convert,
    ("remap", "--max-shard-size"): _convert,
    ("remap", "--link"): lambda args: _taken(args, "--link")[1],
}
