// The library itself: versions, errors, loading.
#include <atomic>
#include <cstdarg>
#include <cstdio>

#include "collective.h"
#include "delta.h"
#include "device.cuh"
#include "experts.h"

#ifndef BATON_ARCHES
#define BATON_ARCHES "unknown"
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

// The sizes that the header promises.
static_assert(sizeof(baton_kv) == 40);
static_assert(sizeof(baton_sampling) == 64 && sizeof(baton_slot) == 16);
static_assert(sizeof(baton_plan_header) == 64 && sizeof(baton_plan_sequence) == 16);
static_assert(sizeof(baton_plan_admission) == 96 && sizeof(baton_plan_run) == 20);
static_assert(sizeof(baton_sample_result) == 32 && sizeof(baton_attention_plan) == 184);
// Each size is the sum of the fields, so the compiler adds no padding.
static_assert(sizeof(baton_sample_args) == 7 * 8 + 4 * 4);
static_assert(sizeof(baton_low_rank) == 72 && sizeof(baton_skinny_gemm_args) == 21 * 8 + 14 * 4 + 72);
static_assert(sizeof(baton_quantize_args) == 7 * 8 + 6 * 4);
static_assert(sizeof(baton_decode_attention_args) == 16 * 8 + 10 * 4);
static_assert(sizeof(baton_group) == 96 && sizeof(baton_all_reduce_args) == 56 && sizeof(baton_gather_args) == 80);
static_assert(sizeof(baton_route_args) == 13 * 8 + 12 * 4);
static_assert(sizeof(baton_expert_gemm_args) == 12 * 8 + 10 * 4);
static_assert(sizeof(baton_mxfp4_gemm_args) == 12 * 8 + 10 * 4);
static_assert(sizeof(baton_combine_args) == 11 * 8 + 6 * 4);
static_assert(sizeof(baton_delta_args) == 16 * 8 + 14 * 4);

namespace baton {

int32_t load_all_reduce();
int32_t load_delta();
int32_t load_digest();
int32_t load_expert_gemm();
int32_t load_gather();
int32_t load_int4_gemm();
int32_t load_low_rank();
int32_t load_mxfp4_gemm();
int32_t load_route();
int32_t load_tp_sample();
int32_t load_weights();

namespace {

thread_local char last_error[512];
std::atomic<bool> programmatic{false};

}  // namespace

int32_t fail(int32_t code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return code;
}

int32_t check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return BATON_OK;
  return fail(BATON_CUDA + error, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

bool is_programmatic() { return programmatic.load(std::memory_order_relaxed); }

int32_t current_device(Device& device) {
  // A device's properties never change, so each thread keeps those of its device. Only the current device is queried
  // at each call, which is cheap.
  static thread_local int known = -1;
  static thread_local Device kept;
  int index = 0;
  BATON_TRY(check(cudaGetDevice(&index), "the current device"));
  if (index != known) {
    auto ask = [&](cudaDeviceAttr attribute, int& value) {
      return check(cudaDeviceGetAttribute(&value, attribute, index), "a device attribute");
    };
    BATON_TRY(ask(cudaDevAttrMultiProcessorCount, kept.sm_count));
    BATON_TRY(ask(cudaDevAttrComputeCapabilityMajor, kept.major));
    BATON_TRY(ask(cudaDevAttrComputeCapabilityMinor, kept.minor));
    BATON_TRY(ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, kept.shared_bytes));
    known = index;
  }
  device = kept;
  return BATON_OK;
}

int32_t any_device(const Device*& device) {
  static thread_local Device kept;
  if (kept.sm_count == 0) BATON_TRY(current_device(kept));
  device = &kept;
  return BATON_OK;
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_abi_version(void) { return BATON_ABI_VERSION; }

BATON_API const char* baton_build_info(void) {
  return "abi " TEXT(BATON_ABI_VERSION) "; cuda " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__)
      "; arches " BATON_ARCHES "; flashinfer " BATON_FLASHINFER;
}

BATON_API const char* baton_last_error(void) { return last_error; }

BATON_API void baton_programmatic_launch(int32_t enabled) { programmatic = enabled != 0; }

BATON_API int32_t baton_initialise(void) {
  return guarded([] {
    Device device;
    BATON_TRY(current_device(device));
    for (auto part : {load_rows, load_quantize, load_rope, load_blocks, load_step, load_drafts, load_attention, load_decode_attention,
                      load_skinny_gemm, load_int4_gemm, load_low_rank, load_sample, load_probe, load_all_reduce, load_gather,
                      load_tp_sample, load_digest, load_weights, load_route, load_expert_gemm,
                      load_mxfp4_gemm, load_delta}) {
      const int32_t code = part();
      if (code == BATON_CUDA + cudaErrorNoKernelImageForDevice || code == BATON_CUDA + cudaErrorInvalidDeviceFunction) {
        return fail(BATON_UNSUPPORTED, "the kernel library holds code for %s; this device is sm_%d%d",
                    BATON_ARCHES, device.major, device.minor);
      }
      BATON_TRY(code);
    }
    return static_cast<int32_t>(BATON_OK);
  });
}

BATON_API int32_t baton_struct_sizes(uint32_t* sizes_host, int32_t capacity) {
  constexpr uint32_t sizes[] = {
      sizeof(baton_quantize_args),
      sizeof(baton_kv),
      sizeof(baton_rope_args),
      sizeof(baton_sampling),
      sizeof(baton_slot),
      sizeof(baton_pool),
      sizeof(baton_plan_header),
      sizeof(baton_plan_sequence),
      sizeof(baton_plan_admission),
      sizeof(baton_plan_run),
      sizeof(baton_step),
      sizeof(baton_attention_shape),
      sizeof(baton_attention_batch),
      sizeof(baton_attention_workspace),
      sizeof(baton_attention_plan),
      sizeof(baton_sample_result),
      sizeof(baton_token_logprob),
      sizeof(baton_sample_args),
      sizeof(baton_low_rank),
      sizeof(baton_skinny_gemm_args),
      sizeof(baton_decode_attention_args),
      sizeof(baton_group),
      sizeof(baton_all_reduce_args),
      sizeof(baton_gather_args),
      sizeof(baton_route_args),
      sizeof(baton_expert_gemm_args),
      sizeof(baton_mxfp4_gemm_args),
      sizeof(baton_combine_args),
      sizeof(baton_delta_args),
  };
  constexpr int32_t count = sizeof(sizes) / sizeof(sizes[0]);
  for (int32_t i = 0; sizes_host && i < count && i < capacity; ++i) sizes_host[i] = sizes[i];
  return count;
}
