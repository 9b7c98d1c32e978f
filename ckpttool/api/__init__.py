"""The front door: the verbs of the command line as functions, with the same words.

Wherever the command line takes CKPT, these take its text, a `Checkpoint`, or a state dict in memory; wherever it takes
MODEL, its text, a `Names`, or an object: a module, a class, a factory, an exported program. Options are the fields of
the options' dataclass, those of the command in Python's spelling (``to``, ``from_``, ``optimizer_keys``); ``diff_by``
and the like take them as a value. `import ckpttool` has the verbs; what one needs the others do not load.
"""
