# Two commands matter: `make demo` and `make test`. Each needs Python 3.11+ and nothing else;
# it makes .venv on its first run and installs again when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
# Added to pytest's own, so `make test PYTEST_ARGS='-n0 -k norm'` is one process, one name.
# With FULL_COMPILE=1 tests compile as users do, not as cheaply as they can: see tests/conftest.py.
PYTEST_ARGS ?=
# Only xdist is loaded: pytest compiles the whole package of each plugin anew, such as hypothesis.
PYTEST = PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(VENV)/bin/python -m pytest -p xdist.plugin -n logical \
	--maxprocesses=4 --dist loadgroup
DEMO_ARGS ?=

# The first of several interpreters that really runs. (A version manager may put a
# `python3.13` on the path that only says which versions it has.)
first_running = $(shell for p in $(1); do \
	"$$p" -c 'import ensurepip, venv' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
candidates = $(foreach v,$(1),python3.$(v) $(wildcard $(HOME)/.pyenv/versions/3.$(v).*/bin/python))

PYTHON_OLDEST ?= $(call first_running,$(call candidates,11 12 13))
PYTHON_NEWEST ?= $(call first_running,$(call candidates,14 13 12))
OLDEST_PINS := jax==0.7.0 jaxlib==0.7.0 optax==0.2.5
NIGHTLY_PINS := --pre --upgrade jax jaxlib git+https://github.com/google-deepmind/optax \
	--extra-index-url https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/gradclip_jax/_version.py)
# Empty until it is known; then the site links to it as well.
export REPOSITORY_URL ?= $(shell sed -n 's/^repository = "\(.*\)"/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-all test-oldest test-newest test-nightly test-compiled-tpu \
	test-compiled-cuda fuzz lint format bench gpu study bench-compiled notebooks docs docs-site wheel package \
	test-trainers test-their-own check-package check-release clean print-oldest print-newest

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed-examples  ## train on real text: no clipping, clipping, accumulation
	$(VENV)/bin/python examples/demo.py $(DEMO_ARGS)

test: $(VENV)/.installed-test  ## the suite with doctests and README, in a minute and a half
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-test  ## what is slow or rare: notebooks, processes, pages, large products
	$(PYTEST) -m slow --no-loadscope-reorder $(PYTEST_ARGS)  # the longest, of tests/integration, first

test-all: $(VENV)/.installed-test  ## both
	$(PYTEST) $(PYTEST_ARGS)

fuzz: $(VENV)/.installed-test  ## random programs against plain Python, until one fails or Ctrl-C
	FUZZ=1 $(VENV)/bin/python -m pytest -n0 -x tests/conformance/test_fuzz.py \
		tests/unit/per_example/test_random_losses.py $(PYTEST_ARGS)

test-oldest:  ## the suite on the oldest supported JAX and Optax, in .venv-oldest
	@test -n "$(PYTHON_OLDEST)" || \
		{ echo "No Python 3.11 to 3.13 found. Name one: make $@ PYTHON_OLDEST=/path/to/python"; exit 1; }
	$(MAKE) test VENV=.venv-oldest PYTHON="$(PYTHON_OLDEST)" PINS="$(OLDEST_PINS)"

test-newest:  ## the suite on the newest JAX of all, in .venv-newest
	@test -n "$(PYTHON_NEWEST)" || \
		{ echo "No Python 3.12+ found. Name one: make $@ PYTHON_NEWEST=/path/to/python"; exit 1; }
	$(MAKE) test VENV=.venv-newest PYTHON="$(PYTHON_NEWEST)" PINS="--upgrade jax jaxlib"

test-nightly:  ## the suite on the nightly builds of JAX and Optax, in .venv-nightly
	$(MAKE) test VENV=.venv-nightly PINS="$(NIGHTLY_PINS)"

lint: $(VENV)/.installed-dev  ## ruff, pyright, codespell
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/codespell

format: $(VENV)/.installed-dev  ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

BENCHMARKS = steps.times faults.guards faults.detect faults.streams per_example.speed
bench: $(VENV)/.installed-test  ## every benchmark that measures this machine
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(VENV)/bin/python -m benchmarks.$$name; done

# GPU_ARGS='--small --out build/gpu' tries it on a CPU.
GPU_ARGS ?=
gpu: $(VENV)/.installed-test  ## the GPU tests, then milliseconds of whole steps and workarounds, in 8 minutes
	$(VENV)/bin/python -m benchmarks.steps.gpu $(GPU_ARGS)

# Up to three hours on two cores; stopped, it goes on where it was. The page is made from what there is.
STUDY_ARGS ?=
study: $(VENV)/.installed-test  ## which clip, and is it worth it? Trains every method on every problem
	$(VENV)/bin/python -m benchmarks.study.study $(STUDY_ARGS)
	$(VENV)/bin/python -m benchmarks.study.report

# Training steps compiled for devices that are not there, each in an environment of its own: 1 GB
# for TPUs, 3 GB for CUDA. `make bench-compiled BENCH_ARGS='--only "PPO:skip_nonfinite"'` runs a part.
BENCH_ARGS ?=
COMPILED_PINS := jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
compiled_pytest = -m pytest -p no:cacheprovider --confcutdir=tests/integration/compiled tests/integration/compiled

bench-compiled: .venv-tpu/.compiled .venv-cuda/.compiled  ## whole steps, compiled for an H100 and TPUs
	JAX_PLATFORMS=cpu .venv-cuda/bin/python -m benchmarks.compiled.steps $(BENCH_ARGS)
	JAX_PLATFORMS=cpu .venv-tpu/bin/python -m benchmarks.compiled.steps $(BENCH_ARGS)

test-compiled-tpu: .venv-tpu/.compiled  ## what must hold of the programs on TPUs
	JAX_PLATFORMS=cpu .venv-tpu/bin/python $(compiled_pytest) $(PYTEST_ARGS)

test-compiled-cuda: .venv-cuda/.compiled  ## the same on an H100
	JAX_PLATFORMS=cpu .venv-cuda/bin/python $(compiled_pytest) $(PYTEST_ARGS)

.venv-tpu/.compiled: EXTRA = tpu
.venv-cuda/.compiled: EXTRA = cuda12
.venv-%/.compiled: pyproject.toml
	@test -x .venv-$*/bin/python || $(MAKE) VENV=.venv-$* .venv-$*/bin/python
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -e . pytest \
		'jax[$(EXTRA)]' $(COMPILED_PINS)
	@touch $@

# Other people's trainers, each in an environment of its own, on one and on eight devices. uv because
# pip needs more than ten minutes for the dependencies of some. levanter, Kauldron and MaxText need Python 3.12.
# EasyDeL needs PyTorch: with UV_TORCH_BACKEND=cpu uv takes the one for CPUs in place of 3 GB.
TRAINERS ?= numpyro keras nnx netket tunix levanter kauldron easydel maxtext
PYTHON_TRAINERS ?= $(call first_running,$(call candidates,12 13))
test-trainers: $(TRAINERS:%=test-trainer-%)  ## train inside other people's trainers; TRAINERS="numpyro keras" are two

test-trainer-%: .venv-trainer-%/.installed
	@set -e; for devices in 1 8; do echo "== $* on $$devices"; \
		TRAINER=$* JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=$$devices \
		.venv-trainer-$*/bin/python -m pytest -q -p no:cacheprovider --confcutdir=tests/integration/trainers \
		tests/integration/trainers/test_$*.py $(PYTEST_ARGS); done

# Their own tests of the parts that an adapter replaces, and those of peers, with one row of the table
# each. Archives on PyPI have no tests except Optax' wheel, so that a clone is needed: of GitHub, or of
# CLONES=/path, a folder with owner/name in it. A command, not in CI.
CLONES ?= https://github.com
THEIRS ?= tunix maxtext maxtext_accumulation levanter easydel kauldron axlearn \
	optax optax_accumulation optax_microbatch jax_privacy
# The commit is that of the table in docs/trainers/index.md.
CLONE_tunix := google/tunix
COMMIT_tunix := c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3
CLONE_maxtext := AI-Hypercomputer/maxtext
COMMIT_maxtext := e591f30cbbf217ed67ef71263ec0538239f9c3b8
CLONE_levanter := marin-community/levanter
COMMIT_levanter := 9263f81e8b453241332c2c0b2d2001bfb2d2241c
CLONE_easydel := erfanzar/EasyDeL
COMMIT_easydel := 090a03b2e0b3606bd38e0e3fcfdc640cd7e6e246
CLONE_kauldron := google-research/kauldron
COMMIT_kauldron := c9b3ec86316cdfcfadd3c79f9bce074ea6333c04
CLONE_axlearn := apple/axlearn
COMMIT_axlearn := 34aed43c1b6e581c4753d06d7cbeedd5010ef26b
CLONE_jax_privacy := google-deepmind/jax_privacy
PATH_tunix := .theirs/$(CLONE_tunix)
PATH_maxtext := .theirs/$(CLONE_maxtext)/src
PATH_levanter := .theirs/$(CLONE_levanter)/src
PATH_easydel := .theirs/$(CLONE_easydel)
PATH_kauldron := .theirs/$(CLONE_kauldron)
PATH_axlearn := .theirs/$(CLONE_axlearn)
test-their-own:  ## trainers' and peers' own tests through adapters; THEIRS="levanter optax" are two
	@mkdir -p build; rm -f build/their_own.md
	@for name in $(THEIRS); do $(MAKE) --no-print-directory test-their-own-$$name || { failed=1; \
		echo "| $$name | failed, see build/their_own_$$name.log |" >> build/their_own.md; }; done; \
		cat build/their_own.md; test -z "$$failed"

test-their-own-%: SUITE = $(if $(filter jax_privacy,$*),$*,$(firstword $(subst _, ,$*)))
test-their-own-%: PY = .venv-trainer-$(SUITE)/bin/python
test-their-own-%: CLONE = $(if $(CLONE_$(SUITE)),.theirs/$(CLONE_$(SUITE)))
test-their-own-%:
	@mkdir -p build
	$(MAKE) .venv-trainer-$(SUITE)/.installed
	@test jax_privacy != $* -o -d "$(CLONE)" || { mkdir -p $(CLONE) && \
		$(PY) -m pip download --quiet --no-deps --no-binary :all: -d build jax-privacy==2.0.0 && \
		tar -xzf build/jax_privacy-2.0.0.tar.gz --strip-components=1 -C $(CLONE); }
	@test -z "$(CLONE)" -o -d "$(CLONE)" || { git init --quiet $(CLONE) && \
		git -C $(CLONE) fetch --quiet --depth 1 $(CLONES)/$(CLONE_$(SUITE)) $(COMMIT_$(SUITE)) && \
		git -C $(CLONE) checkout --quiet FETCH_HEAD; } || { rm -rf $(CLONE); \
		echo "$(CLONES)/$(CLONE_$(SUITE)) has no commit $(COMMIT_$(SUITE)). Unpack it into $(CLONE)."; exit 1; }
	@set -e; folder="$(or $(CLONE),$$(cd build; ../$(PY) -c 'import optax; print(*optax.__path__)'))"; \
	for devices in 1 8; do echo "== $* on $$devices"; \
		JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=$$devices \
		PYTHONPATH=$(PATH_$(SUITE)) $(PY) tests/integration/trainers/their_tests.py $* "$$folder" \
		> build/their_own_$*.log || { tail -n 30 build/their_own_$*.log; exit 1; }; done
	@tail -n 1 build/their_own_$*.log | tee -a build/their_own.md

# As axlearn pins them, and what its modules import; the whole of its own list does not install together.
.venv-trainer-axlearn/.installed: REQUIRES = jax==0.8.3 tensorflow-cpu seqio-nightly attrs chex portpicker \
	toml prefixed nltk absl-py aqtp
.venv-trainer-optax/.installed: REQUIRES = 'optax>=0.2.8' flax absl-py
.venv-trainer-jax_privacy/.installed: REQUIRES = jax-privacy==2.0.0 dp-accounting chex absl-py
.venv-trainer-numpyro/.installed: REQUIRES = numpyro
.venv-trainer-keras/.installed: REQUIRES = keras
.venv-trainer-nnx/.installed: REQUIRES = flax orbax-checkpoint
.venv-trainer-netket/.installed: REQUIRES = netket
.venv-trainer-tunix/.installed: REQUIRES = google-tunix chex
.venv-trainer-levanter/.installed: REQUIRES = marin-levanter chex ray
.venv-trainer-kauldron/.installed: REQUIRES = kauldron
.venv-trainer-easydel/.installed: REQUIRES = easydel pillow torch
.venv-trainer-maxtext/.installed: REQUIRES = 'maxtext[tpu]'
.venv-trainer-%/.installed: pyproject.toml
	@test -n "$(PYTHON_TRAINERS)" || \
		{ echo "No Python 3.12 found. Name one: make $@ PYTHON_TRAINERS=/path/to/python"; exit 1; }
	$(PYTHON_TRAINERS) -m venv .venv-trainer-$*
	.venv-trainer-$*/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-trainer-$*/bin/uv pip install --quiet --python .venv-trainer-$*/bin/python \
		-e . pytest $(REQUIRES)
	@touch $@

notebooks: $(VENV)/.installed-test  ## execute every notebook and store its outputs in it
	STORE_OUTPUTS=1 $(PYTEST) tests/integration/test_notebooks.py -k runs $(PYTEST_ARGS)

docs: $(VENV)/.installed-test  ## run the code shown in README.md and docs/
	$(PYTEST) tests/repository/test_readme.py $(PYTEST_ARGS)

wheel: $(VENV)/.installed-test  ## build the wheel, install it in an empty environment, import it
	rm -rf dist .venv-wheel
	$(VENV)/bin/python -m build --wheel --no-isolation
	$(VENV)/bin/python -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	.venv-wheel/bin/python -I -c 'import gradclip_jax; print("imported", gradclip_jax.__file__)'

package: $(VENV)/.installed-release  ## what is uploaded: sdist, and the wheel built from it
	rm -rf dist
	$(VENV)/bin/python -m build
	$(VENV)/bin/twine check --strict dist/*

# Each archive in an empty environment of each Python: first with nothing but JAX and Optax for the
# README's example, then with what the demo needs. Nothing of the clone is on the path (-I).
PYTHONS ?= $(foreach v,11 12 13 14,$(call first_running,$(call candidates,$(v))))
pip_install = .venv-package/bin/python -m pip install --quiet --disable-pip-version-check
run_demo = import runpy, sys; sys.path.insert(0, "examples"); \
	sys.argv = ["demo.py", "--steps=6", "--batch-size=4", "-k=2", "--out=build/demo"]; \
	runpy.run_path("examples/demo.py", run_name="__main__")
check-package: package docs-site  ## a release, whole: both archives on every Python found, README, demo, site
	@mkdir -p build
	@sed -n '/^```python$$/,/^```$$/p' README.md | sed '/^```/d' > build/readme.py
	@test -n "$(PYTHONS)"
	@set -e; for python in $(PYTHONS); do for archive in dist/*.tar.gz dist/*.whl; do \
		echo "== $$($$python --version): $$archive"; \
		rm -rf .venv-package; $$python -m venv .venv-package; \
		$(pip_install) "$$archive"; .venv-package/bin/python -I build/readme.py; \
		$(pip_install) "gradclip_jax[examples] @ file://$(CURDIR)/$$archive"; \
		.venv-package/bin/python -I -c '$(run_demo)' > build/demo.log 2>&1 || { cat build/demo.log; exit 1; }; \
		.venv-package/bin/python -I -c \
			'import gradclip_jax as gcx; assert ".venv-package" in gcx.__file__, gcx.__file__'; \
	done; done

check-release:  ## refuse a TAG that is not the version, or has no dated changelog section
	@test "$(TAG)" = "v$(VERSION)" || \
		{ echo "The tag is '$(TAG)', the version is '$(VERSION)'. Tag it v$(VERSION)."; exit 1; }
	@grep -Eq '^## \[$(VERSION)\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$$' CHANGELOG.md || \
		{ echo "CHANGELOG.md has no line '## [$(VERSION)] - YYYY-MM-DD'. Add it."; exit 1; }
	@grep -q '^version: $(VERSION)$$' CITATION.cff || \
		{ echo "CITATION.cff has another version than $(VERSION). Change it."; exit 1; }

docs-site: $(VENV)/.installed-docs  ## build the documentation site in site/, offline; any warning fails
	$(VENV)/bin/python docs/render_notebooks.py docs/notebooks
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@test -s site/llms.txt -a -s site/api/clipping/index.md  # for language models
	@! grep -rlE --include="*.html" "(src|href)=\"(https?:)?//[^\"]*\.(js|css|woff2?)" site || \
		{ echo "These pages load something from elsewhere."; exit 1; }

clean:  ## remove environments, build outputs and caches
	rm -rf .venv .venv-* dist build site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

print-oldest:
	@echo $(PYTHON_OLDEST)

print-newest:
	@echo $(PYTHON_NEWEST)

# `dev` has all of `test`.
$(VENV)/.installed-%: pyproject.toml Makefile | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$*]' $(PINS)
	@touch $@ $(patsubst dev,$(VENV)/.installed-test,$(filter dev,$*))

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or later is needed; $(PYTHON) is not. Name one: make PYTHON=python3.12"; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
