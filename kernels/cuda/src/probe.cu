// For tests and benchmarks: delay, bandwidth probe.
#include <utility>

#include "device.cuh"

namespace baton {
namespace {

__global__ void delay_kernel(int64_t nanoseconds) {
  pdl_wait_and_release();
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < static_cast<uint64_t>(nanoseconds));
}

constexpr int READ_THREADS = 512;
constexpr int READ_UNROLL = 8;  // 16-byte loads that a thread has in flight

__device__ inline uint4 read_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// Each CTA reads pieces of 64 KiB with a stride of the grid.
__global__ void __launch_bounds__(READ_THREADS) read_kernel(const uint4* from, uint64_t count, uint32_t* sink) {
  pdl_wait_and_release();
  uint32_t mixed = 0;
  constexpr uint64_t piece = READ_THREADS * READ_UNROLL;
  for (uint64_t at = blockIdx.x * piece; at < count; at += gridDim.x * piece) {
    uint4 values[READ_UNROLL];
#pragma unroll
    for (int i = 0; i < READ_UNROLL; ++i) {
      const uint64_t index = at + i * READ_THREADS + threadIdx.x;
      values[i] = index < count ? read_once(from + index) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < READ_UNROLL; ++i) mixed ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  }
  mixed = __reduce_xor_sync(FULL, mixed);
  if (threadIdx.x % WARP == 0 && mixed) atomicXor(sink, mixed);
}

}  // namespace

int32_t load_probe() {
  BATON_TRY(load(delay_kernel));
  return load(read_kernel);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_delay(int64_t nanoseconds, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(nanoseconds >= 0 && nanoseconds <= 10'000'000'000ll,
                  "nanoseconds is %lld; expected 0 to 10 s", static_cast<long long>(nanoseconds));
    return launch("delay", delay_kernel, dim3(1), dim3(1), 0, as_stream(stream), nanoseconds);
  });
}

BATON_API int32_t baton_read_stream(const void* from, uint64_t bytes, uint32_t* sink, void* stream) {
  return guarded([&] {
    BATON_REQUIRE(bytes % 16 == 0, "bytes is %llu; expected multiples of 16",
                  static_cast<unsigned long long>(bytes));
    Device device;
    BATON_TRY(current_device(device));
    if (bytes == 0) return static_cast<int32_t>(BATON_OK);
    return launch("read stream", read_kernel, dim3(2 * device.sm_count), dim3(READ_THREADS), 0, as_stream(stream),
                  static_cast<const uint4*>(from), bytes / 16, sink);
  });
}
