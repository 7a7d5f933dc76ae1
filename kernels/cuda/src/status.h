// How a failure reaches the caller: a code, and a text that waits in the thread.
#pragma once

#include <cuda_runtime.h>

#include <exception>

#include "baton_kernels.h"

namespace baton {

// Keeps the text for baton_last_error and returns `code`.
int32_t fail(int32_t code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// 0, or BATON_CUDA + error with CUDA's own words.
int32_t check(cudaError_t error, const char* what);

// To be called after a launch. Takes the error away, so that the next call is not blamed for it.
inline int32_t launched(const char* kernel) { return check(cudaGetLastError(), kernel); }

// Runs the body of an entry; exceptions end here.
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

// What the current device is; asked once and kept.
struct Device {
  int multiprocessors;
  int major;
  int minor;
  int shared_bytes;  // most that a block may have
};
int32_t current_device(Device& device);
// Of the device that the thread asked about first (a process serves with one): no call of CUDA's after that, for
// launches whose host time counts.
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
