# Every command of the project. `make help` lists them.

CARGO ?= cargo
MODEL ?= smollm2-135m
PREFILL ?= 1
DECODE ?= 1
HTTP ?= 127.0.0.1:8000
GRPC ?= 127.0.0.1:8001
DTYPE ?= bf16
# The build profile: release, dist, or dev for a quick look.
PROFILE ?= release
TARGET = $(or $(CARGO_TARGET_DIR),target)
BIN = $(TARGET)/$(PROFILE:dev=debug)
CARGO_HOME ?= $(HOME)/.cargo
# The dist profile merges functions with equal code (rustc links with LLD there), omits the paths of the build
# machine, and packs relocations if this machine's C library reads packed ones (2.36 or newer). Such a program
# does not start with an older C library. PACK= disables the packing.
PACK ?= $(shell printf '2.36\n%s\n' "$$(getconf GNU_LIBC_VERSION 2>&- | tr -d 'a-z ')" | sort -VC \
	&& echo '"-Clink-arg=-Wl,-z,pack-relative-relocs",')
SHIPPED = --config 'target.x86_64-unknown-linux-gnu.rustflags=[$(PACK) "-Clink-arg=-Wl,--icf=all", \
	"--remap-path-prefix=$(CARGO_HOME)/registry/src/=", "--remap-path-prefix=$(abspath $(TARGET))=target"]'
SERVICES = -p baton -p router -p prefill-node -p decode-node

.DEFAULT_GOAL := help
.PHONY: help run build model test check fmt lint bench docs clean deps kernels test-gpu faults clients image image-gpu image-etcd dist k8s

help: ## This list.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: build ## Fetch the model, build, start a cluster, stream one answer, keep serving (ONCE=1: stop then).
	test -e "$(MODEL)" || $(BIN)/baton model fetch $(MODEL)
	$(BIN)/baton up --model $(MODEL) --prefill $(PREFILL) --decode $(DECODE) \
		--http $(HTTP) --grpc $(GRPC) --dtype $(DTYPE) --sample $(if $(ONCE),--once)

build: deps ## The four binaries, in target/release.
	$(CARGO) build --profile $(PROFILE) --locked $(if $(filter dist,$(PROFILE)),$(SHIPPED)) $(SERVICES)

model: deps ## Fetch the model that the tests use.
	$(CARGO) run --quiet --locked -p baton -- model fetch smollm2-135m

test: deps ## Install what tests need and run all of them.
	deploy/test.sh

check: fmt lint test ## What a commit must pass.

fmt: ## Formatting, checked.
	$(CARGO) fmt --all --check

lint: ## Lints (warnings are errors), and words that have a standard term.
	deploy/terms.sh
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

clients: build ## Install pinned clients and run one task of each (CLIENTS="codex ai-sdk": only these).
	$(BIN)/baton model fetch smollm2-135m >/dev/null
	integration-tests/clients/run.py $(BIN) $(CLIENTS)

bench: build ## Engine speed on this machine, as a table.
	test -e "$(MODEL)" || $(BIN)/baton model fetch $(MODEL)
	$(BIN)/baton bench engine --model $(MODEL)

docs: model ## Regenerate the lists of settings, metrics and chart values, the dashboards, and the values' schema.
	$(CARGO) build --locked --workspace --bins
	BATON_WRITE_DOCS=1 $(CARGO) test --locked -p telemetry --test telemetry metrics_page
	BATON_WRITE_DOCS=1 $(CARGO) test --locked -p integration-tests --test docs
	BATON_WRITE_DOCS=1 $(CARGO) test --locked -p router --lib the_page_lists_every_field_of_another_server
	deploy/dashboards.py helm/baton/files/dashboards
	deploy/chart-tools.sh
	deploy/chart-schema.py $(TARGET)/chart/python $(TARGET)/debug >helm/baton/values.schema.json.tmp
	mv helm/baton/values.schema.json.tmp helm/baton/values.schema.json
	deploy/chart-schema.py $(TARGET)/chart/python $(TARGET)/debug --page >docs/chart-values.md.tmp
	mv docs/chart-values.md.tmp docs/chart-values.md

kernels: ## The CUDA kernels, in target/kernels (no CUDA toolkit needed; BATON_CUDA_ARCHS="80 89 90a" for more).
	@deploy/kernels.sh
	@mkdir -p $(BIN) && ln -sf ../kernels/libbaton_kernels.so $(BIN)/

test-gpu: ## Build the tests of the CUDA kernels, where there is cargo, and run them, where there is a GPU.
	@deploy/test-gpu.sh

faults: deps model ## Long tables of recovery: links cut, processes stopped, nodes killed (root; over an hour).
	$(CARGO) build --locked --workspace --bins
	BATON_FAULTS=links,stops,kills $(CARGO) test --locked -p integration-tests --test faults -- --nocapture

image: build ## The image of Baton for CPUs, as an OCI archive in target/image (BATON_IMAGE=NAME:TAG).
	BATON_BIN=$(BIN) deploy/image.sh cpu

image-gpu: build kernels ## The image with the CUDA kernels, cuBLASLt, NCCL and RDMA libraries.
	BATON_BIN=$(BIN) deploy/image.sh gpu

image-etcd: ## An image of etcd for the Helm chart.
	deploy/image.sh etcd

k8s: ## A shell in a Kubernetes cluster of one node that exists only for this shell (root, Go; no Docker).
	@deploy/k8s/tools.sh
	@deploy/k8s/cluster.py

.PHONY: test-k8s
test-k8s: ## Install the Helm chart in such a cluster, or in that of KUBECONFIG (with BATON_K8S_LOAD), and test it under load.
	$(if $(KUBECONFIG),@deploy/k8s/existing.py --check)
	$(MAKE) image image-etcd
	$(BIN)/baton model fetch smollm2-135m
	@$(if $(KUBECONFIG),deploy/chart-tools.sh,deploy/k8s/tools.sh)
	BATON_BIN=$(BIN) deploy/k8s/$(if $(KUBECONFIG),existing,cluster).py deploy/k8s/test.py

# Zig links against the C library of Debian 11, whatever this machine has, and the C++ library statically.
dist: PROFILE = dist
dist: deps kernels ## A tarball and a Python wheel of the binaries and CUDA kernels, in target/dist (PROFILE=release: faster to build, larger).
	python3 -m pip install --quiet --disable-pip-version-check --upgrade --target $(TARGET)/zig \
		'ziglang==0.17.1' 'cargo-zigbuild==0.24.0'
	PATH=$(abspath $(TARGET)/zig/bin):$$PATH PYTHONPATH=$(abspath $(TARGET)/zig) $(CARGO) zigbuild --profile $(PROFILE) \
		--target x86_64-unknown-linux-gnu.2.31 --locked $(SERVICES)
	BATON_BIN=$(TARGET)/x86_64-unknown-linux-gnu/$(PROFILE:dev=debug) deploy/dist.sh

deps: ## The C++ compiler (for ZeroMQ) and pip (for the model), by apt where they are missing.
	@deploy/deps.sh

clean: ## Remove everything that was built.
	$(CARGO) clean
