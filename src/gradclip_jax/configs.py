"""Configs that store the arguments of transformations as JSON or YAML."""

from ._config import AccumulationConfig, TransformConfig

__all__ = ["AccumulationConfig", "TransformConfig"]
