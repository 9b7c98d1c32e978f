"""Bytes: paths and URLs, ranges that are read, pieces that are written. No format is known here."""
