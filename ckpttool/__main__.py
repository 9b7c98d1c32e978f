"""``python -m ckpttool``."""

import sys

from ckpttool.cli.app import main

sys.exit(main())
