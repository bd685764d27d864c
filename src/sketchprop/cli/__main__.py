"""``python -m sketchprop.cli``: the same as the command ``sketchprop``."""

import sys

from . import main

sys.exit(main())
