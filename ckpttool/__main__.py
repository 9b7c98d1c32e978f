"""``python -m ckpttool``."""

import sys

from ckpttool.cli.app import process

sys.exit(process())
