# The project's commands. `make test` is the whole gate, and what CI runs (.ci/run).

include tests/setup/versions

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/guestlet
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
STEP := @tests/setup/step.sh
DEB := $(TARGET)/debian
# The same sources give the same packages. Only their making is told: the compiler would do all anew with each commit.
DATED := env SOURCE_DATE_EPOCH=$(or $(shell git log -1 --format=%ct 2> /dev/null),1)
VERSION := $(shell awk -F '"' '/^version = / { print $$2; exit }' Cargo.toml)

# Tests, the demo and the programs that they run are built once, by one profile (Cargo.toml).
GATE := --locked --profile gate
export GUESTLET_BIN_DIR := $(TARGET)/gate
export GUESTLET_DEB := $(TARGET)/gate-debian/guestlet_$(VERSION)-1_amd64.deb
# The package, optimized as it is released, for the tests of packages.
export GUESTLET_RELEASE_DEB := $(TARGET)/release-debian/guestlet_$(VERSION)-1_amd64.deb
# What they are compared with.
export QEMU_GA := $(CACHE)/tools/qemu-ga/usr/sbin/qemu-ga
export SSHD := $(CACHE)/tools/openssh-server/usr/sbin/sshd
# Databases whose snapshots they take.
export POSTGRESQL := $(CACHE)/tools/postgresql
export MARIADB := $(CACHE)/tools/mariadb
# What reads metrics, and what they are compared with.
export PROMETHEUS := $(CACHE)/tools/prometheus/usr/bin
# The cluster that they run in; its version is setup's.
export KUBERNETES_BIN_DIR := $(CACHE)/tools/kubernetes-$(KUBERNETES)
# A gRPC client that is what kubelet's is.
export GRPC_GO_CLIENT := $(CACHE)/tools/grpc-go/client

.DEFAULT_GOAL := help
.PHONY: help setup setup-packages lint clippy lint-alone unit-test kubevirt-test release package release-package gate-package static rpm \
	tarball image chart packages check-packages images restore-dependencies keep-dependencies vm-test vm-builds vm-tests side-by-side \
	beside-unit-test test peers soak fuzz dist demo demo-kubernetes pictures bench clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: ## install what building and testing need (as root, on Debian 12)
	$(STEP) "setup" tests/setup/install.sh test

lint: clippy lint-alone ## format, clippy for all programs together, each program alone, documentation

clippy:
	$(STEP) "format" cargo fmt --check
	$(STEP) "clippy" cargo clippy $(GATE) --all-targets -- -D warnings
	$(STEP) "clippy, tests with VMs" cargo clippy $(GATE) --test vm --test disk_layers --test images --test demo --test pictures --test kubevirt \
		--test kubernetes --test peers -- -D warnings

lint-alone:
	$(STEP) "agent alone" tests/setup/check.sh $(GATE) --no-default-features --features agent
	$(STEP) "host alone" tests/setup/check.sh $(GATE) --no-default-features --features host
	$(STEP) "ctl alone" tests/setup/check.sh $(GATE) --no-default-features --features ctl
	$(STEP) "ccm alone" tests/setup/check.sh $(GATE) --no-default-features --features ccm
	$(STEP) "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc $(GATE) --no-deps --quiet

unit-test: setup ## tests that need no VM
	$(STEP) "build tests" cargo test $(GATE) --quiet --no-run
	$(STEP) "tests without VMs" cargo test $(GATE) --quiet -- --test-threads 4

kubevirt-test: setup ## tests on a model of KubeVirt, with a real kube-apiserver; TESTS=name runs some
	$(STEP) "build tests on KubeVirt" cargo test $(GATE) --quiet --no-run --test kubevirt
	$(STEP) "tests on KubeVirt" cargo test $(GATE) --quiet --test kubevirt -- --test-threads 4 $(TESTS)

release: ## build the programs
	$(STEP) "release build" cargo build --locked --release

package: release ## build the packages guestlet and guestlet-host (target/debian)
	$(STEP) "package guestlet" $(CARGO_DEB_RUN) --variant agent --output $(DEB)
	$(STEP) "package guestlet-host" $(CARGO_DEB_RUN) --variant host --output $(DEB)

# The agent's package alone, optimized and packed as it is released. Not in target/debian: whatever makes a package of the same
# name removes it there. Compiling the other programs' parts only to drop them would take some minutes more.
release-package: setup
	$(STEP) "release build of the agent" cargo build --locked --release --no-default-features --features agent --bin guestlet
	$(STEP) "package guestlet, as released" $(CARGO_DEB_RUN) --variant agent --output $(dir $(GUESTLET_RELEASE_DEB))

# With the programs that the tests are built with: building any of these tests builds them. They are packed, and unpacked in
# emulated guests, in little time.
QUICKLY := --profile gate --compress-type gz --compress-system --fast
gate-package:
	$(STEP) "package guestlet" $(CARGO_DEB_RUN) $(QUICKLY) --variant agent --output $(dir $(GUESTLET_DEB))
	$(STEP) "package guestlet-host" $(CARGO_DEB_RUN) $(QUICKLY) --variant host --output $(dir $(GUESTLET_DEB))

# The static programs: what they are built for may be said, such as STATIC_TARGET=aarch64-unknown-linux-musl.
STATIC_TARGET ?= x86_64-unknown-linux-gnu
STATIC := $(TARGET)/static
DIST := $(TARGET)/dist
SBOM_TOOL := $(CACHE)/tools/cargo-cyclonedx-$(CARGO_CYCLONEDX)/bin/cargo-cyclonedx
GENERATE_RPM := $(DATED) $(CACHE)/tools/cargo-generate-rpm-$(CARGO_GENERATE_RPM)/bin/cargo-generate-rpm generate-rpm
# The programs name no folder of the machine that built them.
STATIC_FLAGS := -C target-feature=+crt-static --remap-path-prefix=$(CURDIR)=. \
	--remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo

static: ## build the programs without any library (target/static)
	$(STEP) "static build" env RUSTFLAGS="$(STATIC_FLAGS)" cargo build --locked --release --target $(STATIC_TARGET)
	@mkdir -p $(STATIC) && cd $(TARGET)/$(STATIC_TARGET)/release && cp guestlet guestlet-host guestctl guestlet-ccm $(STATIC)/

setup-packages:
	$(STEP) "setup" tests/setup/install.sh packages

rpm: setup-packages static ## build the rpms (target/dist)
	@mkdir -p $(DIST)
	$(STEP) "rpm guestlet" $(GENERATE_RPM) --variant agent --output $(DIST) $(RPM_ARCH)
	$(STEP) "rpm guestlet-host" $(GENERATE_RPM) --variant host --output $(DIST) $(RPM_ARCH)

RPM_ARCH := --arch $(firstword $(subst -, ,$(STATIC_TARGET)))

tarball: static ## build the tarball with the static programs (target/dist)
	@mkdir -p $(DIST)
	$(STEP) "tarball" $(DATED) packaging/tarball.sh $(STATIC) $(VERSION) $(STATIC_TARGET) $(DIST)/guestlet-$(VERSION)-$(STATIC_TARGET).tar.gz

image: static ## build the OCI image layouts of guestlet-host and guestlet-ccm (target/dist/guestlet-*-oci)
	@mkdir -p $(DIST)
	$(STEP) "OCI image" $(DATED) packaging/oci.sh $(STATIC) $(VERSION) $(DIST)/guestlet-host-oci guestlet-host guestctl
	$(STEP) "OCI image of guestlet-ccm" $(DATED) packaging/oci.sh $(STATIC) $(VERSION) $(DIST)/guestlet-ccm-oci guestlet-ccm

chart: ## make the Helm chart for KubeVirt and Harvester of its manifests (target/dist/guestlet-host-chart)
	@mkdir -p $(DIST)
	$(STEP) "Helm chart" packaging/kubernetes/chart.sh $(VERSION) $(DIST)/guestlet-host-chart

packages: setup-packages package rpm tarball image ## build all packages, what they are made of, and their checksums (target/dist)
	$(STEP) "SBOM" $(DATED) packaging/sbom.sh $(SBOM_TOOL) $(STATIC_TARGET) $(DIST)
	cp $(DEB)/*_$(VERSION)-1_*.deb $(DIST)/
	cd $(DIST) && sha256sum *.deb *.rpm *.tar.gz *.cdx.json > SHA256SUMS

dist: packages ## the same as packages

check-packages: packages ## check them: lintian, rpmlint, what rpm, dnf and cloud-init do (needs lintian, rpm, rpmlint, root, apt)
	$(STEP) "packages are sound" packaging/check.sh $(DIST) $(STATIC)

CARGO_DEB_RUN := $(DATED) $(CACHE)/tools/cargo-deb-$(CARGO_DEB)/bin/cargo-deb deb --locked --no-build --quiet

images: setup gate-package ## build and cache what the VMs boot
	$(STEP) "VM images" cargo test $(GATE) --quiet --test images

vm-test: restore-dependencies setup ## tests that need VMs; TESTS=name runs some
	@$(MAKE) --no-print-directory vm-builds
	@$(MAKE) --no-print-directory -j2 release-package images
	@$(MAKE) --no-print-directory vm-tests

vm-builds:
	$(STEP) "build tests with VMs" cargo test $(GATE) --quiet --no-run --test images --test vm --test disk_layers --test kubernetes

vm-tests:
	$(STEP) "tests with VMs" cargo test $(GATE) --quiet --test vm -- --test-threads 2 $(TESTS)
	$(STEP) "VMs of a Kubernetes cluster" cargo test $(GATE) --quiet --test kubernetes
	$(STEP) "VMs of a Kubernetes cluster, churn" cargo test $(GATE) --quiet --test kubernetes churn

# What fails fastest first. Tests without VMs mostly wait, and what compiles beside them uses one processor.
test: ## the whole gate: setup, lint, unit-test, kubevirt-test, packages, images, vm-test
	@tests/setup/step.sh "make test" $(MAKE) --no-print-directory restore-dependencies setup clippy vm-builds side-by-side vm-tests \
		keep-dependencies

side-by-side:
	$(STEP) "build tests" cargo test $(GATE) --quiet --no-run
	$(STEP) "build tests on KubeVirt" cargo test $(GATE) --quiet --no-run --test kubevirt
	@$(MAKE) --no-print-directory -j2 unit-test beside-unit-test

beside-unit-test:
	@$(MAKE) --no-print-directory release-package
	@$(MAKE) --no-print-directory images
	@$(MAKE) --no-print-directory lint-alone
	@$(MAKE) --no-print-directory kubevirt-test

restore-dependencies:
	@tests/setup/dependencies.sh restore $(TARGET) $(CACHE)

keep-dependencies:
	@tests/setup/dependencies.sh keep $(TARGET) $(CACHE)

# What they are is up to whoever has them: built of a tag, or unpacked of the packages of a release.
peers: ## run agent and host half with those of another release, in the directory GUESTLET_OTHER_BIN_DIR
	@test -n "$(GUESTLET_OTHER_BIN_DIR)" || { echo "GUESTLET_OTHER_BIN_DIR names no directory with guestlet, guestlet-host and guestctl \
	of another release" >&2; exit 2; }
	$(STEP) "build tests with another release" cargo test $(GATE) --quiet --no-run --test peers
	$(STEP) "tests with another release" cargo test $(GATE) --quiet --test peers -- --nocapture

# Churns for as long as it takes to find what is seldom wrong.
soak: export GUESTLET_SOAK := 1
soak: images ## the long churns
	$(STEP) "churns without VMs" cargo test $(GATE) --quiet --test monitors --test disks --test csi --test cluster -- churn \
		killed
	$(STEP) "1 GiB through programs and copies, interrupted" cargo test $(GATE) --quiet --test exec --test cp -- killed every_byte
	$(STEP) "50 snapshots of databases" cargo test $(GATE) --quiet --test applications -- acknowledged
	$(STEP) "1,000 guests and Prometheus" cargo test $(GATE) --quiet --test metrics -- many_guests
	$(STEP) "500 Services of Harvester" cargo test $(GATE) --quiet --test node -- many_services
	$(STEP) "churns with VMs" cargo test $(GATE) --quiet --test vm -- --test-threads 1 hotplug::addresses csi::volumes_come \
		power_loss churn::whatever
	$(STEP) "50 snapshots of a guest with databases" cargo test $(GATE) --quiet --test vm -- --nocapture databases
	$(STEP) "churn on Kubernetes" cargo test $(GATE) --quiet --test kubernetes churn

FUZZ_SECONDS ?= 60
FUZZ ?= $(basename $(notdir $(wildcard tests/fuzz/targets/*.rs)))
fuzz: ## fuzz each target for FUZZ_SECONDS, or those that FUZZ names (needs a nightly toolchain and cargo-fuzz)
	@cargo +nightly fuzz --version > /dev/null || { echo "make fuzz needs a nightly toolchain (rustup toolchain install nightly), a C++ \
	compiler, and cargo-fuzz (cargo install cargo-fuzz)" >&2; exit 2; }
	@for target in $(FUZZ); do tests/setup/step.sh "fuzz $$target" cargo +nightly fuzz run --fuzz-dir tests/fuzz $$target -- \
		-max_total_time=$(FUZZ_SECONDS) || exit; done

demo: restore-dependencies ## show it: a real guest, its agent and the host half (KEEP=1 leaves them up)
	@echo "The first time this takes some 12 minutes on two processors; what it builds is kept in $(CACHE)."
	$(STEP) "packages and tools (4 minutes, if none is there)" tests/setup/install.sh demo
	$(STEP) "programs (4 minutes, if nothing is compiled yet)" cargo test $(GATE) --quiet --test demo --no-run
	@$(MAKE) --no-print-directory gate-package keep-dependencies
	@cargo test $(GATE) --quiet --test demo

demo-kubernetes: restore-dependencies setup ## show VMs of a Kubernetes cluster and their volumes (KEEP=1 leaves them up)
	$(STEP) "programs" cargo test $(GATE) --quiet --test kubernetes --no-run
	@$(MAKE) --no-print-directory gate-package keep-dependencies
	@cargo test $(GATE) --quiet --test kubernetes

# What the demo says is real, and takes minutes: the file that DEMO_LOG names is drawn, if there is one.
pictures: export DEMO_LOG := $(or $(DEMO_LOG),$(TARGET)/demo.log)
pictures: ## draw the pictures of the documentation (docs/pictures; as root, DEMO_LOG=file with the output of make demo)
	@test -s "$(DEMO_LOG)" || { $(MAKE) --no-print-directory demo > "$(DEMO_LOG).part" && mv "$(DEMO_LOG).part" "$(DEMO_LOG)"; }
	$(STEP) "pictures" cargo test $(GATE) --quiet --test pictures

bench: export GUESTLET_BIN_DIR := $(TARGET)/release
bench: export GUESTLET_DEB := $(DEB)/guestlet_$(VERSION)-1_amd64.deb
bench: setup package ## measure the agent beside Debian's qemu-ga; BENCH=boot runs one
	$(STEP) "measurements" cargo bench --locked $(addprefix --bench ,$(BENCH))

clean: ## remove what was built; the cache of images and tools stays in $XDG_CACHE_HOME/guestlet
	cargo clean
