// Sampling: draws tokens, and lists the tokens at the cut of top-k or top-p. sample.cuh describes the kernels before
// and after. Compiled without fused multiply-adds: weights, totals and the comparison with top_p are bitwise equal to
// the CPU's. A draw differs from the CPU's only where logits differ.
#include "sample_weights.cuh"

namespace baton::sampling {
namespace {

// Returns the sum of a run's weights in the CPU's order: 16 lanes, then a tree. Called by 16 adjacent threads.
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

// Bins of likelihood. With d the distance of a weight's bits below the bits of 1.f, bin i holds the weights with
// i * 2^20 <= d < (i + 1) * 2^20. So bin 0 holds the likeliest tokens, and within a bin a weight is linear in its bits.
constexpr int LEVEL_BITS = 20;
constexpr int ONE_BITS = 0x3f800000;
__device__ int below_one(float weight) { return max(ONE_BITS - __float_as_int(weight), 0); }
__device__ int level_of(float weight) { return below_one(weight) >> LEVEL_BITS; }
// Returns the least weight of a bin; 0 beyond the last bin.
__device__ float level_edge(int level) {
  return __int_as_float(max(ONE_BITS - ((level + 1) << LEVEL_BITS) + 1, 0));
}

// Returns the mass (sum) of `number` weights of one bin. `distance` is the sum of the distances of their bits below the
// bits of the bin's greatest weight.
__device__ uint64_t level_mass(int level, uint32_t number, uint64_t distance) {
  const int below = ONE_BITS - (level << LEVEL_BITS) - 1;
  const uint64_t greatest = ((below & 0x7fffff) | 0x800000) + 1;  // in units of the last place below it
  const uint64_t mass = number * greatest - distance;
  const int shift = (below >> 23) - 127 - 23 + UNIT_BITS;
  return shift >= 0 ? mass << shift : shift > -64 ? mass >> -shift : 0;
}

// Loads four adjacent tokens of each of several runs, so that many loads are in flight. Skips tokens past the row.
constexpr int TOGETHER = 4;
__device__ void load_runs(const Arguments& in, const float* row, int run, float4 (&loaded)[TOGETHER]) {
#pragma unroll
  for (int k = 0; k < TOGETHER; ++k) {
    const int id = run_first(in, run + k) + threadIdx.x * 4;
    if (run + k < in.slice_runs && id < in.end) loaded[k] = *reinterpret_cast<const float4*>(row + id);
  }
}

// Calls visit(k, id, is_in, value) for every token of the loaded runs; is_in is false past the row. All threads call
// it.
template <class Visit>
__device__ void visit_runs(const Arguments& in, int run, const float4 (&loaded)[TOGETHER], const Visit& visit) {
#pragma unroll
  for (int k = 0; k < TOGETHER; ++k) {
    const int first = run_first(in, run + k);
    if (run + k >= in.slice_runs || first >= in.end) break;
    const int id = first + threadIdx.x * 4;
    const float values[4] = {loaded[k].x, loaded[k].y, loaded[k].z, loaded[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(k, id + i, id + i < in.end, values[i]);
  }
}

// Sums the runs whose weights are in shared memory, one warp per run.
__device__ void total_runs(const Arguments& in, int run, const float (&weights)[TOGETHER][RUN], float floor,
                           float* totals) {
  __syncthreads();
  const int k = threadIdx.x / WARP;
  const int first = run_first(in, run + k);
  if (k < TOGETHER && run + k < in.slice_runs && first < in.end) {
    const float total = run_total(weights[k], floor);
    if (threadIdx.x % WARP == 0) totals[first / RUN] = total;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(SLICE_THREADS) weigh_kernel(const Arguments in) {
  __shared__ Survey survey_shared;
  __shared__ Winner winners[SLICE_THREADS / WARP];
  __shared__ float weights[TOGETHER][RUN];
  // For each bin: the number of weights, and the sum of their distances below the bin's greatest, in two parts.
  __shared__ uint32_t numbers[LEVELS], far_low[LEVELS], far_high[LEVELS];
  constexpr int PART_BITS = LEVEL_BITS / 2, PART = (1 << PART_BITS) - 1;
  pdl_wait_and_release();
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
  int greater = 0;
  // The arrival of the likeliest token is the first bound, which makes the quick test selective. The slice of this
  // token draws it again.
  if (wants_race) race.offer(key, survey.best_id, weigh(survey.best, survey.best, temperature));
  const float sharpness = 1.f / temperature;
  if (sample.is_restricted) {
    for (int i = threadIdx.x; i < LEVELS; i += SLICE_THREADS) numbers[i] = far_low[i] = far_high[i] = 0;
    __syncthreads();
  }

  for (int run = 0; run < in.slice_runs; run += TOGETHER) {
    float4 loaded[TOGETHER];
    load_runs(in, values, run, loaded);
    if (wants_race) {
      race.read_bound(in.scratch.bounds + index);
      visit_runs(in, run, loaded, [&](int, int id, bool is_in, float logit) {
        // The quick test uses an approximate exponential; only tokens that pass need the exact one.
        const float rough = __expf((logit - survey.best) * sharpness) * 1.001f;
        const float v = static_cast<float>(key.bits(id) >> 8) * (1.f / 16777216.f);
        if (is_in && v <= rough * race.bound) {
          const float weight = weigh(logit, survey.best, temperature);
          if (weight > 0.f && weight >= min_p) race.offer(key, id, weight);
        }
      });
      race.write_bound(in.scratch.bounds + index);
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
        greater += is_in && logit > survey.given;
      });
      total_runs(in, run, weights, 0.f, in.scratch.raw_totals + index * RUNS_MAX);
    }
  }
  if (sample.given >= 0) {
    greater = __reduce_add_sync(FULL, greater);
    if (threadIdx.x % WARP == 0) atomicAdd(in.scratch.list_count + index, greater);
  }
  if (sample.is_restricted) {
    __syncthreads();
    const int64_t own = (static_cast<int64_t>(index) * in.shares.ranks + in.shares.rank) * LEVELS;
    for (int i = threadIdx.x; i < LEVELS; i += SLICE_THREADS) {
      if (numbers[i] == 0) continue;
      atomicAdd(in.scratch.numbers + own + i, numbers[i]);
      if (wants_total) {
        const uint64_t distance = (static_cast<uint64_t>(far_high[i]) << PART_BITS) + far_low[i];
        atomicAdd(reinterpret_cast<unsigned long long*>(in.scratch.distances + own + i),
                  static_cast<unsigned long long>(distance));
      }
    }
  }
  if (wants_race) {
    race.join_block(winners);
    if (threadIdx.x == 0) in.scratch.winners[index * SLICES_MAX + in.slice_first + blockIdx.x] = {race.arrival, race.token, 0};
  }
}

struct CutShared {
  float runs[RUNS_MAX];
  double whole;
  uint64_t amounts[SLICE_THREADS / WARP];
  uint32_t numbers[SLICE_THREADS / WARP];
  Cut cut;
};

// Finds the level (bin) at which top-k is reached, or top-p if there is no top-k. All threads of the CTA call it.
__device__ Cut find_cut(const Arguments& in, const Sample& sample, int index, CutShared& shared) {
  constexpr int EACH = LEVELS / SLICE_THREADS;
  const bool by_mass = sample.top_k == 0;
  const int64_t all = static_cast<int64_t>(index) * in.shares.ranks * LEVELS;
  uint64_t need = sample.top_k;
  if (by_mass) {
    const int runs = (in.args.vocabulary + RUN - 1) / RUN;
    need = needed_mass(sample.how.top_p,
                       sum_runs(in.scratch.totals + index * RUNS_MAX, runs, shared.runs, &shared.whole));
  }
  uint32_t numbers[EACH] = {}, own_number = 0;
  uint64_t distances[EACH] = {}, amounts[EACH], own = 0;
  for (int rank = 0; rank < in.shares.ranks; ++rank) {
    const int64_t at = all + rank * LEVELS + threadIdx.x * EACH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      numbers[i] += in.scratch.numbers[at + i];
      if (by_mass) distances[i] += in.scratch.distances[at + i];
    }
  }
  for (int i = 0; i < EACH; ++i) {
    amounts[i] = by_mass ? level_mass(threadIdx.x * EACH + i, numbers[i], distances[i]) : numbers[i];
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
  pdl_wait_and_release();
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
    race.read_bound(in.scratch.bounds + index);
    visit_runs(in, run, loaded, [&](int, int id, bool is_in, float logit) {
      // The quick test uses an approximate exponential: most tokens are far below the edge.
      is_in = is_in && __expf((logit - survey.best) * sharpness) * 1.001f >= edge;
      float weight = 0.f;
      int level = LEVELS + 1;
      if (is_in) {
        weight = weigh(logit, survey.best, temperature);
        if (weight > 0.f && weight >= min_p) level = level_of(weight);
      }
      if (cut.mode == Cut::LIST_LAST && level < cut.level) race.offer(key, id, weight);
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
    if (cut.mode == Cut::LIST_LAST) race.write_bound(in.scratch.bounds + index);
  }
  if (cut.mode == Cut::LIST_LAST) {
    race.join_block(winners);
    if (threadIdx.x == 0) in.scratch.winners[index * SLICES_MAX + in.slice_first + blockIdx.x] = {race.arrival, race.token, 0};
  }
}

}  // namespace

int32_t load_draw() {
  BATON_TRY(load(weigh_kernel));
  return load(gather_kernel);
}
int32_t launch_weigh(const Arguments& in, cudaStream_t stream) {
  return launch("sampling: weigh", weigh_kernel, dim3(in.slice_count, in.args.samples), dim3(SLICE_THREADS), 0, stream, in);
}
int32_t launch_gather(const Arguments& in, cudaStream_t stream) {
  return launch("sampling: gather", gather_kernel, dim3(in.slice_count, in.args.samples), dim3(SLICE_THREADS), 0, stream, in);
}

}  // namespace baton::sampling
