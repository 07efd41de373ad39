"""The public names of the package, with the value of each."""

import inspect

import gradclip_jax as gcx

NAMESPACES = [gcx, *(getattr(gcx, x) for x in gcx.__all__ if inspect.ismodule(getattr(gcx, x)))]
NAMED = {
    f"{module.__name__}.{name}".removeprefix("gradclip_jax."): getattr(module, name)
    for module in NAMESPACES
    for name in module.__all__
}
FUNCTIONS = {name: value for name, value in NAMED.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in NAMED.items() if inspect.isclass(value)}
