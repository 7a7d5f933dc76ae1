//! The CUDA backend against the CPU's, on a GPU. One program without needs, for GPU machines often have
//! no toolchain: `make test-gpu` builds it, and what it reads is named by variables.
//!
//! | variable | what |
//! | --- | --- |
//! | `BATON_TEST_KERNELS` | the kernel library |
//! | `BATON_TEST_NCCL` | NCCL; what the system's loader finds |
//! | `BATON_TEST_MODEL`, `BATON_TEST_GOLDEN` | SmolLM2 as GGUF and its golden tokens |
//! | `BATON_TEST_REFERENCE` | the folder that `gpu/transformers_reference.py` wrote on this GPU |
//! | `BATON_TEST_BINARIES` | the folder of `baton` and the services, for tests of whole clusters |
//! | `BATON_TEST_CLUSTERS` | `cpu`: those run on CPUs, and fewer of them |
//! | `BATON_TEST_MIXES` | how many random mixes of requests are run; 200 |
//! | `BATON_TEST_TRANSFERS` | how many transfers are ended at random, by each carrier; 400 |
//! | `BATON_TEST_SOAK_SECONDS` | how long ranks sum while KV goes over; 5 |
//! | `BATON_TEST_SHORT` | `1`: few rounds, for a run under compute-sanitizer |
//! | `BATON_TEST_GPU` | `1`: a missing GPU or kernel library is a failure, not skipped |
//!
//! Without a GPU every test says that it is skipped, and why, and passes; so do those of several GPUs
//! where there are fewer.

mod gpu {
    mod attention;
    pub mod bench;
    mod clusters;
    mod collective;
    mod digest;
    mod executor;
    mod fault;
    mod graphs;
    mod links;
    mod load;
    mod mixes;
    mod model;
    mod moves;
    mod nccl;
    mod nodes;
    mod processes;
    pub mod ranks;
    mod reference;
    mod rows;
    mod sampling;
    mod soak;
    mod start;
    pub mod tp;
}
