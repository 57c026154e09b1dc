"""memlens: the feed-forward layers of a transformer language model, read as key-value memories.

The public names are listed in `__all__`; they are imported when first used, so that `import memlens` costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"
