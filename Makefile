# Every target sets itself up: a machine with Python 3.10 or later, pip and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip would compile all modules one after the other; below, all cores compile most of them.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# Where torch brings none: its interpreter runs the kernels for GPUs in the tests.
TRITON := 3.6.0

.PHONY: demo test test-all test-torchrec test-libraries test-lightning gpu lint format docs release-check clean
.DEFAULT_GOAL := demo

demo: $(VENV)/compiled
	rm -rf outputs/demo
	$(BIN)/python experiments/demo.py --output outputs/demo

PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# What developers run: all but the tests that are marked slow, and 15 examples of each property. Four at a time on two
# cores, because ranks mostly wait for each other.
test: $(VENV)/compiled
	$(PYTEST) -n 4 -m 'not slow'

test-all: $(VENV)/compiled
	$(PYTEST) -n 4 --hypothesis-profile=all

# What runs beside the other tests, each in an environment of its own that sees the packages of the first one.
#
# TorchRec's own classes and models on a CPU; the other tests run a stand-in. TorchRec asks for fbgemm's build for CUDA,
# so that nothing may bring its dependencies.
PACKAGES_torchrec := --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyvers cloudpickle pyre-extensions \
	iopath typing-inspect mypy-extensions portalocker orjson importlib_metadata zipp
test-torchrec: .venv-torchrec/installed
	.venv-torchrec/bin/python -m pytest tests/embedding/test_torchrec.py

# Libraries that bring LightningModules of their own fit, save, load and predict under `ddp` and `dct`, on two ranks.
PACKAGES_libraries := chemprop==2.3.1 pytorch-forecasting==1.8.0 darts==0.48.1
test-libraries: .venv-libraries/installed
	.venv-libraries/bin/python tests/libraries/run_all.py

# Lightning's own tests of DDP, with DCT in its place; `LIGHTNING=folder` names a checkout that is there already.
PACKAGES_lightning := cloudpickle fastapi onnx onnxruntime onnxscript pytest-rerunfailures requests scikit-learn uvicorn
LIGHTNING ?= .venv-lightning/pytorch-lightning
test-lightning: .venv-lightning/installed $(LIGHTNING)/tests
	.venv-lightning/bin/python tests/reliability/lightning_suite.py $(LIGHTNING)

.venv-lightning/pytorch-lightning/tests: .venv-lightning/installed
	git clone --quiet --depth 1 https://github.com/Lightning-AI/pytorch-lightning $(@D) \
		--branch $$($(BIN)/python -c "import lightning; print(lightning.__version__)")

.venv-%/installed: $(VENV)/installed
	$(PYTHON) -m venv .venv-$*
	{ $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"; echo $(CURDIR)/src; } > \
		$$(.venv-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt \
		$(PACKAGES_$*)
	touch $@

# On a machine with one NVIDIA GPU or more.
gpu: $(VENV)/installed
	TESTS_ON=cuda $(BIN)/python tests/gpu_check.py

lint: $(VENV)/installed
	$(BIN)/ruff format --check src experiments examples tests docs/site
	$(BIN)/ruff check src experiments examples tests docs/site
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff format src experiments examples tests docs/site
	$(BIN)/ruff check --fix src experiments examples tests docs/site

# Warnings, dead links among them, are errors. Look at it with `python3 -m http.server -d site`.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds what would be published, and tries it where nothing else is installed. Wants the network.
release-check:
	$(PYTHON) tests/release_check.py

$(VENV)/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(MAKE) --no-print-directory $(VENV)/torch
	$(INSTALL) --constraint constraints.txt --editable '.[experiments,translation,fast,docs,dev]'
	$(BIN)/python -m compileall -q -j 0 -x 'transformers/models|/tests?/' $(VENV)/lib > /dev/null 2>&1 || true
	touch $@

# Where there is no NVIDIA GPU the CPU build of torch saves gigabytes: the one pip's own configuration offers, else
# the one from PyTorch's index, else (macOS) the ordinary build, which has no CUDA in it.
.PHONY: $(VENV)/torch
$(VENV)/torch:
	if command -v nvidia-smi > /dev/null || [ "$$(uname)" != Linux ]; then \
		$(INSTALL) 'torch==$(TORCH)'; \
	else \
		$(INSTALL) 'torch==$(TORCH)+cpu' 2> /dev/null \
		|| $(INSTALL) --index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH)'; \
		$(INSTALL) 'triton==$(TRITON)' || true; \
	fi

# Once, and not by each worker of pytest.
$(VENV)/compiled: $(VENV)/installed $(wildcard src/lightning_dct/kernels/numba_*.py)
	cd tests && ../$(BIN)/python -c 'import distributed.preloaded'
	touch $@

clean:
	rm -rf $(VENV) .venv-* outputs site multirun .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
