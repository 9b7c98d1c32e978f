"""Read files and folders as a `Checkpoint`, and lay out a `Checkpoint` as pieces; each reader is
next to its writer.

A file is recognized by its content, a folder by its files, an output by its ending.
"""
