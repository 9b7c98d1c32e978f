"""Report words that the project does not use in text that people read, each with the word to write
instead.

python .ci/words.py [PATH ...]     (default: the pages, and the strings and comments of the package)
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"anew": "again",
    r"mend(s|ed|ing)?": "fix",
    r"beside": "next to",
    r"in the (place|stead) of": "instead of",
    r"(is|are|was|were) to be": "must be, will be",
    r"(stand|stands|stood|lie|lies|lay) (in|under|at|on|between)": "is",
    r"(tell|tells|told) of": "report",
    r"(read|written|kept|taken|copied|moved) whole": "completely",
    r"whatever (it|they) (is|are)": "any",
    r"as (it|they) (is|are) called": "name the thing",
    r"who(m)?ever": "anybody who",
    r"simply|obviously|of course": "(nothing)",
    r"utili[sz]e(s|d)?": "use",
    r"in order to": "to",
    r"\w*(recogn|initial|serial|normal|organ|optim|material|general|quant|token|minim|maxim)is"
    r"(e[sd]?|ing|ation)": "-ize (American spelling)",
    r"(behavi|col|fav|neighb)our\w*|licences?|centre|artefacts?|labelled": "American spelling",
    r"hence|thereof|therein|whereof|wherein|whereby|hereby|thus": "so",
}
PATTERNS = {
    re.compile(rf"\b({words})\b", re.IGNORECASE): instead for words, instead in INSTEAD.items()
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that people read, with their numbers; code in them is left out."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(source.splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            if not fenced:
                yield number, _without_code(line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, _without_code(line)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _without_code(token.string)


def _without_code(line: str) -> str:
    return re.sub(r"`[^`]*`|\]\([^)]*\)|'\w+'|\w+ =", "", line)


def main(paths: list[Path]) -> int:
    files = [
        file
        for path in paths
        for file in ([path] if path.is_file() else sorted(path.rglob("*.[mp][dy]")))
    ]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]!r}: write {instead!r}: {line.strip()}"
        for file in files
        for number, line in texts(file)
        for pattern, instead in PATTERNS.items()
        if (match := pattern.search(line))
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    default = [
        *sorted(ROOT.glob("*.md")),
        ROOT / "docs",
        ROOT / "benchmarks" / "README.md",
        ROOT / "ckpttool",
    ]
    sys.exit(main([Path(path).resolve() for path in sys.argv[1:]] or default))
