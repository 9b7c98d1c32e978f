"""Which tensors of two checkpoints are likely the same where no model is there to ask: keys and shapes in, pairs out.

Nothing here decides: every pair carries its evidence, what can be read in two ways is listed and never paired, and
`diff` shows both as suggestions. No torch, and no file: digests of values come in as a function, where they are wanted.
"""
