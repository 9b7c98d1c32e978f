"""A file or a folder becomes a `Checkpoint`, and a `Checkpoint` becomes pieces; reader beside writer.

A file is recognised by its content, a folder by its files, an output by its ending.
"""
