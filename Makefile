# Everything is set up on first use: a Python with venv, a Rust toolchain and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Outside the checkout, so that a fresh clone does not build the dependencies again.
export CARGO_TARGET_DIR ?= $(HOME)/.cache/kvflash/target
# The package in place is built by `make dev` with the profile fast, which measurements need, too; by `make quick`, or by the
# first `make demo` or `make test`, with the profile dev, which compiles several times faster. What is built already stays.
DEV_PROFILE := $(if $(filter undefined,$(origin PROFILE)),fast,$(PROFILE))
PROFILE ?= $(or $(patsubst $(VENV)/.built-%,%,$(firstword $(wildcard $(VENV)/.built-*))),dev)
PYTEST_FLAGS ?=
# Incremental data makes a first build a quarter slower: it is kept only in a checkout where `make quick` was run.
export CARGO_INCREMENTAL ?= $(if $(wildcard $(VENV)/.incremental),1,0)
# Demo and tests start hundreds of processes, which would all compile the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-cluster test test-rust test-rust-alone lint lint-rust lint-python bench against policies settings site dev quick built capi wheel fuzz loom sanitize soak attack gamedays mutants clients peers audit clean
help:
	@echo "make demo | demo-cluster | test | lint | bench | against | policies | settings | site | dev | quick | capi | wheel | fuzz | loom | sanitize | soak | attack | gamedays | mutants | clients | peers | audit | clean"

$(VENV)/.ready:
	cargo fetch --quiet --locked & \
		$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet "maturin>=1.9,<2" "uv>=0.9" && wait
	@touch $@

# What installs the tools: uv takes a tenth of pip's time. INSTALLER= takes pip, with its settings.
INSTALLER ?= --uv

# The package in place (editable) with its tools; rebuilt when a Rust source or pyproject.toml changes.
RUST_SOURCES := $(shell find rust/src rust/core/src rust/publish/src rust/serve/src -name '*.rs' -o -name '*.json') \
	$(wildcard rust/*/Cargo.toml) Cargo.toml Cargo.lock pyproject.toml
BUILT := $(VENV)/.built-$(PROFILE)
$(BUILT): $(VENV)/.ready $(RUST_SOURCES)
	@echo "building the Rust core (some minutes the first time) ..."
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --quiet $(INSTALLER) --profile $(PROFILE) --extras dev
	@rm -f $(VENV)/.built-*
	@touch $@

built: $(BUILT)

dev:
	@$(MAKE) --no-print-directory built PROFILE=$(DEV_PROFILE)

quick: $(VENV)/.ready
	@touch $(VENV)/.incremental
	@$(MAKE) --no-print-directory built PROFILE=dev CARGO_INCREMENTAL=1

demo: built
	$(BIN)/python -m demo $(DEMO_FLAGS)

# Replicas on a real NATS and etcd: one worker and one frontend are killed and come back.
demo-cluster: built
	$(BIN)/python -m demo.cluster --tokenizer tests/vectors/tiny-llama $(DEMO_FLAGS)

# As maturin sets them: pyo3 is compiled again whenever they change.
PYO3 = PYO3_PYTHON=$(abspath $(BIN)/python) PYO3_BUILD_EXTENSION_MODULE=1 PYO3_ENVIRONMENT_SIGNATURE=$$($(BIN)/python -c \
	'import sys; print("%s-%d.%d-%dbit" % (sys.implementation.name, *sys.version_info[:2], sys.maxsize.bit_length() + 1))')
lint: built
	@$(MAKE) --no-print-directory -j2 lint-rust lint-python

lint-rust:
	cargo fmt --all --check
	$(PYO3) cargo clippy --quiet --locked --all-targets --features kvflash/python -- -D warnings
	$(CAPI) clippy --quiet --locked --package kvflash-capi -- -D warnings

# Last, tests that can't be imported are told; they are compiled then, which each process of pytest would do by itself.
lint-python:
	$(BIN)/ruff format --check python demo tests benches examples deploy
	$(BIN)/ruff check python demo tests benches examples deploy
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvflash._core
	@$(BIN)/python -m pytest --collect-only -qq > $(VENV)/.collected || { cat $(VENV)/.collected; exit 1; }

# The C library, $(CARGO_TARGET_DIR)/release/libkvflash.{so,a}; its header is capi/include/kvflash.h.
# libzmq is compiled into it, once, and without the warnings that its sources cause.
CAPI = CXXFLAGS="-w $(CXXFLAGS)" cargo
# Tests take the profile that they themselves are compiled with: CAPI_PROFILE=dev leaves it in debug/.
CAPI_PROFILE ?= release
capi:
	$(CAPI) build --quiet --profile $(CAPI_PROFILE) --locked --package kvflash-capi

# Several files side by side: tests mostly wait, for processes and for clocks. tests/conftest.py has the order.
TESTS = -n 7 --dist loadfile --no-loadscope-reorder --reruns 2 --reruns-delay 1
# With kvflash/python, although it tests nothing of it, cargo test takes the crates that were compiled for the wheel: pyo3
# switches on a feature of syn, on which nearly all of them depend.
# No job server: rustdoc would warn that it cannot reach it.
CARGO_TEST = env -u MAKEFLAGS -u MFLAGS cargo test --quiet --locked --features kvflash/python
test: lint
	$(MAKE) --no-print-directory capi CAPI_PROFILE=dev
	$(CARGO_TEST) --no-run
	@$(MAKE) --no-print-directory -j2 --output-sync test-rust-alone test-rust
	$(BIN)/python -m pytest $(or $(PYTEST_FLAGS),$(TESTS))

# These tests run one after the other: the second core has the others meanwhile.
test-rust-alone:
	$(CARGO_TEST) --test limits

test-rust:
	$(CARGO_TEST) -- --skip alone::

bench: dev
	$(BIN)/python -m pytest benches --benchmark-only $(PYTEST_FLAGS)
	$(BIN)/python -m pytest benches/test_index_gates.py $(PYTEST_FLAGS)
	PROFILE=fast $(BIN)/python -m pytest benches/test_policy_gates.py $(PYTEST_FLAGS)
	$(BIN)/python benches/state.py --dry

# Another commit and this one, built alike and measured in turns: ratios that must hold. Needs wrk and nginx.
BASE ?= 3912177
OTHER ?= HEAD
against: built
	$(BIN)/python benches/peers/against.py $(BASE) $(OTHER) $(AGAINST_FLAGS)

# The tables of docs/policies.md: the matrix of workloads and fleets, then every policy on one trace. TRACE= and
# AGENTS= play recorded conversations and coding agents; without them ones of the same shape are made. SEED= draws others.
POLICIES = cargo run --quiet --locked --profile fast --package kvflash-sim --
SEED ?= 1
policies:
	$(POLICIES) matrix --trace "$(abspath $(TRACE))" --agents "$(abspath $(AGENTS))" --seed $(SEED) \
		--write docs/policies.md --figures docs/policies.csv
	$(POLICIES) tables --trace "$(abspath $(TRACE))" --seed $(SEED) --write docs/policies.md

# The manuals' tables of flags, from the settings that the core declares; a test compares them.
settings: built
	$(BIN)/python tests/settings_tables.py

# The documentation as a site in dist/site; a link that leads nowhere, or a page that is in no menu, fails. In an
# environment of its own: mkdocs and what it needs are for nothing else.
$(VENV)/site/.ready:
	$(PYTHON) -m venv $(VENV)/site
	$(VENV)/site/bin/python -m pip install --quiet "mkdocs-material>=9.6,<10"
	@touch $@

site: $(VENV)/site/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/mkdocs build --strict

# With the licenses of what is linked into it; without the file maturin builds a wheel that lacks them.
wheel: $(VENV)/.ready
	$(PYTHON) deploy/third_party_licenses.py
	$(BIN)/maturin build --release --out dist

# What the fuzzer finds beside the corpus stays outside the checkout, for the next run.
fuzz: built
	KVFLASH_SCHEMA_EXAMPLES=$(or $(EXAMPLES),1000) $(BIN)/python -m pytest --timeout 0 \
		tests/feature/indexer/test_indexer_openapi.py tests/feature/decision/test_router_openapi.py
	cd fuzz && for target in decode_batch load_snapshot; do \
		found=$(CARGO_TARGET_DIR)/corpus/$$target; mkdir -p $$found && \
		CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 RUSTC_BOOTSTRAP=1 cargo fuzz run $$target \
			$$found corpus/$$target -- -max_total_time=$(or $(SECONDS),300) || exit 1; \
	done

# Every interleaving of the index's shared memory that few preemptions can bring about.
loom:
	cargo test --quiet --locked --package kvflash-loom

# What the compiler sees at run time of memory (address, leaks) and of races (thread), while the index is under stress.
# Its own target folders: all dependencies are compiled once more for each. The one test that is left out waits for
# ticks of a clock that come too seldom under the thread sanitizer.
SANITIZER_HOST = $(shell rustc -vV | sed -n 's/^host: //p')
sanitize:
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/sanitize/address \
		cargo test --quiet --locked --target $(SANITIZER_HOST) --test stress
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/sanitize/address \
		cargo test --quiet --locked --target $(SANITIZER_HOST) --test all snapshot::
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
		CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/sanitize/thread \
		TSAN_OPTIONS=suppressions=$(abspath rust/core/tests/thread_sanitizer.txt) KVFLASH_STRESS_SECONDS=4 \
		cargo test --quiet --locked --target $(SANITIZER_HOST) --test stress -- --skip predictions_run_out_beside_readers

soak: dev
	KVFLASH_SIM_SEEDS=10000 $(BIN)/python -m pytest tests/state/simulation -s --timeout 0
	KVFLASH_STRESS_SECONDS=30 cargo test --release --quiet --locked --test stress
	KVFLASH_MODEL_SEEDS=210 KVFLASH_MODEL_EVENTS=6000 cargo test --release --quiet --locked --test all model:: -- --nocapture
	KVFLASH_TOKEN_CASES=10000 cargo test --release --quiet --locked --test all text::cached_ids_are_the_ids
	KVFLASH_CHURN_BLOCKS=100000000 cargo test --release --quiet --locked --test limits churn -- --nocapture --test-threads=1
	KVFLASH_FUZZ_FRAMES=10000000 cargo test --release --quiet --locked --test all frames::
	KVFLASH_FLAPS=100 $(BIN)/python -m pytest tests/feature/retry/test_faults_discovery.py --timeout 0
	KVFLASH_CHAOS_SECONDS=600 $(BIN)/python -m pytest tests/feature/retry/test_chaos.py -s --timeout 0
	KVFLASH_SOAK_BLOCKS=100000000 KVFLASH_SOAK_SECONDS=600 $(BIN)/python -m pytest benches/soak -s --timeout 0

# Hostile clients of every kind at once beside honest ones, then a million requests that are nearly right; `make test`
# has each attack once. ATTACK_FLAGS="--seconds 30", REQUESTS=100000
attack: dev
	$(BIN)/python tests/attack/soak.py $(ATTACK_FLAGS)
	$(BIN)/python tests/attack/fuzz_requests.py --requests $(or $(REQUESTS),1000000)

# Processes that are killed, stopped and replaced under load: what was lost, and how long the others waited.
gamedays: dev
	$(BIN)/python tests/attack/gamedays.py $(DAYS_FLAGS)

# Breaks one rule of the request path after the other: each time a test must fail. NAMES= takes some of them.
mutants: built
	$(BIN)/python tests/mutants.py $(NAMES)

# LiteLLM, LangChain and the openai package of npm before two mockers; the first two have an environment of their own.
# When imported, LiteLLM asks the network for a list of models and prices: its own copy is the same in every run.
clients: export LITELLM_LOCAL_MODEL_COST_MAP = True
clients: built
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install --quiet "tomli>=2"
	$(VENV)/clients/bin/python -c 'import sys, tomli; project = tomli.load(sys.stdin.buffer)["project"]; \
		extras = project["optional-dependencies"]; tests = [one for one in extras["dev"] if one.startswith("pytest")]; \
		print(*project["dependencies"], *extras["clients"], *tests, sep="\n")' \
		< pyproject.toml > $(VENV)/clients/requirements.txt
	$(VENV)/clients/bin/python -m pip install --quiet --requirement $(VENV)/clients/requirements.txt
	# A client that cannot be imported would only be skipped.
	$(VENV)/clients/bin/python -W ignore -c "import langchain_openai, litellm"
	PYTHONPATH=$(abspath python) $(VENV)/clients/bin/python -m pytest tests/clients -W ignore $(PYTEST_FLAGS)

# Needs wrk and nginx; installs the other systems on first use.
peers: dev
	$(BIN)/python benches/peers/routers.py
	$(BIN)/python benches/peers/streams.py
	$(BIN)/python benches/peers/indexer.py
	$(BIN)/python benches/peers/index.py

# Advisories, licenses and sources of what is linked (deny.toml), and advisories for what is installed beside it.
# Needs `cargo install cargo-deny --locked`. pip-audit has an environment of its own, so that it audits nothing of itself;
# without --strict it succeeds when PyPI answers for none of the packages.
audit:
	cargo deny --locked --workspace check
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet "pip-audit>=2.10,<3" "tomli>=2"
	$(VENV)/audit/bin/python -c 'import sys, tomli; project = tomli.load(sys.stdin.buffer)["project"]; \
		print(*project["dependencies"], *sum(project["optional-dependencies"].values(), []), sep="\n")' \
		< pyproject.toml > $(VENV)/audit/requirements.txt
	$(VENV)/audit/bin/pip-audit --strict --requirement $(VENV)/audit/requirements.txt

clean:
	rm -rf $(VENV) dist
