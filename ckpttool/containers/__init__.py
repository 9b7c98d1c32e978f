"""What checkpoint files are made of: zip archives, pickles as trees of inert nodes, JSON.

Nothing here knows a format.
"""
