// Error handling: every entry returns a code and keeps an error text per thread.
#pragma once

#include <cuda_runtime.h>

#include <exception>

#include "baton_kernels.h"

namespace baton {

// Keeps the text for baton_last_error and returns `code`.
int32_t fail(int32_t code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Returns 0, or BATON_CUDA + error with CUDA's error text.
int32_t check(cudaError_t error, const char* what);

// Called after a launch. Clears the error, so that the next call does not return it.
inline int32_t launched(const char* kernel) { return check(cudaGetLastError(), kernel); }

// Runs the body of an entry and converts exceptions to codes.
template <class Body>
int32_t guarded(Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return fail(BATON_EXCEPTION, "%s", error.what());
  } catch (...) {
    return fail(BATON_EXCEPTION, "an exception without a text");
  }
}

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

// Properties of the current device, cached.
struct Device {
  int sm_count;
  int major;
  int minor;
  int shared_bytes;  // maximum per CTA
};
int32_t current_device(Device& device);
// Returns the device of the first call (a process uses one device) without further CUDA calls, to keep launches fast.
int32_t any_device(const Device*& device);

}  // namespace baton

// Leaves the function with the code of a call that failed.
#define BATON_TRY(call)                          \
  do {                                           \
    const int32_t baton_try_code = (call);       \
    if (baton_try_code != 0) return baton_try_code; \
  } while (0)

// Leaves the function unless the condition holds; the rest is the text.
#define BATON_REQUIRE(condition, ...)                                \
  do {                                                               \
    if (!(condition)) return ::baton::fail(BATON_INVALID, __VA_ARGS__); \
  } while (0)
