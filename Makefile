# `make demo` and `make test` set everything up on a bare machine and are quick the second time.
# A python3 that already has PyTorch 2.11 or later is used as it is (GPU machines come so, and may
# be offline), with the small packages that it lacks beside it; otherwise .venv is made.
PYTHON ?= python3
PACKAGES := click rich numpy matplotlib pytest xdist hypothesis

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

.PHONY: setup lint test test-all models opdb demo bench gpu-test sanitize sanitize-host fuzz fuzz-networks fuzz-state clean

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
		names = {"xdist": "pytest-xdist"}; \
		print(*(names.get(n, n) for n in sys.argv[1:] if u.find_spec(n) is None))' $(PACKAGES)); \
	test -z "$$missing" || $(PYTHON) -m pip install -q --target .venv/borrowed $$missing || \
		echo "not installed (offline?): $$missing; what needs them will say so"
	@touch $@

lint: $(STAMP)
	@if $(PY) -m ruff --version >/dev/null 2>&1; then \
		$(PY) -m ruff check . && $(PY) -m ruff format --check .; \
	else echo 'ruff is not installed in this Python: lint skipped'; fi
	@if $(PY) -m mypy --version >/dev/null 2>&1; then $(PY) -m mypy; \
	else echo 'mypy is not installed in this Python: type check skipped'; fi
	@if $(PY) -c 'import clang_format' 2>/dev/null; then \
		find fusewright/kernels tests/support -name '*.cuh' -o -name '*.hpp' | \
		xargs env $(PY) -c 'import clang_format as c; c.clang_format()' --dry-run --Werror; \
	else echo 'clang-format is not installed in this Python: format of kernels not checked'; fi

# One process per core; an idle one takes tests from the others. Without pytest-xdist all tests run in
# one process. Lint runs beside them.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); test $$n -le 8 && echo $$n || echo 8)
TESTS = spread=$$($(PY) -c 'import xdist' 2>/dev/null && echo '-n $(WORKERS) --dist worksteal'); \
	$(PY) -m pytest -q $$spread
test: $(STAMP)
	@$(MAKE) --no-print-directory lint & lint=$$!; $(TESTS) -m 'not gpu and not slow'; \
	passed=$$?; wait $$lint && exit $$passed

# Real models of torchvision, timm and transformers: right, graphs, breaks, calls left, seconds.
models: $(STAMP)
	@version=$$($(PY) -c 'import torch; print(torch.__version__)'); \
	$(PY) -m pip install -q "torch==$$version" torchvision timm transformers
	$(PY) tools/models.py $(MODELS)

# Every operator and module of PyTorch's own test databases beside eager mode. For a GPU:
# make opdb OPDB='--device cuda'; other options: python tools/opdb.py --help.
opdb: $(STAMP)
	$(PY) tools/opdb.py $(OPDB)

# With all cases of the tests that `make test` runs a sample of (marked `sample`).
test-all: lint
	@$(TESTS) -m 'not gpu'

# With a GPU a matmul; without one a chain that is bound by memory, where fusion pays on a CPU too.
demo: $(STAMP)
	@problem=$$($(PY) -c 'import torch; print("gemm_add_relu" if torch.cuda.is_available() \
		else "blocks/gated_rms_norm")'); \
	$(PY) -m fusewright optimize examples/$$problem.py

# The four reference problems only, not examples/blocks. One record each goes to bench/latest/, all
# of them to bench/latest.json.
bench: $(STAMP)
	@rm -rf bench/problems && mkdir -p bench/problems && cp examples/*.py bench/problems
	$(PY) -m fusewright bench bench/problems --json bench/latest.json --html bench/latest.html $(BENCH_OPTIONS)

gpu-test: $(STAMP)
	$(PY) -m pytest -q -m gpu

# Needs a GPU. Without a sanitizer first, which builds the kernels; then each tool over all of them.
# initcheck watches our kernels alone, and knows what was copied to the device.
SANITIZE := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --print-limit 5
sanitize: $(STAMP)
	$(PY) -m tests.sanitize
	for tool in memcheck synccheck racecheck 'initcheck --kernel-name kns=fw'; do \
		$(SANITIZE) --tool $$tool $(PY) -m tests.sanitize; done

# Without a GPU: the tests' host kernels, and CUDA kernels in emulation, under AddressSanitizer. The
# first error ends a process. Compilers run without it; tests that need nvcc are skipped.
ASAN := env -u LD_PRELOAD g++ -fsanitize=address -fno-omit-frame-pointer -g1
SANITIZED ?= $(addprefix tests/,codegen kernels plan rewrite runtime compile emit ir test_regressions.py)
sanitize-host: $(STAMP)
	@rm -rf .pytest_cache/asan && mkdir -p .pytest_cache/asan
	@export CXX='$(ASAN)' ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/.pytest_cache/asan/report; \
	export LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)"; \
	$(TESTS) -m 'not gpu and not slow' $(SANITIZED); passed=$$?; unset LD_PRELOAD; \
	find .pytest_cache/asan -type f -exec cat {} + ; exit $$passed

fuzz: $(STAMP)
	$(PY) -m tests.fuzz --count 10000

# Networks on the kernels of an H200, in emulation.
fuzz-networks: $(STAMP)
	$(PY) -m tests.fuzz_networks --count 1000

# Random changes of what forward reads; a failure is printed as a small program.
fuzz-state: $(STAMP)
	$(PY) -m tests.fuzz_state --count 500

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f *_new.py examples/*_new.py examples/*/*_new.py
	find fusewright tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
