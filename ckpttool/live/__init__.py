"""Swaps in memory: new weights, submodules and attributes for live modules and programs, all or
nothing.
"""

from __future__ import annotations

from ckpttool.live.call_variants import swap_attribute, swap_module, variants
from ckpttool.live.swap import Swapped, swap_weights

__all__ = ["Swapped", "swap_attribute", "swap_module", "swap_weights", "variants"]
