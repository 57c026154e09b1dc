"""`python -m memlens` is the same as `memlens`."""

import sys

from memlens.cli import main

sys.exit(main())
