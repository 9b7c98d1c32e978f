"""Regular expressions of the user's (``re:``), matched for a limited time.

Python's own matcher can be stopped by a signal only, in the main thread. The `regex` package has its syntax and its
answers, and a time limit in every thread.
"""

from __future__ import annotations

import re
from functools import lru_cache
from time import thread_time
from typing import Any

from ckpttool.errors import CkptError
from ckpttool.limits import limits, spent

# A brace that repeats nothing: literal for Python, a fuzzy match for `regex`.
_BRACE = re.compile(r"\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)
_POSIX = re.compile(r"\[\[:\^?\w+:\]")


class Regex:
    """One expression. Its matches have one time limit in each call of the program."""

    def __init__(self, text: str) -> None:
        """Raise `re.error` and OverflowError if Python does not take the expression."""
        import regex  # takes 20 ms

        if _POSIX.search(text):
            raise re.error("Python has no classes such as [[:alpha:]]")
        re.compile(text)
        self.text = text
        self.pattern = regex.compile(_BRACE.sub(lambda found: r"\{" if found[0] == "{" else found[0], text), regex.V0)

    def fullmatch(self, key: str) -> Any:
        """Return the match, or None. Raise `CkptError` if all matches of this call take longer than the limit."""
        left = limits().rules_seconds - spent.get(self.text, 0.0)
        start = thread_time()
        try:
            if left > 0:
                return self.pattern.fullmatch(key, timeout=left)
        except TimeoutError:
            pass
        finally:
            spent[self.text] = spent.get(self.text, 0.0) + thread_time() - start
        raise CkptError(
            f"the regular expression {self.text!r:.200} takes too long: {limits().named('rules_seconds')}",
            hint="do not repeat a group that repeats something itself, as in (a+)+",
        )


@lru_cache(maxsize=1000)
def compiled(text: str) -> Regex:
    """Return the expression. Raise ValueError, in words, if it is not one."""
    try:
        return Regex(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
