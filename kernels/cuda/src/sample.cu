// From logits to tokens, by the rules of kernels/src/sampling.rs, with the CPU's arithmetic.
//
// This unit is compiled without fused multiply-adds: weights, totals and the comparison with top_p then have the
// CPU's bits, so a draw differs only where logits do.
//
// Five launches. A sample's vocabulary is cut into slices of whole runs (1,024 tokens, the unit of the CPU's
// totals), and all but the last kernel give a block to each slice:
//   history  counts the tokens of sequences that have penalties,
//   survey   applies mask, min_tokens and penalties, finds the greatest logit and what is no number,
//   weigh    races the tokens against each other or, with top-k or top-p, counts and adds them up by likelihood,
//   gather   with top-k or top-p: finds the bin of likelihood where the cut lies, lists whom that concerns and races
//            those that stay for certain,
//   choose   one block a sample: puts the slices together, narrows the list, reports, appends the token.
// Where the list overflows (thousands of tokens of nearly equal likelihood at the cut, or top-k and top-p both with a
// large k), `choose` goes over the vocabulary by itself; that takes up to a millisecond.
#include <utility>

#include "device.cuh"

namespace baton {
namespace {

constexpr int RUN = 1024;
constexpr int LANES = 16;
constexpr int SLICES_MAX = 128;
constexpr int SLICE_THREADS = 256;
constexpr int CHOOSE_THREADS = 1024;
constexpr int LIST_MAX = 8192;      // tokens that are listed for top-k and top-p
constexpr int LEVELS = 1024;        // bins of likelihood, eight to a factor of two
constexpr int RUNS_MAX = 1024;
constexpr float GREEDY_BELOW = 1e-5f;
constexpr uint32_t IN_PROMPT = 1u << 31;
constexpr int NOBODY = 0x7fffffff;
constexpr int BINS = 256;

// What a slice of a row looks like.
struct Survey {
  float raw_best;
  int raw_bad;  // lowest id that is NaN or +infinity, NOBODY if none
  float best;   // of the adjusted logits
  int best_id;
  int bad;
};

struct Winner {
  double arrival;
  int token;
  int reserved;
};

// Where top-k or top-p cuts.
struct Cut {
  enum Mode {
    LIST_ALL,  // everybody up to the level is listed
    LIST_LAST, // those of the level are listed, those before it stay and have raced
    NO_LIST    // too many for a list
  };
  int32_t mode;
  int32_t level;
  int32_t is_reached;  // 0: all together hold less than is asked for
  int32_t reserved;
  uint64_t need;  // of the listed ones, in LIST_LAST
};

// What one sample asks for; found once, by the history kernel.
struct Sample {
  int slot;  // -1: padding
  int position;
  int output_len;
  int mask;
  bool is_min_masked;
  bool is_penalised;
  bool is_adjusted;
  bool is_greedy;
  bool is_restricted;  // by top-k or top-p
  uint32_t top_k;      // 0: none
  baton_sampling how;
};

struct Scratch {
  Sample* samples;     // [samples]
  uint32_t* counts;    // [samples][vocabulary]; zero between calls
  float* adjusted;     // [samples][stride]
  Survey* surveys;     // [samples][SLICES_MAX]
  Winner* winners;     // [samples][SLICES_MAX]
  float* totals;       // [samples][RUNS_MAX], of weights
  float* raw_totals;   // [samples][RUNS_MAX], for log-probabilities
  uint64_t* list;      // [samples][LIST_MAX]
  int32_t* list_count; // [samples]
  int32_t* bounds;     // [samples]: bits of the earliest arrival so far, rounded up
  uint64_t* masses;    // [samples][LEVELS]
  uint32_t* numbers;   // [samples][LEVELS]
  Cut* cuts;           // [samples]
};

int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Lays the scratch out from `base` on; returns its end.
uint64_t lay_out(char* base, int64_t samples, int64_t vocabulary, Scratch& scratch) {
  int64_t at = 0;
  auto take = [&](auto*& place, int64_t count) {
    place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(base + at);
    at += round_up(count * static_cast<int64_t>(sizeof(*place)));
  };
  take(scratch.counts, samples * vocabulary);
  take(scratch.samples, samples);
  take(scratch.adjusted, samples * ((vocabulary + 3) / 4 * 4));
  take(scratch.surveys, samples * SLICES_MAX);
  take(scratch.winners, samples * SLICES_MAX);
  take(scratch.totals, samples * RUNS_MAX);
  take(scratch.raw_totals, samples * RUNS_MAX);
  take(scratch.list, samples * LIST_MAX);
  take(scratch.list_count, samples);
  take(scratch.bounds, samples);
  take(scratch.masses, samples * LEVELS);
  take(scratch.numbers, samples * LEVELS);
  take(scratch.cuts, samples);
  return at;
}

struct Arguments {
  baton_pool pool;
  baton_step step;
  baton_sample_args args;
  Scratch scratch;
  int slices;
  int slice_runs;
};

// ---- The CPU's arithmetic ----

// As kernels/src/cpu/arithmetic.rs: e to the power of x for x <= 0.
__device__ float exp_cpu(float x) {
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

__device__ float weigh(float logit, float best, float temperature) { return exp_cpu((logit - best) / temperature); }

__device__ uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ uint32_t triple32(uint32_t x) {
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

// The first to arrive so far, of one thread, then of more of them.
struct Race {
  double arrival = INFINITY;
  int token = NOBODY;
  float bound = INFINITY;  // at least `arrival`; in f32, for the quick look

  __device__ void meet_exactly(double other_arrival, int other) {
    if (other_arrival < arrival || (other_arrival == arrival && other < token)) {
      arrival = other_arrival;
      token = other;
      bound = static_cast<float>(arrival) * 1.000001f;
    }
  }
  // -ln(1 - v) >= v, so whoever has v > p * bound has lost.
  __device__ void meet(const Key& key, int other, float p) {
    const uint32_t bits = key.bits(other);
    if (static_cast<float>(bits >> 8) * (1.f / 16777216.f) <= p * bound) meet_exactly(Key::arrival(bits, p), other);
  }
  // What other blocks of the sample have found makes the quick look sharper, and the other way round.
  __device__ void learn_bound(const int32_t* shared) {
    bound = fminf(bound, __int_as_float(*reinterpret_cast<const volatile int32_t*>(shared)));
  }
  __device__ void teach_bound(int32_t* shared) {
    const float known = __int_as_float(*reinterpret_cast<const volatile int32_t*>(shared));
    if (bound < known) atomicMin(shared, __float_as_int(bound));
  }
  __device__ void join_warp() {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
      const double other_arrival = __shfl_xor_sync(FULL, arrival, distance);
      const int other = __shfl_xor_sync(FULL, token, distance);
      meet_exactly(other_arrival, other);
    }
  }
  // The winner is in the first thread.
  __device__ void join_block(Winner* shared) {
    join_warp();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
    if (lane == 0) shared[warp] = {arrival, token, 0};
    __syncthreads();
    if (warp == 0) {
      if (lane < blockDim.x / WARP) {
        meet_exactly(shared[lane].arrival, shared[lane].token);
      }
      join_warp();
    }
  }
};

// ---- What a sample is ----

__device__ Sample find_sample(const Arguments& in, int index) {
  Sample sample;
  sample.slot = in.step.sample_slots[index];
  if (sample.slot < 0) return sample;
  sample.position = in.step.row_positions[in.step.sampled_rows[index]];
  sample.mask = in.args.masks ? in.step.sample_masks[index] : -1;
  const baton_sampling how = in.pool.sampling[sample.slot];
  sample.how = how;
  sample.output_len = max(sample.position + 1 - how.prompt_len, 0);
  sample.is_min_masked = static_cast<uint32_t>(sample.output_len) < how.min_tokens && how.stop_count > 0;
  sample.is_penalised =
      how.repetition_penalty != 1.f || how.presence_penalty != 0.f || how.frequency_penalty != 0.f;
  sample.is_adjusted = sample.mask >= 0 || sample.is_min_masked || sample.is_penalised;
  sample.is_greedy = how.temperature < GREEDY_BELOW;
  sample.top_k = how.top_k >= static_cast<uint32_t>(in.args.vocabulary) ? 0 : how.top_k;
  sample.is_restricted = !sample.is_greedy && (sample.top_k > 0 || how.top_p < 1.f);
  return sample;
}

__device__ const float* raw_row(const Arguments& in, int index) {
  return in.args.logits + index * in.args.logit_stride;
}
__device__ float* adjusted_row(const Arguments& in, int index) {
  return in.scratch.adjusted + index * ((static_cast<int64_t>(in.args.vocabulary) + 3) / 4 * 4);
}
__device__ const float* values_of(const Arguments& in, const Sample& sample, int index) {
  return sample.is_adjusted ? adjusted_row(in, index) : raw_row(in, index);
}

// ---- history ----

__global__ void history_kernel(const Arguments in) {
  successor_may_start();
  predecessor_done();
  const int index = blockIdx.y;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  if (thread == 0) {
    in.scratch.list_count[index] = 0;
    in.scratch.bounds[index] = __float_as_int(INFINITY);
  }
  const Sample sample = find_sample(in, index);
  if (thread == 0) in.scratch.samples[index] = sample;
  if (sample.slot >= 0 && sample.is_restricted) {
    for (int i = thread; i < LEVELS; i += threads) {
      in.scratch.masses[index * LEVELS + i] = 0;
      in.scratch.numbers[index * LEVELS + i] = 0;
    }
  }
  if (sample.slot < 0 || !sample.is_penalised) return;
  const int32_t* tokens = in.pool.tokens + static_cast<int64_t>(sample.slot) * in.pool.token_width;
  uint32_t* counts = in.scratch.counts + static_cast<int64_t>(index) * in.args.vocabulary;
  const int end = sample.position + 1;
  const int prompt = min(sample.how.prompt_len, end);
  // The prompt matters to the repetition penalty alone.
  const int begin = sample.how.repetition_penalty != 1.f ? 0 : prompt;
  for (int i = begin + thread; i < end; i += threads) {
    const uint32_t token = static_cast<uint32_t>(tokens[i]);
    if (token >= static_cast<uint32_t>(in.args.vocabulary)) continue;
    if (i < prompt) {
      atomicOr(counts + token, IN_PROMPT);
    } else {
      atomicAdd(counts + token, 1u);
    }
  }
}

// ---- survey ----

__device__ float penalise(const baton_sampling& how, uint32_t count, float logit) {
  const float repeated = logit > 0.f ? logit / how.repetition_penalty : logit * how.repetition_penalty;
  const uint32_t places = count & ~IN_PROMPT;
  float changed = repeated - how.frequency_penalty * static_cast<float>(places);
  if (places > 0) changed -= how.presence_penalty;
  return changed;
}

__device__ bool is_bad(float x) { return isnan(x) || x == INFINITY; }

__device__ void take_best(float& best, int& best_id, float other, int other_id) {
  if (other > best || (other == best && other_id < best_id)) best = other, best_id = other_id;
}

__device__ Survey join(Survey a, const Survey& b) {
  a.raw_best = fmaxf(a.raw_best, b.raw_best);
  a.raw_bad = min(a.raw_bad, b.raw_bad);
  a.bad = min(a.bad, b.bad);
  take_best(a.best, a.best_id, b.best, b.best_id);
  return a;
}

__device__ Survey join_warp(Survey own) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    Survey other;
    other.raw_best = __shfl_xor_sync(FULL, own.raw_best, distance);
    other.raw_bad = __shfl_xor_sync(FULL, own.raw_bad, distance);
    other.best = __shfl_xor_sync(FULL, own.best, distance);
    other.best_id = __shfl_xor_sync(FULL, own.best_id, distance);
    other.bad = __shfl_xor_sync(FULL, own.bad, distance);
    own = join(own, other);
  }
  return own;
}

__device__ Survey nothing_seen() { return {-INFINITY, NOBODY, -INFINITY, NOBODY, NOBODY}; }

__global__ void __launch_bounds__(SLICE_THREADS) survey_kernel(const Arguments in) {
  __shared__ uint32_t stops[RUN / 32];
  __shared__ Survey shared[SLICE_THREADS / WARP];
  successor_may_start();
  predecessor_done();
  const int index = blockIdx.y;
  const Sample sample = in.scratch.samples[index];
  if (sample.slot < 0) return;
  const int vocabulary = in.args.vocabulary;
  const float* raw = raw_row(in, index);
  float* adjusted = adjusted_row(in, index);
  uint32_t* counts = in.scratch.counts + static_cast<int64_t>(index) * vocabulary;
  const uint32_t* mask =
      sample.mask >= 0 ? in.args.masks + static_cast<int64_t>(sample.mask) * ((vocabulary + 31) / 32) : nullptr;
  const int32_t* stop_tokens = in.pool.stop_tokens + static_cast<int64_t>(sample.slot) * in.pool.stop_width;

  Survey own = nothing_seen();
  const int place = threadIdx.x * 4;  // RUN is four times the threads
  constexpr int TOGETHER = 4;         // runs whose logits are under way
  for (int run = 0; run < in.slice_runs; run += TOGETHER) {
    float4 loaded[TOGETHER];
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
      const int id = (blockIdx.x * in.slice_runs + run + k) * RUN + place;
      if (run + k < in.slice_runs && id < vocabulary) loaded[k] = *reinterpret_cast<const float4*>(raw + id);
    }
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
      const int first = (blockIdx.x * in.slice_runs + run + k) * RUN;
      if (run + k >= in.slice_runs || first >= vocabulary) break;
      if (sample.is_min_masked) {
        __syncthreads();
        if (threadIdx.x < RUN / 32) stops[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < sample.how.stop_count; i += blockDim.x) {
          const int stop = stop_tokens[i] - first;
          if (stop >= 0 && stop < RUN) atomicOr(stops + stop / 32, 1u << (stop % 32));
        }
        __syncthreads();
      }
      const int id = first + place;
      const float values[4] = {loaded[k].x, loaded[k].y, loaded[k].z, loaded[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (id + i >= vocabulary) break;
        float value = values[i];
        if (is_bad(value)) own.raw_bad = min(own.raw_bad, id + i);
        own.raw_best = value > own.raw_best ? value : own.raw_best;
        if (sample.is_adjusted) {
          if (mask && !(mask[(id + i) / 32] >> ((id + i) % 32) & 1)) value = -INFINITY;
          if (sample.is_min_masked && (stops[(place + i) / 32] >> ((place + i) % 32) & 1)) value = -INFINITY;
          if (sample.is_penalised) {
            const uint32_t count = counts[id + i];
            if (count != 0) {
              counts[id + i] = 0;
              value = penalise(sample.how, count, value);
            }
          }
          adjusted[id + i] = value;
        }
        if (is_bad(value)) {
          own.bad = min(own.bad, id + i);
        } else if (value > own.best) {  // ids rise within a thread: among equals the first stays
          own.best = value;
          own.best_id = id + i;
        }
      }
    }
  }
  own = join_warp(own);
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < SLICE_THREADS / WARP; ++warp) own = join(own, shared[warp]);
    in.scratch.surveys[index * SLICES_MAX + blockIdx.x] = own;
  }
}

// The whole row's, in every thread.
__device__ Survey whole_survey(const Arguments& in, int index, Survey* shared) {
  if (threadIdx.x < WARP) {
    Survey own = nothing_seen();
    for (int slice = threadIdx.x; slice < in.slices; slice += WARP) {
      own = join(own, in.scratch.surveys[index * SLICES_MAX + slice]);
    }
    own = join_warp(own);
    if (threadIdx.x == 0) *shared = own;
  }
  __syncthreads();
  return *shared;
}

__device__ int status_of(const Survey& survey) {
  if (survey.raw_bad != NOBODY) return BATON_SAMPLE_BAD_LOGIT;
  if (survey.raw_best == -INFINITY) return BATON_SAMPLE_NO_CANDIDATE;
  if (survey.bad != NOBODY) return BATON_SAMPLE_BAD_LOGIT;
  if (survey.best == -INFINITY) return BATON_SAMPLE_NO_CANDIDATE;
  return BATON_SAMPLE_OK;
}

// ---- weigh ----

// In sorting order: the more likely first, then the lower id.
__device__ uint64_t ranked(int id, float weight) {
  return static_cast<uint64_t>(~__float_as_uint(weight)) << 32 | static_cast<uint32_t>(id);
}
__device__ float weight_of(uint64_t ranked) { return __uint_as_float(~static_cast<uint32_t>(ranked >> 32)); }

// Sum of a run's weights in the CPU's order: 16 lanes, then a tree. By 16 neighbouring threads.
__device__ float run_total(const float* weights, float floor) {
  const int lane = threadIdx.x % LANES;
  float sum = 0.f;
  for (int i = 0; i < RUN / LANES; ++i) {
    const float weight = weights[i * LANES + lane];
    sum += weight >= floor ? weight : 0.f;
  }
  for (int width = LANES / 2; width > 0; width /= 2) sum += __shfl_down_sync(FULL, sum, width, LANES);
  return sum;
}

// Bins of likelihood: bin i holds the weights whose bits lie i * 2^20 and more, but less than (i + 1) * 2^20, below those
// of 1. So bin 0 holds the best, and within a bin a weight is linear in its bits.
constexpr int LEVEL_BITS = 20;
constexpr int ONE_BITS = 0x3f800000;
__device__ int below_one(float weight) { return max(ONE_BITS - __float_as_int(weight), 0); }
__device__ int level_of(float weight) { return below_one(weight) >> LEVEL_BITS; }
// The least weight of a bin; 0 beyond the last.
__device__ float level_edge(int level) {
  return __int_as_float(max(ONE_BITS - ((level + 1) << LEVEL_BITS) + 1, 0));
}

// Probabilities relative to the best one's, as whole numbers of 2^-43: sums of them do not depend on their order, and
// those of a million tokens fit.
constexpr int UNIT_BITS = 43;
constexpr double UNIT = 8796093022208.0;
__device__ uint64_t mass_of(float weight) { return static_cast<uint64_t>(static_cast<double>(weight) * UNIT); }

// The mass of `number` weights of one bin, whose bits lie `distance` below the bin's greatest in sum.
__device__ uint64_t level_mass(int level, uint32_t number, uint64_t distance) {
  const int below = ONE_BITS - (level << LEVEL_BITS) - 1;
  const uint64_t greatest = ((below & 0x7fffff) | 0x800000) + 1;  // in units of the last place beneath it
  const uint64_t mass = number * greatest - distance;
  const int shift = (below >> 23) - 127 - 23 + UNIT_BITS;
  return shift >= 0 ? mass << shift : shift > -64 ? mass >> -shift : 0;
}

// All lanes of a warp add to bins together, those without anything with is_in = false: equal bins are added up
// within the warp first, since most tokens of a row share a few bins.
template <bool BY_MASS>
__device__ void add_to_bins(uint64_t* masses, uint32_t* numbers, bool is_in, uint32_t bin, uint64_t mass) {
  const unsigned peers = __match_any_sync(FULL, is_in ? bin : 0xffffffffu);
  if (!is_in) return;
  const bool leads = (peers & ((1u << (threadIdx.x % WARP)) - 1)) == 0;
  if constexpr (BY_MASS) {
    const uint32_t low = __reduce_add_sync(peers, static_cast<uint32_t>(mass & 0xffffff));
    const uint32_t high = __reduce_add_sync(peers, static_cast<uint32_t>(mass >> 24));
    if (leads) {
      const uint64_t sum = (static_cast<uint64_t>(high) << 24) + low;
      atomicAdd(reinterpret_cast<unsigned long long*>(masses + bin), static_cast<unsigned long long>(sum));
    }
  }
  if (leads) atomicAdd(numbers + bin, __popc(peers));
}

// Four neighbours of each of several runs, so that many loads are under way. What lies beyond the row is left out.
constexpr int TOGETHER = 4;
__device__ void load_runs(const Arguments& in, const float* row, int run, float4 (&loaded)[TOGETHER]) {
#pragma unroll
  for (int k = 0; k < TOGETHER; ++k) {
    const int id = (blockIdx.x * in.slice_runs + run + k) * RUN + threadIdx.x * 4;
    if (run + k < in.slice_runs && id < in.args.vocabulary) loaded[k] = *reinterpret_cast<const float4*>(row + id);
  }
}

// Calls visit(k, id, value) for every token of the runs loaded; is_in is false beyond the row. All threads take part.
template <class Visit>
__device__ void visit_runs(const Arguments& in, int run, const float4 (&loaded)[TOGETHER], const Visit& visit) {
#pragma unroll
  for (int k = 0; k < TOGETHER; ++k) {
    const int first = (blockIdx.x * in.slice_runs + run + k) * RUN;
    if (run + k >= in.slice_runs || first >= in.args.vocabulary) break;
    const int id = first + threadIdx.x * 4;
    const float values[4] = {loaded[k].x, loaded[k].y, loaded[k].z, loaded[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(k, id + i, id + i < in.args.vocabulary, values[i]);
  }
}

// Sums the runs whose weights are in shared memory, a warp to each.
__device__ void total_runs(const Arguments& in, int run, const float (&weights)[TOGETHER][RUN], float floor,
                           float* totals) {
  __syncthreads();
  const int k = threadIdx.x / WARP;
  const int index = blockIdx.x * in.slice_runs + run + k;
  if (k < TOGETHER && run + k < in.slice_runs && index * RUN < in.args.vocabulary) {
    const float total = run_total(weights[k], floor);
    if (threadIdx.x % WARP == 0) totals[index] = total;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(SLICE_THREADS) weigh_kernel(const Arguments in) {
  __shared__ Survey survey_shared;
  __shared__ Winner winners[SLICE_THREADS / WARP];
  __shared__ float weights[TOGETHER][RUN];
  // Of each bin: how many there are, and how far their bits lie below the bin's greatest, in two parts.
  __shared__ uint32_t numbers[LEVELS], far_low[LEVELS], far_high[LEVELS];
  constexpr int PART_BITS = LEVEL_BITS / 2, PART = (1 << PART_BITS) - 1;
  successor_may_start();
  predecessor_done();
  const int index = blockIdx.y;
  const Sample sample = in.scratch.samples[index];
  if (sample.slot < 0) return;
  const bool wants_logprobs = sample.how.logprobs >= 0;
  if (sample.is_greedy && !wants_logprobs) return;
  const Survey survey = whole_survey(in, index, &survey_shared);
  if (status_of(survey) != BATON_SAMPLE_OK) return;

  const float* raw = raw_row(in, index);
  const float* values = values_of(in, sample, index);
  const float temperature = sample.how.temperature, min_p = sample.how.min_p;
  const bool wants_race = !sample.is_greedy && !sample.is_restricted;
  const bool wants_total = sample.is_restricted && sample.top_k == 0;
  const Key key(sample.how.seed, sample.output_len);
  Race race;
  // A likely token as the one to beat makes the quick look sharp. It is met again in its own slice.
  if (wants_race) race.meet(key, survey.best_id, weigh(survey.best, survey.best, temperature));
  const float sharpness = 1.f / temperature;
  if (sample.is_restricted) {
    for (int i = threadIdx.x; i < LEVELS; i += SLICE_THREADS) numbers[i] = far_low[i] = far_high[i] = 0;
    __syncthreads();
  }

  for (int run = 0; run < in.slice_runs; run += TOGETHER) {
    float4 loaded[TOGETHER];
    load_runs(in, values, run, loaded);
    if (wants_race) {
      race.learn_bound(in.scratch.bounds + index);
      visit_runs(in, run, loaded, [&](int, int id, bool is_in, float logit) {
        // With a rough exponential first; only who passes that needs the exact one.
        const float rough = __expf((logit - survey.best) * sharpness) * 1.001f;
        const float v = static_cast<float>(key.bits(id) >> 8) * (1.f / 16777216.f);
        if (is_in && v <= rough * race.bound) {
          const float weight = weigh(logit, survey.best, temperature);
          if (weight > 0.f && weight >= min_p) race.meet(key, id, weight);
        }
      });
      race.teach_bound(in.scratch.bounds + index);
    }
    if (sample.is_restricted) {
      visit_runs(in, run, loaded, [&](int k, int id, bool is_in, float logit) {
        const float weight = is_in ? weigh(logit, survey.best, temperature) : 0.f;
        if (wants_total) weights[k][id % RUN] = weight;
        if (weight > 0.f && weight >= min_p) {
          const int below = below_one(weight), level = below >> LEVEL_BITS;
          atomicAdd(numbers + level, 1u);
          if (wants_total) {
            atomicAdd(far_low + level, below & PART);
            atomicAdd(far_high + level, below >> PART_BITS & PART);
          }
        }
      });
      if (wants_total) total_runs(in, run, weights, min_p, in.scratch.totals + index * RUNS_MAX);
    }
    if (wants_logprobs) {
      if (sample.is_adjusted) load_runs(in, raw, run, loaded);
      visit_runs(in, run, loaded, [&](int k, int id, bool is_in, float logit) {
        weights[k][id % RUN] = is_in ? weigh(logit, survey.raw_best, 1.f) : 0.f;
      });
      total_runs(in, run, weights, 0.f, in.scratch.raw_totals + index * RUNS_MAX);
    }
  }
  if (sample.is_restricted) {
    __syncthreads();
    for (int i = threadIdx.x; i < LEVELS; i += SLICE_THREADS) {
      if (numbers[i] == 0) continue;
      atomicAdd(in.scratch.numbers + index * LEVELS + i, numbers[i]);
      if (wants_total) {
        const uint64_t distance = (static_cast<uint64_t>(far_high[i]) << PART_BITS) + far_low[i];
        atomicAdd(reinterpret_cast<unsigned long long*>(in.scratch.masses + index * LEVELS + i),
                  static_cast<unsigned long long>(level_mass(i, numbers[i], distance)));
      }
    }
  }
  if (wants_race) {
    race.join_block(winners);
    if (threadIdx.x == 0) in.scratch.winners[index * SLICES_MAX + blockIdx.x] = {race.arrival, race.token, 0};
  }
}

// ---- gather ----

// Runs' totals in f64, one after the other. In every thread.
__device__ double sum_runs(const float* totals, int runs, float* shared, double* result) {
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

// What the kept tokens' mass must reach.
__device__ uint64_t needed_mass(float top_p, double whole) {
  const double wanted = ceil(static_cast<double>(top_p) * whole * UNIT);
  return wanted < 1.0 ? 1 : static_cast<uint64_t>(wanted);
}

struct CutShared {
  float runs[RUNS_MAX];
  double whole;
  uint64_t amounts[SLICE_THREADS / WARP];
  uint32_t numbers[SLICE_THREADS / WARP];
  Cut cut;
};

// The level at which top-k (or, without it, top-p) is reached. By a block of SLICE_THREADS.
__device__ Cut find_cut(const Arguments& in, const Sample& sample, int index, CutShared& shared) {
  constexpr int EACH = LEVELS / SLICE_THREADS;
  const bool by_mass = sample.top_k == 0;
  const uint32_t* all_numbers = in.scratch.numbers + index * LEVELS;
  const uint64_t* all_masses = in.scratch.masses + index * LEVELS;
  uint64_t need = sample.top_k;
  if (by_mass) {
    const int runs = (in.args.vocabulary + RUN - 1) / RUN;
    need = needed_mass(sample.how.top_p,
                       sum_runs(in.scratch.totals + index * RUNS_MAX, runs, shared.runs, &shared.whole));
  }
  uint32_t numbers[EACH], own_number = 0;
  uint64_t amounts[EACH], own = 0;
  for (int i = 0; i < EACH; ++i) {
    numbers[i] = all_numbers[threadIdx.x * EACH + i];
    amounts[i] = by_mass ? all_masses[threadIdx.x * EACH + i] : numbers[i];
    own += amounts[i];
    own_number += numbers[i];
  }
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint64_t through = own;
  uint32_t number_through = own_number;
  for (int distance = 1; distance < WARP; distance *= 2) {
    const uint64_t other = __shfl_up_sync(FULL, through, distance);
    const uint32_t other_number = __shfl_up_sync(FULL, number_through, distance);
    if (lane >= distance) through += other, number_through += other_number;
  }
  if (lane == WARP - 1) shared.amounts[warp] = through, shared.numbers[warp] = number_through;
  if (threadIdx.x == 0) shared.cut.is_reached = 0;
  __syncthreads();
  uint64_t before = through - own;
  uint32_t number = number_through - own_number, everybody = 0;
  for (int w = 0; w < SLICE_THREADS / WARP; ++w) {
    if (w < warp) before += shared.amounts[w], number += shared.numbers[w];
    everybody += shared.numbers[w];
  }
  if (before < need && before + own >= need) {
    for (int i = 0; i < EACH; ++i) {
      number += numbers[i];
      if (before + amounts[i] >= need) {
        Cut cut;
        cut.level = threadIdx.x * EACH + i;
        cut.need = need - before;
        cut.is_reached = 1;
        cut.reserved = 0;
        cut.mode = number <= LIST_MAX                    ? Cut::LIST_ALL
                   : by_mass && numbers[i] <= LIST_MAX ? Cut::LIST_LAST
                                                       : Cut::NO_LIST;
        shared.cut = cut;
        break;
      }
      before += amounts[i];
    }
  }
  __syncthreads();
  Cut cut = shared.cut;
  if (!cut.is_reached) cut = {everybody <= LIST_MAX ? Cut::LIST_ALL : Cut::NO_LIST, LEVELS, 0, 0, need};
  return cut;
}

__global__ void __launch_bounds__(SLICE_THREADS) gather_kernel(const Arguments in) {
  __shared__ Survey survey_shared;
  __shared__ Winner winners[SLICE_THREADS / WARP];
  __shared__ CutShared cut_shared;
  successor_may_start();
  predecessor_done();
  const int index = blockIdx.y;
  const Sample sample = in.scratch.samples[index];
  if (sample.slot < 0 || !sample.is_restricted) return;
  const Survey survey = whole_survey(in, index, &survey_shared);
  if (status_of(survey) != BATON_SAMPLE_OK) return;
  const Cut cut = find_cut(in, sample, index, cut_shared);
  if (blockIdx.x == 0 && threadIdx.x == 0) in.scratch.cuts[index] = cut;
  if (cut.mode == Cut::NO_LIST) return;

  const float* values = values_of(in, sample, index);
  const float temperature = sample.how.temperature, min_p = sample.how.min_p;
  const float sharpness = 1.f / temperature, edge = level_edge(cut.level);
  const Key key(sample.how.seed, sample.output_len);
  Race race;
  for (int run = 0; run < in.slice_runs; run += TOGETHER) {
    float4 loaded[TOGETHER];
    load_runs(in, values, run, loaded);
    race.learn_bound(in.scratch.bounds + index);
    visit_runs(in, run, loaded, [&](int, int id, bool is_in, float logit) {
      // With a rough exponential first: most tokens lie far below the edge.
      is_in = is_in && __expf((logit - survey.best) * sharpness) * 1.001f >= edge;
      float weight = 0.f;
      int level = LEVELS + 1;
      if (is_in) {
        weight = weigh(logit, survey.best, temperature);
        if (weight > 0.f && weight >= min_p) level = level_of(weight);
      }
      if (cut.mode == Cut::LIST_LAST && level < cut.level) race.meet(key, id, weight);
      const bool is_listed = cut.mode == Cut::LIST_ALL ? level <= cut.level : level == cut.level;
      __syncwarp();
      const unsigned listed = __ballot_sync(FULL, is_listed);
      if (listed) {
        const int lane = threadIdx.x % WARP;
        int to = 0;
        if (lane == 0) to = atomicAdd(in.scratch.list_count + index, __popc(listed));
        to = __shfl_sync(FULL, to, 0) + __popc(listed & ((1u << lane) - 1));
        if (is_listed) in.scratch.list[static_cast<int64_t>(index) * LIST_MAX + to] = ranked(id, weight);
      }
    });
    if (cut.mode == Cut::LIST_LAST) race.teach_bound(in.scratch.bounds + index);
  }
  if (cut.mode == Cut::LIST_LAST) {
    race.join_block(winners);
    if (threadIdx.x == 0) in.scratch.winners[index * SLICES_MAX + blockIdx.x] = {race.arrival, race.token, 0};
  }
}

// ---- choose ----

struct Bins {
  uint64_t mass[BINS];
  uint32_t count[BINS];
  uint64_t before;  // what the bins before the found one hold
  int found;        // -1: all of them hold less than is needed
};

// The greatest key of the shortest sorted prefix that holds `need` (tokens, or mass); false when all keys up to
// `limit` hold less. `source(visit)` calls visit(is_in, key) for every key, whole warps at a time. With
// `WHOLE_TIES` keys of equal upper halves stay together.
template <bool BY_MASS, bool WHOLE_TIES, class Source>
__device__ bool find_limit(Bins& bins, const Source& source, uint64_t need, uint64_t& limit) {
  uint64_t prefix = 0;
  for (int shift = 56; shift >= (WHOLE_TIES ? 32 : 0); shift -= 8) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) bins.mass[i] = bins.count[i] = 0;
    __syncthreads();
    source([&](bool is_in, uint64_t key) {
      is_in = is_in && key <= limit && (shift == 56 || key >> (shift + 8) == prefix);
      add_to_bins<BY_MASS>(bins.mass, bins.count, is_in, static_cast<uint32_t>(key >> shift) & (BINS - 1),
                           BY_MASS && is_in ? mass_of(weight_of(key)) : 0);
    });
    __syncthreads();
    if (threadIdx.x < WARP) {
      // Eight bins to a lane.
      constexpr int EACH = BINS / WARP;
      uint64_t own = 0;
      for (int i = 0; i < EACH; ++i) {
        const int bin = threadIdx.x * EACH + i;
        own += BY_MASS ? bins.mass[bin] : bins.count[bin];
      }
      uint64_t through = own;
      for (int distance = 1; distance < WARP; distance *= 2) {
        const uint64_t other = __shfl_up_sync(FULL, through, distance);
        if (threadIdx.x >= distance) through += other;
      }
      const unsigned reached = __ballot_sync(FULL, through >= need);
      if (threadIdx.x == 0 && reached == 0) bins.found = -1;
      if (reached && threadIdx.x == __ffs(reached) - 1) {
        uint64_t before = through - own;
        for (int i = 0; i < EACH; ++i) {
          const int bin = threadIdx.x * EACH + i;
          const uint64_t held = BY_MASS ? bins.mass[bin] : bins.count[bin];
          if (before + held >= need) {
            bins.found = bin;
            bins.before = before;
            break;
          }
          before += held;
        }
      }
    }
    __syncthreads();
    if (bins.found < 0) return false;  // the first digit only: later ones look into a bin that holds enough
    prefix = prefix << 8 | static_cast<uint64_t>(bins.found);
    need -= bins.before;
    const bool takes_all = bins.count[bins.found] == 1 || (!BY_MASS && bins.count[bins.found] == need);
    if (takes_all || shift == (WHOLE_TIES ? 32 : 0)) {
      const uint64_t last = shift == 0 ? prefix : ((prefix << shift) | ((uint64_t{1} << shift) - 1));
      limit = last < limit ? last : limit;
      return true;
    }
  }
  return true;
}

__device__ uint64_t block_sum_mass(uint64_t own, uint64_t* shared) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) own += __shfl_xor_sync(FULL, own, distance);
  __syncthreads();
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = own;
  __syncthreads();
  uint64_t sum = 0;
  for (int warp = 0; warp < CHOOSE_THREADS / WARP; ++warp) sum += shared[warp];
  return sum;
}

constexpr int NEAR_MAX = 1024;

struct ChooseShared {
  Bins bins;
  Survey survey;
  Winner winners[CHOOSE_THREADS / WARP];
  uint64_t sums[CHOOSE_THREADS / WARP];
  float runs[RUNS_MAX];
  double total;
  uint64_t top[BATON_TOP_LOGPROBS_MAX];
  int top_count;
  uint64_t near[NEAR_MAX];
  int near_count;
  float near_bound;
};

// Which tokens top-k and top-p leave: those up to the limit. `whole` is what top-p is a share of, without top-k.
template <class Source>
__device__ void narrow(ChooseShared& shared, const Source& source, const Sample& sample, double whole,
                       uint64_t& limit) {
  if (sample.top_k > 0) find_limit<false, true>(shared.bins, source, sample.top_k, limit);
  if (sample.how.top_p >= 1.f) return;
  if (sample.top_k > 0) {
    uint64_t own = 0;
    source([&](bool is_in, uint64_t key) { own += is_in && key <= limit ? mass_of(weight_of(key)) : 0; });
    whole = static_cast<double>(block_sum_mass(own, shared.sums)) / UNIT;
  }
  // By rounding alone all together can be less than their share: then all of them stay.
  find_limit<true, false>(shared.bins, source, needed_mass(sample.how.top_p, whole), limit);
}

// Finite or -infinity, greatest first, then the lower id.
__device__ uint64_t ranked_logit(int id, float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.f);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

__device__ int draw(const Arguments& in, const Sample& sample, int index, const Survey& survey,
                    ChooseShared& shared) {
  const Key key(sample.how.seed, sample.output_len);
  Race race;
  const Cut cut = sample.is_restricted ? in.scratch.cuts[index] : Cut{};
  if (!sample.is_restricted || cut.mode == Cut::LIST_LAST) {
    if (threadIdx.x < in.slices) {
      const Winner winner = in.scratch.winners[index * SLICES_MAX + threadIdx.x];
      race.meet_exactly(winner.arrival, winner.token);
    }
  }
  if (sample.is_restricted) {
    const int vocabulary = in.args.vocabulary;
    const float* values = values_of(in, sample, index);
    const float temperature = sample.how.temperature, min_p = sample.how.min_p;
    const int listed = in.scratch.list_count[index];
    const uint64_t* list = in.scratch.list + static_cast<int64_t>(index) * LIST_MAX;
    auto from_list = [&](auto visit) {
      for (int first = 0; first < listed; first += CHOOSE_THREADS) {
        const int i = first + threadIdx.x;
        visit(i < listed, i < listed ? list[i] : 0);
      }
    };
    auto from_row = [&](auto visit) {
      for (int first = 0; first < vocabulary; first += CHOOSE_THREADS) {
        const int id = first + threadIdx.x;
        const float weight = id < vocabulary ? weigh(values[id], survey.best, temperature) : 0.f;
        visit(weight > 0.f && weight >= min_p, ranked(id, weight));
      }
    };
    double whole = 0.0;
    if (sample.top_k == 0) {
      whole = sum_runs(in.scratch.totals + index * RUNS_MAX, (vocabulary + RUN - 1) / RUN, shared.runs,
                       &shared.total);
    }
    uint64_t limit = ~uint64_t{0};
    auto race_among = [&](auto& source) {
      source([&](bool is_in, uint64_t token) {
        if (is_in && token <= limit) race.meet(key, static_cast<int>(token), weight_of(token));
      });
    };
    if (cut.mode == Cut::LIST_ALL) {
      narrow(shared, from_list, sample, whole, limit);
      race_among(from_list);
    } else if (cut.mode == Cut::LIST_LAST) {
      find_limit<true, false>(shared.bins, from_list, cut.need, limit);
      race_among(from_list);
    } else {
      narrow(shared, from_row, sample, whole, limit);
      race_among(from_row);
    }
  }
  race.join_block(shared.winners);
  if (threadIdx.x == 0) shared.winners[0] = {race.arrival, race.token, 0};
  __syncthreads();
  return shared.winners[0].token;
}

__device__ void report_logprobs(const Arguments& in, const Sample& sample, int index, const Survey& survey,
                                int token, ChooseShared& shared, baton_sample_result& result) {
  const int vocabulary = in.args.vocabulary;
  const float* raw = raw_row(in, index);
  const double total =
      log(sum_runs(in.scratch.raw_totals + index * RUNS_MAX, (vocabulary + RUN - 1) / RUN, shared.runs,
                   &shared.total));
  auto logprob = [&](int id) {
    return static_cast<float>(static_cast<double>(raw[id]) - static_cast<double>(survey.raw_best) - total);
  };
  result.logprob = logprob(token);
  const int count = min(min(sample.how.logprobs, BATON_TOP_LOGPROBS_MAX), vocabulary);
  result.top_count = count;
  if (count <= 0) return;
  auto source = [&](auto visit) {
    for (int first = 0; first < vocabulary; first += CHOOSE_THREADS) {
      const int id = first + threadIdx.x;
      visit(id < vocabulary, id < vocabulary ? ranked_logit(id, raw[id]) : 0);
    }
  };
  // The greatest logits of `count` slices are as many tokens, so nobody below the least of those is among the best.
  if (threadIdx.x == 0) {
    shared.near_count = in.slices >= count ? 0 : NEAR_MAX + 1;
    shared.top_count = 0;
  }
  __syncthreads();
  if (in.slices >= count) {
    const Survey* surveys = in.scratch.surveys + index * SLICES_MAX;
    if (threadIdx.x < in.slices) {
      const float own = surveys[threadIdx.x].raw_best;
      int place = 0;
      for (int i = 0; i < in.slices; ++i) {
        const float other = surveys[i].raw_best;
        place += other > own || (other == own && i < threadIdx.x);
      }
      if (place == count - 1) shared.near_bound = own;
    }
    __syncthreads();
    const float bound = shared.near_bound;
#pragma unroll 8
    for (int id = threadIdx.x; id < vocabulary; id += CHOOSE_THREADS) {
      const float logit = raw[id];
      if (logit >= bound) {
        const int to = atomicAdd(&shared.near_count, 1);
        if (to < NEAR_MAX) shared.near[to] = ranked_logit(id, logit);
      }
    }
    __syncthreads();
  }
  auto from_near = [&](auto visit) {
    for (int first = 0; first < shared.near_count; first += CHOOSE_THREADS) {
      const int i = first + threadIdx.x;
      visit(i < shared.near_count, i < shared.near_count ? shared.near[i] : 0);
    }
  };
  uint64_t limit = ~uint64_t{0};
  auto take = [&](const auto& from) {
    find_limit<false, false>(shared.bins, from, count, limit);
    from([&](bool is_in, uint64_t key) {
      if (is_in && key <= limit) {
        const int to = atomicAdd(&shared.top_count, 1);
        if (to < BATON_TOP_LOGPROBS_MAX) shared.top[to] = key;
      }
    });
  };
  if (shared.near_count <= NEAR_MAX) {
    take(from_near);
  } else {
    take(source);
  }
  __syncthreads();
  if (threadIdx.x < count) {
    const uint64_t own = shared.top[threadIdx.x];
    int place = 0;
    for (int i = 0; i < count; ++i) place += shared.top[i] < own;
    const int id = static_cast<int>(own);
    in.args.top[static_cast<int64_t>(index) * BATON_TOP_LOGPROBS_MAX + place] = {id, logprob(id)};
  }
}

__global__ void __launch_bounds__(CHOOSE_THREADS) choose_kernel(const Arguments in) {
  __shared__ ChooseShared shared;
  successor_may_start();
  predecessor_done();
  const int index = blockIdx.x;
  const Sample sample = in.scratch.samples[index];
  baton_sample_result result = {};
  result.slot = sample.slot;
  if (sample.slot < 0) {
    result.token = -1;
    if (threadIdx.x == 0) in.args.results[index] = result;
    return;
  }
  baton_slot& slot = in.pool.slots[sample.slot];
  result.position = sample.position;
  result.step_id = static_cast<uint32_t>(in.step.counts[4]);
  const Survey survey = whole_survey(in, index, &shared.survey);
  const int failed_before = slot.failed;
  const int length = slot.length;
  __syncthreads();  // before the first thread changes the slot
  result.status = failed_before ? failed_before : status_of(survey);
  if (result.status == BATON_SAMPLE_OK) {
    result.token = sample.is_greedy ? survey.best_id : draw(in, sample, index, survey, shared);
    if (sample.how.logprobs >= 0) report_logprobs(in, sample, index, survey, result.token, shared, result);
  } else {
    result.token = -1;
    if (result.status == BATON_SAMPLE_BAD_LOGIT && !failed_before) {
      const bool is_raw = survey.raw_bad != NOBODY;
      result.token = is_raw ? survey.raw_bad : survey.bad;
      result.logprob = is_raw ? raw_row(in, index)[result.token] : values_of(in, sample, index)[result.token];
    }
  }
  if (threadIdx.x == 0) {
    in.args.results[index] = result;
    if (result.status != BATON_SAMPLE_OK) slot.failed = result.status;
    if (sample.position + 1 == length && length < in.pool.token_width) {
      // A sequence that failed goes on with token 0 until the host stops it: what the next step reads is an id.
      in.pool.tokens[static_cast<int64_t>(sample.slot) * in.pool.token_width + length] =
          result.status == BATON_SAMPLE_OK ? result.token : 0;
      slot.length = length + 1;
    }
  }
}

}  // namespace

int32_t load_sample() {
  BATON_TRY(load(history_kernel));
  BATON_TRY(load(survey_kernel));
  BATON_TRY(load(weigh_kernel));
  BATON_TRY(load(gather_kernel));
  return load(choose_kernel);
}

}  // namespace baton

using namespace baton;

BATON_API uint64_t baton_sample_scratch_bytes(int32_t samples_max, int32_t vocabulary) {
  Scratch scratch;
  if (samples_max < 0 || vocabulary < 0) return 0;
  return lay_out(nullptr, samples_max, vocabulary, scratch);
}

BATON_API int32_t baton_sample(const baton_pool* pool, const baton_step* step, const baton_sample_args* args,
                               void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(pool && step && args, "pool, step or args is null");
    BATON_REQUIRE(args->vocabulary > 0 && args->vocabulary <= RUN * RUNS_MAX, "vocabulary is %d; allowed is 1 to %d",
                  args->vocabulary, RUN * RUNS_MAX);
    BATON_REQUIRE(args->logit_stride % 4 == 0 && args->logit_stride >= args->vocabulary,
                  "logit_stride is %lld; allowed are multiples of 4 from the vocabulary, %d, on",
                  static_cast<long long>(args->logit_stride), args->vocabulary);
    BATON_REQUIRE(args->samples >= 0 && args->samples <= step->samples_max, "samples is %d; allowed is 0 to %d",
                  args->samples, step->samples_max);
    if (args->samples == 0) return BATON_OK;
    Arguments in = {*pool, *step, *args};
    // By the most samples, so that calls with fewer find the counts at the same places.
    const uint64_t needed =
        lay_out(static_cast<char*>(args->scratch), step->samples_max, args->vocabulary, in.scratch);
    if (args->scratch == nullptr || args->scratch_bytes < needed) {
      return fail(BATON_TOO_SMALL, "scratch_bytes is %llu; %d samples of %d tokens need %llu",
                  static_cast<unsigned long long>(args->scratch_bytes), step->samples_max, args->vocabulary,
                  static_cast<unsigned long long>(needed));
    }
    const int runs = divide_up(args->vocabulary, RUN);
    // Enough blocks for every multiprocessor, few enough that putting slices together stays cheap.
    int slices = divide_up(2048, args->samples);
    slices = slices < runs ? slices : runs;
    slices = slices < SLICES_MAX ? slices : SLICES_MAX;
    in.slice_runs = divide_up(runs, slices);
    in.slices = divide_up(runs, in.slice_runs);
    const dim3 grid(in.slices, args->samples);
    const cudaStream_t on = as_stream(stream);
    BATON_TRY(launch("sampling: history", history_kernel, dim3(4, args->samples), dim3(SLICE_THREADS), 0, on, in));
    BATON_TRY(launch("sampling: survey", survey_kernel, grid, dim3(SLICE_THREADS), 0, on, in));
    BATON_TRY(launch("sampling: weigh", weigh_kernel, grid, dim3(SLICE_THREADS), 0, on, in));
    BATON_TRY(launch("sampling: gather", gather_kernel, grid, dim3(SLICE_THREADS), 0, on, in));
    return launch("sampling: choose", choose_kernel, dim3(args->samples), dim3(CHOOSE_THREADS), 0, on, in);
  });
}
