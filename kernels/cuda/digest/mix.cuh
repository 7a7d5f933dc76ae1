// Terms of a digest: kernels/src/digest.rs defines them.
#pragma once

#include "device.cuh"

namespace baton {

constexpr int DIGEST_UNROLL = 8;                                   // 16-byte loads that a thread has in flight
constexpr int DIGEST_ROUNDS = 4;                                   // of them in a piece
constexpr int DIGEST_PIECE = DIGEST_ROUNDS * DIGEST_UNROLL * WARP; // 16-byte words that a warp takes at a time
constexpr uint64_t DIGEST_STEP = 0x9e3779b97f4a7c15ull;

// Computes the last steps of SplitMix64.
__device__ inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ inline ulonglong2 read_once(const ulonglong2* from) {
  ulonglong2 value;
  asm volatile("ld.global.L1::no_allocate.v2.u64 {%0, %1}, [%2];" : "=l"(value.x), "=l"(value.y) : "l"(from));
  return value;
}

// Calls `take` with every 16-byte word that the lane has in words `begin` to `end` of `from`, and returns the sum of
// their terms. Word 0 is at `place` of the digest.
template <class Take>
__device__ inline uint64_t digest_words(const ulonglong2* from, int64_t place, int32_t begin, int32_t end, Take take) {
  uint64_t sum = 0;
  for (int32_t at = begin + static_cast<int32_t>(threadIdx.x % WARP); at < end; at += DIGEST_UNROLL * WARP) {
    ulonglong2 values[DIGEST_UNROLL];
#pragma unroll
    for (int i = 0; i < DIGEST_UNROLL; ++i) {
      if (at + i * WARP < end) values[i] = read_once(from + at + i * WARP);
    }
    const uint64_t key = (2 * static_cast<uint64_t>(place + at) + 1) * DIGEST_STEP;
#pragma unroll
    for (int i = 0; i < DIGEST_UNROLL; ++i) {
      if (at + i * WARP < end) {
        const uint64_t here = key + static_cast<uint64_t>(2 * WARP * i) * DIGEST_STEP;
        sum += mix(values[i].x + here) + mix(values[i].y + here + DIGEST_STEP);
        take(values[i]);
      }
    }
  }
  return sum;
}

// Adds the sums of all threads of a CTA of `warps` warps to `to`. `shared` holds `warps` numbers.
template <int warps>
__device__ inline void add_sums(uint64_t sum, uint64_t* shared, unsigned long long* to) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL, sum, distance);
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < warps; ++warp) sum += shared[warp];
    atomicAdd(to, static_cast<unsigned long long>(sum));
  }
}

}  // namespace baton
