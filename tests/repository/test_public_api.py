"""The public names: all registered and documented, and a wrong name gets a hint."""

import inspect
import re
import types
from collections import Counter

import pytest
from registry import TRANSFORMATIONS

import gradclip_jax as gcx
from files import ROOT
from public import CLASSES, FUNCTIONS, NAMESPACES


def test_every_public_transformation_is_registered():
    made = {
        name.split(".")[-1]
        for name, function in FUNCTIONS.items()
        if "GradientTransformation" in str(inspect.signature(function).return_annotation)
    }
    assert made == set(TRANSFORMATIONS)


@pytest.mark.parametrize("module", NAMESPACES, ids=lambda module: module.__name__)
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


def test_every_public_name_is_on_one_api_page_and_every_class_documented():
    listed = Counter(
        name
        for page in (ROOT / "docs/api").glob("*.md")
        for name in re.findall(r"^::: gradclip_jax\.(\S+)$", page.read_text(), re.MULTILINE)
    )
    assert listed == Counter([*FUNCTIONS, *CLASSES])
    assert all(map(inspect.getdoc, CLASSES.values()))


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
def test_a_name_of_another_library_leads_to_ours(theirs):
    with pytest.raises(AttributeError, match="`gcx[.]") as error:
        getattr(gcx, theirs)
    value = gcx
    for part in str(error.value).partition("`gcx.")[2].partition("`")[0].split("."):
        value = getattr(value, part)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("clip_by_globl_norm", "`gcx.clip_by_global_norm`"),
        ("AutoClip", "`gcx.autoclip`"),
        ("zscore", "`gcx.thresholds.zscore`"),
        ("nonfinite_leaves", "`gcx.diagnostics.nonfinite_leaves`"),
        ("xylophone", "help"),
        ("_nothing", "gradclip_jax"),
    ],
)
def test_a_wrong_name_gets_a_hint(name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(gcx, name)
    with pytest.raises(ImportError):
        exec(f"from gradclip_jax import {name}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_explains_every_parameter(name):
    text = inspect.getdoc(FUNCTIONS[name])
    assert text.splitlines()[0].endswith(".")
    for parameter in inspect.signature(FUNCTIONS[name]).parameters:
        assert f"\n    {parameter}: " in text or parameter == "extra_args", parameter
    # The site renders the text before a colon in the first line of Returns as a type.
    returns = text.partition("\nReturns:\n")[2].partition("\n\n")[0]
    assert not re.match(r"\s*\w+ [^:\n]*:\s", returns), returns
