# Every target makes and uses its own virtual environment, `.venv`, from the first Python that is new enough; `make
# PYTHON=python3.12 test` builds it from that one. A demo needs less than the tests, so there are two stamp files; each is
# newer than what was installed from, so a change there installs again.

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHONS := python3 python3.13 python3.12 python3.11
PYTHON ?= $(or $(shell for each in $(PYTHONS); do $$each -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$each && break; done),python3)
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)
# A worker that has nothing left takes tests from the others: measured 50 s less than by whole files. Three on two cores,
# because many tests wait for processes of their own.
WORKERS := -n 3 --dist worksteal
# A test that hangs shows where, fails, and the others go on.
AT_MOST := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
QUIET := --quiet --disable-pip-version-check
PIP := $(BIN)/python -m pip $(QUIET)

# A test run starts hundreds of processes; without kept bytecode each of them compiles this package for half a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-tinker test-vllm test-verl test-ray test-cluster test-harness test-published test-web test-adapters test-browsergym test-tracking test-pretrained test-gguf check docs notebook pictures bench bench-report gpu learn learn-pretrained algorithms swe-tasks attack mutate lock clean

help:
	@echo 'make demo      train a pretrained model, in minutes, and show a conversation before and after'
	@echo 'make test      the tests'
	@echo 'make test-all  the tests, slow ones included'
	@echo 'make test-tinker  training by a Tinker service, a real one on this machine'
	@echo 'make test-verl  the tests with verl, in an environment of their own; ten minutes'
	@echo 'make test-vllm  training on vLLM servers, real ones on this machine, in an environment of their own'
	@echo 'make test-ray  the tests with Ray, in an environment of their own: clusters of two nodes on this machine'
	@echo 'make test-cluster  the three above: Ray, verl and Tinker'
	@echo 'make test-harness  command-line agents of others, installed from pip and npm and played in their sandbox'
	@echo 'make test-published  programs in the style of published rLLM, each as its users start it, with its framework'
	@echo 'make test-web  websites and `rllm view` in a real Chromium, which is installed where there is none'
	@echo 'make test-tracking  numbers to TensorBoard, Weights & Biases, MLflow and Trackio, offline, in their real packages'
	@echo 'make test-pretrained  every command with a real model of 135 M parameters, which is fetched once (100 MB); ten minutes'
	@echo 'make test-adapters  environments of other libraries, played by their real packages, in an environment of their own'
	@echo 'make test-browsergym  BrowserGym itself, in an environment of its own'
	@echo 'make test-gguf  models that are exported as GGUF, answered by llama.cpp, which is built: ten minutes'
	@echo 'make check     format, lint and types'
	@echo 'make docs      the pages of docs/ and the reference as a site in build/site'
	@echo 'make notebook  docs/tutorial.ipynb of docs/tutorial.md, executed'
	@echo 'make pictures  those of docs/view.md, of the first two runs in runs/ (RUNS=DIR), in a real Chromium'
	@echo 'make bench     the engine and a training step beside their peers'
	@echo 'make gpu       what this project has for a GPU, ten minutes; without one its code on the processor (GPU_PYTHON=python)'
	@echo 'make bench-report  draw the tables of what benchmarks kept in benchmarks/results'
	@echo 'make learn     every training block with the reported seeds, at most three hours; TASK=NAME for one'
	@echo 'make learn-pretrained  the tasks of examples/pretrained with SmolLM2-135M-Instruct, days of one core; TASK=NAME for one'
	@echo 'make algorithms  each algorithm and TRL on the same imitators, at most three hours'
	@echo 'make swe-tasks  200 software-engineering tasks made of ten published packages, in swe-tasks/ (TASKS=DIR)'
	@echo 'make attack    every tampering on a task of each of ten published packages (SEED=N draws others); twenty minutes'
	@echo 'make mutate    300 seeded mistakes in the rooms that decide what is learned: which does no test notice?'
	@echo 'make lock      resolve requirements/ anew, after a change of pyproject.toml or constraints.txt'
	@echo 'make clean     remove .venv and what the tools left behind; runs/ stays'

# Each demo is a new run. `make demo RUN=runs/demo-...` resumes one that was stopped. Two processes share the
# episodes and the updates; each computes with one thread, which torchrun says a warning about unless it is told.
demo: $(VENV)/.demo
	$(BIN)/rllm model pull smollm2-135m-instruct
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node $(if $(filter 1,$(shell getconf _NPROCESSORS_ONLN)),1,2) \
	examples/demo.py smollm2-135m-instruct $(RUN)
	$(BIN)/rllm runs show $(RUN)
	$(BIN)/rllm runs show $(RUN) --before-after

# Three tests at once on two cores now and then starve one that waits for a process of its own. What failed is run once
# more, alone, and the first that fails again ends it; those that then pass were named as failures above.
test: $(VENV)/.dev
	$(BIN)/pytest $(WORKERS) $(AT_MOST) || { echo 'Once more, alone, what failed above:'; \
	$(BIN)/pytest -n 0 $(AT_MOST) --last-failed --last-failed-no-failures none --maxfail 1; }

test-all: $(VENV)/.dev
	$(BIN)/pytest $(WORKERS) -m '' --hypothesis-profile thorough

# The client goes into .venv-tinker, the server, whose pins differ, into .venv-skyrl. The client has no call that closes
# its connections.
test-tinker: .venv-tinker/.made .venv-skyrl/.made
	.venv-tinker/bin/pytest -m '' -W ignore::pytest.PytestUnraisableExceptionWarning tests/tinker tests/integrations/test_tinker.py

# verl wants an older transformers than we do, so it has an environment of its own.
test-verl: .venv-verl/.made
	.venv-verl/bin/python -m pytest -m '' -o filterwarnings=default tests/verl tests/published/test_programs.py::test_a_composed_tree_is_taken_whole

test-ray: .venv-ray/.made
	.venv-ray/bin/python -m pytest -m '' -o filterwarnings=default tests/cluster tests/integrations/test_ray.py

# vLLM on the processor, in an environment of its own, which the tests start servers from. Its builds of torchvision and
# torchaudio do not fit this torch and are left out.
test-vllm: $(VENV)/.dev .venv-vllm/.made
	RLLM_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/pytest -n 0 -m '' tests/vllm

test-cluster: test-ray test-verl test-tinker

# What is installed stays in .harnesses. Node programs need `node` and `npm`, of the machine.
test-harness: $(VENV)/.dev
	HARNESS_HOME=$(CURDIR)/.harnesses $(BIN)/pytest -n 0 -m '' tests/harness

# 20 bugs of each; the sdists are fetched once, then no network is needed. A build that was stopped goes on.
SWE_SOURCES := itsdangerous==2.2.0 blinker==1.8.2 inflection==0.5.1 xmltodict==0.13.0 cachetools==5.5.0 semver==3.0.2 \
	pathspec==0.12.1 tabulate==0.8.10 toolz==1.0.0 tinydb==4.8.2
swe-tasks: $(VENV)/.dev
	$(BIN)/rllm dataset build swe $(addprefix pypi:,$(SWE_SOURCES)) --max-tasks 20 --workers 2 --out $(or $(TASKS),swe-tasks)

attack: $(VENV)/.dev
	$(BIN)/rllm dataset build swe $(addprefix pypi:,$(SWE_SOURCES)) --max-tasks 1 --seed $(or $(SEED),0) --workers 2 --out $(or $(TASKS),attack-tasks)
	$(BIN)/rllm doctor tasks $(or $(TASKS),attack-tasks)

# Hydra and five frameworks on top of .venv: three layers, since they want different releases of the same packages.
test-published: .venv-published-agents/.made .venv-published-strands/.made .venv-published-adk/.made
	.venv-published-agents/bin/python -m pytest -n 0 -m '' -o filterwarnings=default tests/published
	.venv-published-strands/bin/python -m pytest -n 0 -m '' -o filterwarnings=default tests/published/test_whole_programs.py -k strands
	.venv-published-adk/bin/python -m pytest -n 0 -m '' -o filterwarnings=default tests/published/test_whole_programs.py -k google_adk

# Without a Chromium on this machine Playwright's own is fetched; with RLLM_TEST_WEB what is missing is a failure.
# It pins another Playwright, so it has an environment of its own; the tests start its Python.
test-browsergym: $(VENV)/.dev .venv-browsergym/.made
	RLLM_BROWSERGYM_PYTHON=$(CURDIR)/.venv-browsergym/bin/python $(BIN)/pytest -n 0 -m '' tests/environments/web/test_browsergym.py

.venv-browsergym/.made:
	$(PYTHON) -m venv .venv-browsergym
	.venv-browsergym/bin/pip install -e . browsergym-miniwob miniwob psutil
	touch $@

test-web: $(VENV)/.dev
	$(BIN)/rllm doctor web || $(BIN)/playwright install --with-deps --only-shell chromium
	RLLM_TEST_WEB=1 $(BIN)/pytest -n 0 -m '' tests/environments/web tests/view

test-tracking: .venv-tracking/.made
	.venv-tracking/bin/python -m pytest -n 0 -m '' -o filterwarnings=default tests/tracking/test_sinks.py

# The model is kept in RLLM_TEST_HOME, by default ~/.cache/rllm-tests.
test-pretrained: $(VENV)/.dev
	$(BIN)/python -m pytest -n 0 -m '' tests/pretrained

# Their pins agree with each other and not with ours, so what is locked lies on top of .venv.
test-adapters: .venv-adapters/.made
	.venv-adapters/bin/python -m pytest -n 0 -m '' -o filterwarnings=default tests/adapters

# llama-cpp-python brings no wheel: it is compiled, in about ten minutes of one core.
test-gguf: .venv-gguf/.made
	.venv-gguf/bin/python -m pytest -n 0 -m '' -s tests/gguf

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# No page fetches anything from elsewhere; a dead link or a page without a place is an error.
notebook: $(VENV)/.dev
	$(BIN)/python site/notebook.py

RUNS ?= runs
pictures: $(VENV)/.dev
	$(BIN)/python site/screenshots.py $(RUNS)

docs: .venv-docs/.made
	NO_MKDOCS_2_WARNING=true .venv-docs/bin/mkdocs build --strict -f site/mkdocs.yml

bench: $(VENV)/.dev
	@set -e; for script in benchmarks/inference.py benchmarks/train_step.py; do echo "$(BIN)/python $$script"; $(BIN)/python "$$script"; done

# Tables of what benchmarks measured with --keep, by machine.
bench-report: $(VENV)/.dev
	$(BIN)/python benchmarks/report.py

# GPU_PYTHON is a Python that has torch for its card, this package and pytest; nothing is installed for it.
gpu: $(if $(GPU_PYTHON),,$(VENV)/.dev)
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu_all.py $(if $(filter 1,$(DRY)),--dry)

# What was measured is kept in runs/learning: the same command goes on. Other SEEDS than the reported ones, or
# SPLIT=validation, are for developing and leave the published figures alone.
learn: $(VENV)/.dev
	$(BIN)/python benchmarks/learning.py $(if $(TASK),--task $(TASK)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SPLIT),--split $(SPLIT)); \
	status=$$?; $(BIN)/python benchmarks/learning_tables.py && exit $$status

# One file a run in benchmarks/results/learn_pretrained: commit them as they come; the same command resumes. Two of the
# examples are written with a framework.
learn-pretrained: $(VENV)/.dev
	@$(PIP) install --upgrade pip
	@$(PIP) install --group examples-langgraph --group examples-openai-agents
	$(BIN)/python benchmarks/learn_pretrained.py $(if $(TASK),--task $(TASK)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SPLIT),--split $(SPLIT)); \
	status=$$?; $(BIN)/python benchmarks/learning_tables.py && exit $$status

# TRL goes into an environment of its own, .venv-trl, on first use.
algorithms: $(VENV)/.dev
	$(BIN)/python benchmarks/algorithm_curves.py; status=$$?; $(BIN)/python benchmarks/learning_tables.py && exit $$status

mutate: $(VENV)/.dev
	$(BIN)/python tests/mutate.py

lock:
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip --quiet --disable-pip-version-check install uv
	@.venv-lock/bin/uv pip compile --quiet --group skyrl --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-package torch -o requirements/skyrl.txt
	@for pair in train:demo dev:dev tinker:tinker ray:ray; do .venv-lock/bin/uv pip compile --quiet pyproject.toml --extra $${pair%:*} --group build --universal --python-version 3.11 --generate-hashes --no-annotate --no-header -c constraints.txt --no-emit-package torch -o requirements/$${pair#*:}.txt || exit 1; done
	@.venv-lock/bin/uv pip compile --quiet pyproject.toml --group build --group docs --universal --python-version 3.11 --generate-hashes --no-annotate --no-header -o requirements/docs.txt
	@.venv-lock/bin/uv pip compile --quiet pyproject.toml --extra verl --group build --group verl --python-platform linux --python-version 3.11 --generate-hashes --no-annotate --no-header -c requirements/verl.in --no-emit-package torch -o requirements/verl.txt
	@.venv-lock/bin/uv pip compile --quiet pyproject.toml --group published --group examples-langgraph --group examples-openai-agents --group examples-smolagents --python-platform linux --python-version 3.11 --generate-hashes --no-annotate --no-header -o requirements/published-agents.txt
	@.venv-lock/bin/uv pip compile --quiet pyproject.toml --group published --group examples-strands --python-platform linux --python-version 3.11 --generate-hashes --no-annotate --no-header -o requirements/published-strands.txt
	@.venv-lock/bin/uv pip compile --quiet pyproject.toml --group published --group examples-google-adk --python-platform linux --python-version 3.11 --generate-hashes --no-annotate --no-header -o requirements/published-adk.txt
	@.venv-lock/bin/uv pip compile --quiet --group adapters --python-platform linux --python-version 3.11 --generate-hashes --no-annotate --no-header -o requirements/adapters.txt
	@.venv-lock/bin/uv pip compile --quiet requirements/vllm.in --no-deps --python-version 3.11 --generate-hashes --no-annotate --no-header -o requirements/vllm.txt

clean:
	rm -rf $(VENV) .venv-adapters .venv-gguf .venv-published-* .venv-vllm .venv-tinker .venv-skyrl .venv-verl .venv-ray .venv-docs .harnesses build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed is locked: every file by its hash, nothing but what the lock names (--no-deps, no build isolation).
# torch goes in by its version alone: which of its builds (CPU, CUDA) is right is the machine's to say.
$(VENV)/.demo: pyproject.toml constraints.txt requirements/demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"$(PYTHON) is Python {sys.version.split()[0]}; rLLM needs 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo '[1/3] $(VENV): a virtual environment from $(PYTHON), with what requirements/demo.txt locks'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --require-hashes --no-deps -r requirements/demo.txt
	@echo '[2/3] $(TORCH) (the large one: a minute or two)'
	@$(PIP) install -c constraints.txt '$(TORCH)'
	@echo '[3/3] rllm itself, from this directory'
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

.venv-docs/.made: pyproject.toml requirements/docs.txt
	@echo '[docs] .venv-docs: the core, and what makes a site, as requirements/docs.txt locks it'
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/docs.txt
	@.venv-docs/bin/python -m pip $(QUIET) install --no-deps --no-build-isolation -e .
	@touch $@

.venv-tinker/.made: pyproject.toml constraints.txt requirements/tinker.txt
	@echo '[tinker] .venv-tinker: what the tests need, and the client, as requirements/tinker.txt locks it'
	@$(PYTHON) -m venv .venv-tinker
	@.venv-tinker/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/tinker.txt
	@.venv-tinker/bin/python -m pip $(QUIET) install -c constraints.txt '$(TORCH)' pytest pytest-asyncio hypothesis
	@.venv-tinker/bin/python -m pip $(QUIET) install --no-deps --no-build-isolation -e .
	@touch $@

.venv-skyrl/.made: requirements/skyrl.txt
	@echo '[tinker] .venv-skyrl: the server, as requirements/skyrl.txt locks it'
	@$(PYTHON) -m venv .venv-skyrl
	@.venv-skyrl/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/skyrl.txt
	@.venv-skyrl/bin/python -m pip $(QUIET) install '$(TORCH)'
	@touch $@

.venv-ray/.made: pyproject.toml constraints.txt requirements/ray.txt
	@echo '[ray] .venv-ray: Ray and what training needs, as requirements/ray.txt locks it'
	@$(PYTHON) -m venv --clear .venv-ray
	@.venv-ray/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/ray.txt
	@.venv-ray/bin/python -m pip $(QUIET) install -c constraints.txt '$(TORCH)' pytest pytest-asyncio hypothesis aiohttp jsonschema-rs llguidance orjson uvloop
	@.venv-ray/bin/python -m pip $(QUIET) install --no-deps --no-build-isolation -e .
	@touch $@

.venv-published-%/.made: $(VENV)/.dev requirements/published-%.txt
	@echo '[published] .venv-published-$*: Hydra and frameworks on top of $(VENV), as requirements/published-$*.txt locks it'
	@$(BIN)/python -m venv --clear .venv-published-$*
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > "$$(.venv-published-$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/under.pth"
	@.venv-published-$*/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/published-$*.txt
	@touch $@

.venv-tracking/.made: $(VENV)/.dev pyproject.toml
	@echo '[tracking] .venv-tracking: programs that take numbers, on top of $(VENV)'
	@$(BIN)/python -m venv --clear .venv-tracking
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > "$$(.venv-tracking/bin/python -c 'import site; print(site.getsitepackages()[0])')/under.pth"
	@.venv-tracking/bin/python -m pip $(QUIET) install -e '.[tensorboard,wandb,mlflow,trackio]'
	@touch $@

.venv-gguf/.made: $(VENV)/.dev
	@echo '[gguf] .venv-gguf: llama.cpp on top of $(VENV), compiled; ten minutes'
	@$(BIN)/python -m venv --clear .venv-gguf
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > "$$(.venv-gguf/bin/python -c 'import site; print(site.getsitepackages()[0])')/under.pth"
	@.venv-gguf/bin/python -m pip $(QUIET) install --no-deps llama-cpp-python==0.3.36 diskcache==5.6.3
	@touch $@

.venv-adapters/.made: $(VENV)/.dev requirements/adapters.txt
	@echo '[adapters] .venv-adapters: libraries of environments on top of $(VENV), as requirements/adapters.txt locks it'
	@$(BIN)/python -m venv --clear .venv-adapters
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > "$$(.venv-adapters/bin/python -c 'import site; print(site.getsitepackages()[0])')/under.pth"
	@.venv-adapters/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/adapters.txt
	@touch $@

.venv-verl/.made: pyproject.toml constraints.txt requirements/verl.txt
	@echo '[verl] .venv-verl: verl and what it needs, as requirements/verl.txt locks it; two gigabytes'
	@$(PYTHON) -m venv --clear .venv-verl
	@.venv-verl/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/verl.txt
	@.venv-verl/bin/python -m pip $(QUIET) install -c constraints.txt '$(TORCH)'
	@.venv-verl/bin/python -m pip $(QUIET) install --no-deps --no-build-isolation -e .
	@touch $@

.venv-vllm/.made: requirements/vllm.txt
	@echo '[vllm] .venv-vllm: vLLM for processors and what it needs, as requirements/vllm.txt locks it; three gigabytes'
	@$(PYTHON) -m venv --clear .venv-vllm
	@.venv-vllm/bin/python -m pip $(QUIET) install --require-hashes --no-deps -r requirements/vllm.txt
	@.venv-vllm/bin/python -m pip $(QUIET) install --no-deps '$(TORCH)'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo requirements/dev.txt
	@echo '[dev] what the tests need, as requirements/dev.txt locks it'
	@$(PIP) install --require-hashes --no-deps -r requirements/dev.txt
	@touch $@
