"""What a shell offers after Tab: commands, options and their words, sections and keys of a file, functions of a model.

The shells ask ``ckpttool --complete SHELL WORD...`` (bash, whose words end at colons: the line itself). Files are read
as `inspect` reads them, and no code is run: what a model file defines is read off its text. Nothing is offered where
the shell's own names of files are what is wanted.
"""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpttool.cli.fields import Taken
from ckpttool.cli.output import write_text
from ckpttool.errors import CkptError
from ckpttool.options import Option

_BASH = """\
_ckpttool() {
    local IFS=$'\\n'
    COMPREPLY=($(ckpttool --complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *: ]] && compopt -o nospace
    return 0
}
complete -o default -F _ckpttool ckpttool
"""
_ZSH = """\
#compdef ckpttool
_ckpttool() {
    local -a lines names shown
    local line
    lines=("${(@f)$(ckpttool --complete zsh "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    for line in $lines; do
        names+=("${line%%$'\\t'*}")
        shown+=("${line/$'\\t'/  -- }")
    done
    if (( $#names )); then compadd -l -d shown -a -- names; else _files; fi
}
if [[ $funcstack[1] == _ckpttool ]]; then _ckpttool "$@"; else compdef _ckpttool ckpttool; fi
"""
_FISH = """\
function __ckpttool
    set -l found (ckpttool --complete fish (commandline -opc)[2..] (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c ckpttool -f -a '(__ckpttool)'
"""
_DATA, _CONFIG = ("XDG_DATA_HOME", ".local/share"), ("XDG_CONFIG_HOME", ".config")
# Shell -> its script, the folder that it looks into, the file's name there, and what is left to do.
_SHELLS: dict[str, tuple[str, tuple[str, str], str, str]] = {
    "bash": (
        _BASH,
        _DATA,
        "bash-completion/completions/ckpttool",
        "the package bash-completion finds it; without that, in ~/.bashrc: source {path}",
    ),
    "zsh": (_ZSH, _DATA, "zsh/site-functions/_ckpttool", "in ~/.zshrc, before compinit: fpath=({folder} $fpath)"),
    "fish": (_FISH, _CONFIG, "fish/completions/ckpttool.fish", "fish finds it there"),
}
Options = Callable[[str], Sequence[Taken]]


def run(args: Sequence[str], commands: Mapping[str, tuple[str, str]], options: Options) -> int:
    """``--show-completion [SHELL]``, ``--install-completion [SHELL]``, and what the scripts ask."""
    asked, *words = args
    if asked == "--complete":
        sys.stdout.writelines(f"{line}\n" for line in _answer(words, commands, options))
        return 0
    shell = words[0] if words else os.path.basename(os.environ.get("SHELL", ""))
    if shell not in _SHELLS:
        raise CkptError(f"no completion for {shell or 'an unnamed shell'}", hint=f"{asked} {'|'.join(_SHELLS)}")
    script, (variable, default), name, rest = _SHELLS[shell]
    if asked == "--show-completion":
        sys.stdout.write(script)
        return 0
    path = Path(os.environ.get(variable) or Path.home() / default, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(str(path), script, force=True)
    sys.stdout.write(f"{path}\n{rest.format(path=path, folder=path.parent)}\n")
    return 0


def _answer(words: Sequence[str], commands: Mapping[str, tuple[str, str]], options: Options) -> Iterator[str]:
    """The lines for a shell: what may stand in the place of the last word, with its help after a tab."""
    shell, *words = words or [""]
    if shell == "bash":
        words = _split(" ".join(words))[1:]
    last = words[-1] if words else ""
    found = (one for one in _candidates(words[:-1], last, commands, options) if one[0].startswith(last))
    for word, said in found:
        if shell == "bash":  # what it replaces begins behind the last colon or equals sign
            yield word[max(last.rfind(":"), last.rfind("=")) + 1 :]
        else:
            yield f"{word}\t{said}" if said else word


def _split(line: str) -> list[str]:
    """The words of an unfinished line; the last is empty behind a blank."""
    for closing in ("", "'", '"'):
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        return [*words, ""] if not closing and line[-1:].isspace() else words
    return line.split(" ")


def _candidates(
    before: Sequence[str], last: str, commands: Mapping[str, tuple[str, str]], options: Options
) -> Iterable[tuple[str, str]]:
    if not before or before[0] == "help":
        named = [(name, summary) for name, (_, summary) in commands.items()]
        return named if before else [*named, ("help", "Help of a command."), ("--help", ""), ("--version", "")]
    if before[0] not in commands:
        return []
    taken = options(before[0])
    flags = {flag: one for one in taken if isinstance(one.mark, Option) for flag in one.mark.flags}
    flag, equals, _ = last.partition("=")
    if equals and flag in flags:
        return ((f"{flag}={word}", said) for word, said in _values(flags[flag], last[len(flag) + 1 :], before, flags))
    if before[-1] in flags and flags[before[-1]].kind is not bool:
        return _values(flags[before[-1]], last, before, flags)
    if last.startswith("-"):
        return [*((flag, one.mark.help) for flag, one in flags.items()), ("--help", "")]
    arguments = [one for one in taken if not isinstance(one.mark, Option)]
    place = min(len(_operands(before, flags)), len(arguments) - 1)
    return _values(arguments[place], last, before, flags)


def _operands(before: Sequence[str], flags: Mapping[str, Taken]) -> list[str]:
    """What stands alone on the line, behind the command."""
    found, words = [], iter(before[1:])
    for word in words:
        if word in flags:
            if flags[word].kind is not bool:
                next(words, None)
        elif not word.startswith("-"):
            found.append(word)
    return found


def _values(one: Taken, last: str, before: Sequence[str], flags: Mapping[str, Taken]) -> Iterable[tuple[str, str]]:
    """What an option or an argument may be; nothing where it is a file."""
    metavar = one.mark.metavar or ""
    if metavar == "[NAME]":
        from ckpttool.schemas import OBJECTS

        words: Iterable[str] = OBJECTS
    elif metavar == "NAME" and before[0] == "explain":
        words = _names(before)
    elif one.name == "rules" and last:  # before that, a file of one's own is as likely
        from ckpttool.edits.rules.ready import LIST, sets

        words = [*sets(), LIST]
    elif metavar == "FORM":
        from ckpttool.naming.model_form import WORDS

        words = WORDS
    elif metavar in ("MODEL", "OPTIMIZER"):
        words = _definitions(last)
    elif metavar == "STATUS,...":
        words = _statuses(last)
    elif metavar in ("PATTERN", "PREFIX"):
        words = _keys(_operands(before, flags)[:1])
    elif "::" in last:
        words = _sections(last)
    else:
        words = metavar.split("|") if "|" in metavar and metavar.islower() else ()
    return ((word, "") for word in words)


def _definitions(last: str) -> Iterator[str]:
    """``file.py:build`` for each function and class of the file; nothing before the colon."""
    path, colon, _ = last.rpartition(":")
    if not colon or not path.endswith(".py") or not os.path.isfile(path):
        return
    for node in ast.parse(Path(path).read_bytes()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield f"{path}:{node.name}"


def _statuses(last: str) -> Iterator[str]:
    from ckpttool.queries.diff.result import STATUSES

    said, comma, _ = last.rpartition(",")
    return (f"{said}{comma}{status}" for status in STATUSES[1:])


def _sections(last: str) -> Iterator[str]:
    from ckpttool.formats.open import open_checkpoint

    path = last.rpartition("::")[0]
    if os.path.exists(path):
        yield from (f"{path}::{section.path}" for section in open_checkpoint(path).sections if section.path)


def _keys(operands: Sequence[str]) -> Iterator[str]:
    """The keys of the checkpoint on the line."""
    from ckpttool.operands.checkpoint import open_operand, split

    for operand in operands:
        if os.path.exists(split(operand)[0]):
            yield from dict.fromkeys(key for section in open_operand(operand).sections for key in section.by_key())


def _names(before: Sequence[str]) -> Iterator[str]:
    """Every name in the names file that the line names as --model."""
    from ckpttool.operands.names_file import is_names_file, read_names

    for word in before:
        path = word.removeprefix("--model=")
        if is_names_file(path):
            names = read_names(path)
            yield from dict.fromkeys([*(key.key for key in names.serialized), *(t.fqn for t in names.runtime)])
