// Weights and random numbers of tokens, with the same arithmetic as on the CPU. The weight of a token is its
// unnormalized probability, exp((logit - greatest logit) / temperature), which is 1 for the likeliest token.
#pragma once

#include "sample.cuh"

namespace baton::sampling {

// Returns e to the power of x for x <= 0, computed as by `exp` in kernels/src/cpu/arithmetic.rs.
__device__ inline float exp_cpu(float x) {
  if (x < -87.f) return 0.f;
  constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum
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

__device__ inline float weigh(float logit, float best, float temperature) {
  return exp_cpu((logit - best) / temperature);
}

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

// Key of the random numbers of one sample: a hash of the sequence's seed and the index of the output token.
struct Key {
  uint32_t low, high;
  __device__ Key(uint64_t seed, uint64_t index) {
    const uint64_t key = splitmix64(splitmix64(seed) + index);
    low = static_cast<uint32_t>(key);
    high = static_cast<uint32_t>(key >> 32);
  }
  // Returns the random bits of a token.
  __device__ uint32_t bits(uint32_t token) const { return triple32(triple32(token ^ low) ^ high); }
  // Returns an exponentially distributed arrival time with the weight as the rate: -ln(1 - u) / weight, with u from the
  // random bits.
  __device__ static double arrival(uint32_t bits, float weight) {
    return -log1p(-((static_cast<double>(bits) + 0.5) / 4294967296.0)) / static_cast<double>(weight);
  }
};

// Sampling as an exponential race: every token gets a random arrival time, with its weight as the rate, and the
// earliest arrival wins. Holds the earliest arrival of one thread, and after a join that of several threads.
struct Race {
  double arrival = INFINITY;
  int token = NO_TOKEN;
  // Upper bound, in f32, of the earliest arrival so far: of this thread's, or after read_bound of all threads'.
  float bound = INFINITY;

  // Keeps the earlier of two arrivals. The lower id wins a tie.
  __device__ void offer_exactly(double other_arrival, int other_token) {
    if (other_arrival < arrival || (other_arrival == arrival && other_token < token)) {
      arrival = other_arrival;
      token = other_token;
      bound = static_cast<float>(arrival) * 1.000001f;
    }
  }
  // Offers a token. A token with u > weight * bound has lost, because -ln(1 - u) / weight >= u / weight. The test
  // needs no logarithm, and rounds u down to 24 bits.
  __device__ void offer(const Key& key, int other_token, float weight) {
    const uint32_t bits = key.bits(other_token);
    if (static_cast<float>(bits >> 8) * (1.f / 16777216.f) <= weight * bound) {
      offer_exactly(Key::arrival(bits, weight), other_token);
    }
  }
  // The CTAs of a sample share one bound, so that the test in `offer` rejects more tokens in every CTA.
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
      const int other_token = __shfl_xor_sync(FULL, token, distance);
      offer_exactly(other_arrival, other_token);
    }
  }
  // Combines the races of all threads of the CTA. Afterwards the first warp has the winner.
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

// Returns the sort key of a token. Ascending keys order tokens by descending weight, then by ascending id.
__device__ inline uint64_t ranked(int id, float weight) {
  return static_cast<uint64_t>(~__float_as_uint(weight)) << 32 | static_cast<uint32_t>(id);
}
// Returns the weight in a sort key.
__device__ inline float weight_of(uint64_t key) { return __uint_as_float(~static_cast<uint32_t>(key >> 32)); }

// The mass of a token is its weight as an integer, in units of 2^-43. Sums of integers do not depend on the order,
// unlike sums of floats. The sum of a million masses fits into 64 bits.
constexpr int UNIT_BITS = 43;
constexpr double UNIT = 8796093022208.0;
__device__ inline uint64_t mass_of(float weight) { return static_cast<uint64_t>(static_cast<double>(weight) * UNIT); }

// Returns the sum of the runs' totals, added in f64 in the order of the runs. All threads must call it. `shared` and
// `result` are in shared memory.
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

// Returns the sort key of a logit, which is finite or -infinity. Ascending keys order tokens by descending logit, then
// by ascending id.
__device__ inline uint64_t ranked_logit(int id, float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.f);  // -0 becomes 0
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

// Returns the number of alternatives reported in addition to the chosen token.
__device__ inline int top_count(const Arguments& in, const Sample& sample) {
  return min(min(sample.how.logprobs, BATON_TOP_LOGPROBS_MAX), in.args.vocabulary);
}

// Returns the logarithm of the sum of the weights of the raw logits at temperature 1. All threads must call it.
__device__ inline double log_total(const Arguments& in, int index, float* shared, double* result) {
  const int runs = (in.args.vocabulary + RUN - 1) / RUN;
  return log(sum_runs(in.scratch.raw_totals + index * RUNS_MAX, runs, shared, result));
}
__device__ inline float logprob(float logit, const Survey& survey, double log_total) {
  return static_cast<float>(static_cast<double>(logit) - static_cast<double>(survey.raw_best) - log_total);
}

// ---- Top-p ----

// Returns the mass that the tokens kept by top-p must reach, in units of 2^-43. `whole` is the sum of the weights
// before top-p.
__device__ inline uint64_t needed_mass(float top_p, double whole) {
  const double wanted = ceil(static_cast<double>(top_p) * whole * UNIT);
  return wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
}

}  // namespace baton::sampling
