"""Kielo: from a language's raw text to its own language model. Start with train/loop.py, or
`kielo --help`.
"""

__version__ = "0.1.0"
