"""The public names: all registered, documented, listed by `help`, and nothing else in `__init__`."""

import ast
import inspect
import pydoc
import re
import types
from pathlib import Path

import pytest
from registry import TRANSFORMATIONS

import gradclip_jax as gcx

NAMESPACES = [
    gcx,
    gcx.configs,
    gcx.contrib,
    gcx.diagnostics,
    gcx.granularities,
    gcx.per_example,
    gcx.taps,
    gcx.thresholds,
]
NAMES = list(gcx.__all__)
named = {name: getattr(gcx, name) for name in NAMES}
named |= {f"diagnostics.{name}": getattr(gcx.diagnostics, name) for name in gcx.diagnostics.__all__}
named |= {f"contrib.{name}": getattr(gcx.contrib, name) for name in gcx.contrib.__all__}
named |= {f"per_example.{name}": getattr(gcx.per_example, name) for name in gcx.per_example.__all__}
named |= {f"taps.{name}": getattr(gcx.taps, name) for name in gcx.taps.__all__}
FUNCTIONS = [name for name, value in named.items() if inspect.isfunction(value)]
CLASSES = [name for name, value in named.items() if inspect.isclass(value)]
each_namespace = pytest.mark.parametrize("module", NAMESPACES, ids=lambda module: module.__name__)


def _returns_transformation(function):
    return "GradientTransformation" in str(inspect.signature(function).return_annotation)


def test_every_public_transformation_is_registered():
    made = {name for name in FUNCTIONS if _returns_transformation(named[name])}
    assert {name.split(".")[-1] for name in made} == set(TRANSFORMATIONS)


def test_init_is_a_table_of_contents():
    docstring, *body = ast.parse(Path(gcx.__file__).read_text()).body
    assert isinstance(docstring, ast.Expr)
    body = [y for x in body for y in (x.body if isinstance(x, ast.If) else [x])]
    assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in body)


def test_the_docstring_names_everything_once():
    words = re.findall(r"`(\w+)`", gcx.__doc__)
    assert sorted(words) == sorted(NAMES)


@each_namespace
def test_all_is_what_is_public(module):
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        # The folders of the package are there because they were imported.
        and not (isinstance(value, types.ModuleType) and value not in NAMESPACES)
    }
    assert set(module.__all__) - {"__version__"} == public
    assert len(set(module.__all__)) == len(module.__all__)


@each_namespace
def test_help_lists_what_is_public(module):
    text = pydoc.plain(pydoc.render_doc(module))
    functions = [n for n in module.__all__ if callable(getattr(module, n))]
    assert [name for name in functions if name not in text] == []


# In Optax, PyTorch, Lightning, Flax, Haiku, JMP and Keras.
ELSEWHERE = """
MultiSteps MultiStepsState accumulate accumulate_grad_batches gradient_accumulation_steps
adaptive_gradient_clip agc unitwise_clip apply_updates clipvalue max_grad_norm global_clipnorm
clipnorm clip_grad_norm_ clip_gradients clip_grads clip_grads_with_norm_ clip_grad_value_
GradScaler DynamicLossScale DynamicScale LossScaleOptimizer tree_l2_norm tree_norm
get_total_norm microbatch per_example_global_norm_clip per_example_layer_norm_clip
differentially_private_aggregate monitor snapshot skip_large_updates apply_if_finite
conditionally_mask conditionally_transform skip_not_finite zero_nans
"""


@pytest.mark.parametrize("theirs", ELSEWHERE.split())
def test_a_name_that_others_have_is_explained(theirs):
    assert theirs not in NAMES
    with pytest.raises(AttributeError) as error:
        getattr(gcx, theirs)
    message, _, rest = str(error.value).partition(f"got {theirs!r}. It is called `gcx.")
    assert message == "gradclip_jax: `name` must be one of its public names, "
    here, _, end = rest.partition("`")
    assert end == " here."
    value = gcx
    for part in here.split("."):
        value = getattr(value, part)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("clip_by_globl_norm", "Did you mean `gcx.clip_by_global_norm`"),
        ("AutoClip", "Did you mean `gcx.autoclip`"),
        ("zscore", "It is called `gcx.thresholds.zscore` here."),
        ("nonfinite_leaves", "It is called `gcx.diagnostics.nonfinite_leaves` here."),
        ("AccumulationConfig", "It is called `gcx.configs.AccumulationConfig` here."),
        ("xylophone", "`help(gradclip_jax)` lists them."),
    ],
)
def test_a_wrong_name_gets_a_hint(name, hint):
    with pytest.raises(AttributeError, match=re.escape(hint)):
        getattr(gcx, name)
    with pytest.raises(ImportError):
        exec(f"from gradclip_jax import {name}")


def test_private_names_are_missing_in_the_words_of_python():
    with pytest.raises(AttributeError, match="module 'gradclip_jax' has no attribute '_nothing'"):
        _ = gcx._nothing
    assert not hasattr(gcx, "__wrapped__")


def test_help_begins_with_the_table_of_contents():
    text = pydoc.plain(pydoc.render_doc(gcx))
    assert text.index("Clips: `clip_by_global_norm`") < 600


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_its_sections(name):
    function = named[name]
    text = inspect.getdoc(function)
    assert text.splitlines()[0].endswith(".")
    parameters = [p for p in inspect.signature(function).parameters if p != "extra_args"]
    sections = ["Returns:", "Examples:", *(["Args:"] if parameters else [])]
    sections.append("Raises:")
    for section in sections:
        assert section in text, f"{name} has no {section}"
    arguments = text.split("Args:")[1].split("Returns:")[0]
    for parameter in parameters:
        assert f"{parameter}: " in arguments, f"{name} does not explain {parameter}"
    assert "\n    >>> " in text.split("Examples:")[1], f"{name} shows nothing that runs"
    assert "Examples:" not in text.partition("References:")[2], f"{name} cites before it shows"


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_documented(name):
    assert inspect.getdoc(named[name])


@pytest.mark.parametrize("name", gcx.thresholds.__all__)
def test_rules_are_documented(name):
    text = inspect.getdoc(getattr(gcx.thresholds, name))
    assert "Args:" in text or "Attributes:" in text
    assert "Examples:" in text, f"{name} has no Examples:"
