"""Show the values of defaults such as `TWO` instead of their names on the API pages."""

import re
from pathlib import Path
from typing import Any

import griffe

TYPES = Path(__file__).parents[1] / "src" / "gradclip_jax" / "_types.py"
VALUE = re.compile(r"^(\w+): Final = (?:_Float|_Int|np\.dtype)\((.+?)\)", re.MULTILINE)
VALUES = dict(VALUE.findall(TYPES.read_text(encoding="utf-8")))


class PlainDefaults(griffe.Extension):
    """Named in mkdocs.yml."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            if str(parameter.default).isupper():
                parameter.default = VALUES.get(str(parameter.default), parameter.default)
