"""Exported programs and compiled packages: `.pt2`, a layout for each range of torch versions."""
