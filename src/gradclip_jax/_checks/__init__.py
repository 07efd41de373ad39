"""Checks of hyperparameters when a transformation is built, and of pytrees at trace time.

| module | contents |
| --- | --- |
| `_format` | formatting of values and paths for messages and logs |
| `_values` | types of single values |
| `_options` | numbers and other options |
| `_functions` | functions and transformations, and calls of user-defined functions |
| `_arrays` | arrays and trees of arrays |
| `_optimizer_states` | optimizer states |
| `_param_trees` | updates beside parameters, and prefix trees |

Traced values are not checked.
"""
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from ._arrays import (
    check_array,
    check_arrays,
    check_concrete,
    check_dtype_kept,
    check_values,
    shapes_of,
)
from ._format import describe, distinct, leaf_name, leaf_path, listed, shortened
from ._functions import call_schedule, call_user, check_callable, check_transformation, is_factory
from ._optimizer_states import check_one_run, check_optimizer_state, check_state
from ._options import (
    check_axis,
    check_choice,
    check_count,
    check_decay,
    check_flag,
    check_length,
    check_number,
    check_ord,
    check_positions,
    check_static,
)
from ._param_trees import broadcast_prefix, check_params, check_same_structure, labels_of
from ._values import dtype_of, is_array_like, is_float0, is_scalar, is_traced
