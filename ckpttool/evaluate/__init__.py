"""An expression becomes an entry: moved without torch where it can be, computed with torch where it
must be.
"""
