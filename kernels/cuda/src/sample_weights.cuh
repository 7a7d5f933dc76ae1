// Unnormalized token probabilities (weights) and random numbers, with the same arithmetic as on the CPU.
#pragma once

#include "sample.cuh"

namespace baton::sampling {

// e to the power of x for x <= 0, as in kernels/src/cpu/arithmetic.rs.
__device__ inline float exp_cpu(float x) {
  if (x < -87.f) return 0.f;
  constexpr float ROUND = 12582912.f;
  const float shifted = x * 1.44269504088896340736f + ROUND;
  const float power = shifted - ROUND;
  const float rest = (x - power * 0.6933594f) - power * -2.1219444e-4f;
  float sum = 1.9875691e-4f;
  sum = sum * rest + 1.3981999e-3f;
  sum = sum * rest + 8.333452e-3f;
  sum = sum * rest + 4.1665796e-2f;
  sum = sum * rest + 0.16666666f;
  sum = sum * rest + 0.5f;
  const float value = (sum * (rest * rest) + rest) + 1.f;
  return value * __uint_as_float((__float_as_uint(shifted) + 127u) << 23);
}

__device__ inline float weigh(float logit, float best, float temperature) { return exp_cpu((logit - best) / temperature); }

__device__ inline uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ inline uint32_t triple32(uint32_t x) {
  x = (x ^ (x >> 17)) * 0xed5ad4bbu;
  x = (x ^ (x >> 11)) * 0xac4c1b51u;
  x = (x ^ (x >> 15)) * 0x31848babu;
  return x ^ (x >> 14);
}

struct Key {
  uint32_t low, high;
  __device__ Key(uint64_t seed, uint64_t index) {
    const uint64_t key = splitmix64(splitmix64(seed) + index);
    low = static_cast<uint32_t>(key);
    high = static_cast<uint32_t>(key >> 32);
  }
  __device__ uint32_t bits(uint32_t token) const { return triple32(triple32(token ^ low) ^ high); }
  __device__ static double arrival(uint32_t bits, float p) {
    return -log1p(-((static_cast<double>(bits) + 0.5) / 4294967296.0)) / static_cast<double>(p);
  }
};

// Sampling as an exponential race: every token gets a random arrival time, with its weight as the rate, and the
// earliest arrival wins. Holds the earliest arrival of one thread, and after a join that of several threads.
struct Race {
  double arrival = INFINITY;
  int token = NO_TOKEN;
  float bound = INFINITY;  // upper bound of `arrival` in f32, for a quick rejection test

  __device__ void offer_exactly(double other_arrival, int other) {
    if (other_arrival < arrival || (other_arrival == arrival && other < token)) {
      arrival = other_arrival;
      token = other;
      bound = static_cast<float>(arrival) * 1.000001f;
    }
  }
  // -ln(1 - v) >= v, so a token with v > p * bound has lost.
  __device__ void offer(const Key& key, int other, float p) {
    const uint32_t bits = key.bits(other);
    if (static_cast<float>(bits >> 8) * (1.f / 16777216.f) <= p * bound) offer_exactly(Key::arrival(bits, p), other);
  }
  // The CTAs of a sample share their bounds, so that each rejects more tokens by the quick test.
  __device__ void read_bound(const int32_t* shared) {
    bound = fminf(bound, __int_as_float(*reinterpret_cast<const volatile int32_t*>(shared)));
  }
  __device__ void write_bound(int32_t* shared) {
    const float known = __int_as_float(*reinterpret_cast<const volatile int32_t*>(shared));
    if (bound < known) atomicMin(shared, __float_as_int(bound));
  }
  __device__ void join_warp() {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
      const double other_arrival = __shfl_xor_sync(FULL, arrival, distance);
      const int other = __shfl_xor_sync(FULL, token, distance);
      offer_exactly(other_arrival, other);
    }
  }
  // Afterwards the first thread has the winner.
  __device__ void join_block(Winner* shared) {
    join_warp();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
    if (lane == 0) shared[warp] = {arrival, token, 0};
    __syncthreads();
    if (warp == 0) {
      if (lane < blockDim.x / WARP) {
        offer_exactly(shared[lane].arrival, shared[lane].token);
      }
      join_warp();
    }
  }
};

// Returns a sort key: greater weights first, then lower ids.
__device__ inline uint64_t ranked(int id, float weight) {
  return static_cast<uint64_t>(~__float_as_uint(weight)) << 32 | static_cast<uint32_t>(id);
}
__device__ inline float weight_of(uint64_t ranked) { return __uint_as_float(~static_cast<uint32_t>(ranked >> 32)); }

// Probabilities relative to the best token's, as integers in units of 2^-43: their sums do not depend on the order, and
// the sum of a million tokens fits.
constexpr int UNIT_BITS = 43;
constexpr double UNIT = 8796093022208.0;
__device__ inline uint64_t mass_of(float weight) { return static_cast<uint64_t>(static_cast<double>(weight) * UNIT); }

// Returns the sum of the runs' totals to every thread, added in f64 in a fixed order.
__device__ inline double sum_runs(const float* totals, int runs, float* shared, double* result) {
  __syncthreads();
  for (int i = threadIdx.x; i < runs; i += blockDim.x) shared[i] = totals[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0.0;
    for (int i = 0; i < runs; ++i) sum += static_cast<double>(shared[i]);
    *result = sum;
  }
  __syncthreads();
  return *result;
}

// ---- Log-probabilities ----

// Returns the sort key of a finite or -infinite logit: greatest first, then lower ids.
__device__ inline uint64_t ranked_logit(int id, float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.f);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

// Returns the number of alternatives reported in addition to the chosen token.
__device__ inline int top_count(const Arguments& in, const Sample& sample) {
  return min(min(sample.how.logprobs, BATON_TOP_LOGPROBS_MAX), in.args.vocabulary);
}

// Returns the logarithm of the sum of all weights. All threads must call it.
__device__ inline double log_total(const Arguments& in, int index, float* shared, double* result) {
  const int runs = (in.args.vocabulary + RUN - 1) / RUN;
  return log(sum_runs(in.scratch.raw_totals + index * RUNS_MAX, runs, shared, result));
}
__device__ inline float logprob(float logit, const Survey& survey, double log_total) {
  return static_cast<float>(static_cast<double>(logit) - static_cast<double>(survey.raw_best) - log_total);
}

// ---- Top-p ----

// Returns the probability mass that the kept tokens must reach, in units of 2^-43.
__device__ inline uint64_t needed_mass(float top_p, double whole) {
  const double wanted = ceil(static_cast<double>(top_p) * whole * UNIT);
  return wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
}

}  // namespace baton::sampling
