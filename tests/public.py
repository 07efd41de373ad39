"""The public names of the package, with the value of each."""

import inspect

import gradclip_jax as gcx

# A test deletes each annex.
MODULES = "diagnostics", "granularities", "per_example", "taps", "thresholds"
NAMESPACES = [gcx, *(getattr(gcx, name) for name in MODULES if hasattr(gcx, name))]
NAMED = {
    f"{module.__name__}.{name}".removeprefix("gradclip_jax."): value
    for module in NAMESPACES
    for name, value in vars(module).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
FUNCTIONS = {name: value for name, value in NAMED.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in NAMED.items() if inspect.isclass(value)}
