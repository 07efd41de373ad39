"""Checks of hyperparameters when a transformation is built, and of pytrees at trace time.

| module | contents |
| --- | --- |
| `_options` | hyperparameters, when a transformation is built |
| `_trees` | arrays, optimizer states, updates and parameters, at trace time |
| `_values` | types of single values |
| `_format` | formatting of values and paths for messages and logs |

Traced values are not checked.
"""
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from ._format import describe, distinct, leaf_name, leaf_path, listed, shortened
from ._options import (
    call_schedule,
    call_user,
    check_axis,
    check_callable,
    check_choice,
    check_count,
    check_decay,
    check_flag,
    check_length,
    check_number,
    check_ord,
    check_positions,
    check_rule_name,
    check_static,
    check_transformation,
    is_factory,
)
from ._trees import (
    broadcast_prefix,
    check_array,
    check_arrays,
    check_concrete,
    check_dtype_kept,
    check_one_run,
    check_optimizer_state,
    check_params,
    check_same_structure,
    check_state,
    check_values,
    labels_of,
    shapes_of,
)
from ._values import dtype_of, is_array_like, is_float0, is_scalar, is_traced
