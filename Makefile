# Every command of the project. `make help` lists them.

CARGO ?= cargo
MODEL ?= smollm2-135m
PREFILL ?= 1
DECODE ?= 1
HTTP ?= 127.0.0.1:8000
DTYPE ?= bf16
RELEASE = $(or $(CARGO_TARGET_DIR),target)/release
SERVICES = -p baton -p router -p prefill-node -p decode-node

.DEFAULT_GOAL := help
.PHONY: help run build model test check fmt lint bench clean deps

help: ## This list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: build ## Fetch the model, build, start a cluster, stream one answer, keep serving (ONCE=1: stop then).
	test -e "$(MODEL)" || $(RELEASE)/baton model fetch $(MODEL)
	$(RELEASE)/baton up --model $(MODEL) --prefill $(PREFILL) --decode $(DECODE) \
		--http $(HTTP) --dtype $(DTYPE) --sample $(if $(ONCE),--once)

build: deps ## The four release binaries, in target/release.
	$(CARGO) build --release --locked $(SERVICES)

model: deps ## Fetch the model that the tests use.
	$(CARGO) run --quiet --locked -p baton -- model fetch smollm2-135m

test: deps ## Install what tests need and run all of them.
	deploy/test.sh

check: fmt lint test ## What a commit must pass.

fmt: ## Formatting, checked.
	$(CARGO) fmt --all --check

lint: ## Lints, warnings are errors.
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

bench: build ## Engine speed on this machine, as a table.
	test -e "$(MODEL)" || $(RELEASE)/baton model fetch $(MODEL)
	$(RELEASE)/baton bench engine --model $(MODEL)

deps: ## The C++ compiler (for ZeroMQ) and pip (for the model), by apt where they are missing.
	@deploy/deps.sh

clean: ## Remove everything that was built.
	$(CARGO) clean
