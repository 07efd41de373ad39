"""Configs that represent calls of this package as plain values for JSON or YAML."""

from ._config import AccumulationConfig, TransformConfig

__all__ = ["AccumulationConfig", "TransformConfig"]
