# `make demo` and `make test` set everything up on a bare machine and are quick the second time.
# A python3 that already has PyTorch 2.11 or later is used as it is (GPU machines come so, and may
# be offline), with the small packages that it lacks beside it; otherwise .venv is made.
PYTHON ?= python3
PACKAGES := click rich numpy matplotlib pytest hypothesis

HAS_TORCH := -c 'import importlib.metadata as m; v = m.version("torch").split("."); \
	assert (int(v[0]), int(v[1])) >= (2, 11)' 2>/dev/null
BORROWED := $(shell test ! -x .venv/bin/python && $(PYTHON) $(HAS_TORCH) && echo yes)

ifeq ($(BORROWED),yes)
PY := PYTHONPATH=.:.venv/borrowed $(PYTHON)
STAMP := .venv/borrowed/.stamp
else
PY := .venv/bin/python
STAMP := .venv/.stamp
endif

.PHONY: setup lint test demo bench gpu-test fuzz clean

setup: $(STAMP)
	@$(PY) -c 'import sys, torch; print("Python", sys.version.split()[0], "· PyTorch", torch.__version__)'

# torch comes first and by exact version: left to the package's open requirement, pip would take
# the newest one, with gigabytes of CUDA packages.
.venv/.stamp: pyproject.toml
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@.venv/bin/python $(HAS_TORCH) || .venv/bin/pip install torch==2.13.0
	.venv/bin/pip install -q -e '.[dev]'
	@touch $@

.venv/borrowed/.stamp: pyproject.toml
	@mkdir -p .venv/borrowed
	@missing=$$($(PY) -c 'import importlib.util as u, sys; \
		print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))' $(PACKAGES)); \
	test -z "$$missing" || $(PYTHON) -m pip install -q --target .venv/borrowed $$missing || \
		echo "not installed (offline?): $$missing; what needs them will say so"
	@touch $@

lint: $(STAMP)
	@if $(PY) -m ruff --version >/dev/null 2>&1; then \
		$(PY) -m ruff check . && $(PY) -m ruff format --check .; \
	else echo 'ruff is not installed in this Python: lint skipped'; fi
	@if $(PY) -m mypy --version >/dev/null 2>&1; then $(PY) -m mypy; \
	else echo 'mypy is not installed in this Python: type check skipped'; fi

# Two processes: kernels run by emulation, and compiled, on one core, everything else on the other.
KERNEL_TESTS := $(wildcard tests/test_*_kernel.py) tests/test_cuda_emulated.py \
	tests/test_cuda_sources.py tests/test_layouts.py \
	tests/test_product_text.py tests/test_reduced_window.py tests/test_transpose.py
PYTEST = $(PY) -m pytest -q -m 'not gpu and not slow'
test: lint
	@log=$$(mktemp) && trap 'rm -f "$$log"' EXIT; \
	$(PYTEST) $(KERNEL_TESTS) >"$$log" 2>&1 & kernels=$$!; \
	$(PYTEST) $(KERNEL_TESTS:%=--ignore=%); rest=$$?; \
	wait $$kernels; failed=$$?; echo 'kernels:'; cat "$$log"; \
	test $$rest -eq 0 && test $$failed -eq 0

demo: $(STAMP)
	$(PY) -m fusewright optimize examples/gemm_add_relu.py

# The four reference problems; their records are in bench/latest/, all of them in the file.
bench: $(STAMP)
	$(PY) -m fusewright bench examples --json bench/latest.json --html bench/latest.html $(BENCH_OPTIONS)

gpu-test: $(STAMP)
	$(PY) -m pytest -q -m gpu

fuzz: $(STAMP)
	$(PY) -m tests.fuzz --count 10000

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f *_new.py examples/*_new.py
	find fusewright tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
