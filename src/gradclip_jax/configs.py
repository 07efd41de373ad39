"""Configs: calls of this package as plain values, to be written to a file and read back.

A public namespace, `gcx.configs`.
"""

from ._config import AccumulationConfig, TransformConfig

__all__ = ["AccumulationConfig", "TransformConfig"]
