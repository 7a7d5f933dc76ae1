// Sampling: one CTA per sample chooses the token and reports it. sample.cuh describes the previous kernels.
// Compiled without fused multiply-adds: weights, totals and the comparison with top_p are bitwise equal to the CPU's.
// A draw differs from the CPU's only where logits differ.
#include "sample_weights.cuh"

namespace baton::sampling {
namespace {

// Adds to bins, a whole warp at a time; lanes without a key pass is_in = false. Equal bins are combined within the warp
// first, since most tokens of a row share a few bins.
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

struct Bins {
  uint64_t mass[BINS];
  uint32_t count[BINS];
  uint64_t before;  // tokens or mass of the bins before `found`
  int found;        // -1: all bins together hold less than is needed
};

// Finds the greatest key of the shortest sorted prefix that holds `need` (tokens, or mass); false when all keys up to
// `limit` hold less. `source(visit)` calls visit(is_in, key) for every key, whole warps at a time. With `WHOLE_TIES`,
// keys with equal upper halves are kept together.
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
      // Eight bins per lane.
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
    // Possible for the first digit only: the bin that a digit finds holds enough for the next digit.
    if (bins.found < 0) return false;
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

// Returns the limit of the tokens that top-k and top-p keep. Without top-k, `whole` is the total of top-p's share.
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
  // Rounding may make the total less than the share: then all tokens stay.
  find_limit<true, false>(shared.bins, source, needed_mass(sample.how.top_p, whole), limit);
}

__device__ int draw(const Arguments& in, const Sample& sample, int index, const Survey& survey,
                    ChooseShared& shared) {
  const Key key(sample.how.seed, sample.output_len);
  Race race;
  const Cut cut = sample.is_restricted ? in.scratch.cuts[index] : Cut{};
  if (!sample.is_restricted || cut.mode == Cut::LIST_LAST) {
    if (threadIdx.x < in.slices) {
      const Winner winner = in.scratch.winners[index * SLICES_MAX + threadIdx.x];
      race.offer_exactly(winner.arrival, winner.token);
    }
  }
  if (sample.is_restricted) {
    const int vocabulary = in.args.vocabulary;
    const bool is_shared = in.shares.ranks > 1;
    // The other ranks' tokens are present for rows without a list.
    const float* values = is_shared ? adjusted_row(in, index) : values_of(in, sample, index);
    const float temperature = sample.how.temperature, min_p = sample.how.min_p;
    const int listed = (is_shared ? in.scratch.listed : in.scratch.list_count)[index];
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
        if (is_in && token <= limit) race.offer(key, static_cast<int>(token), weight_of(token));
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

// Finds the `count` greatest logits of this rank's part, into shared.top.
__device__ void find_top(const Arguments& in, int index, int count, ChooseShared& shared) {
  const float* raw = raw_row(in, index);
  auto source = [&](auto visit) {
    for (int first = in.first; first < in.end; first += CHOOSE_THREADS) {
      const int id = first + threadIdx.x;
      visit(id < in.end, id < in.end ? ranked_logit(id, raw[id]) : 0);
    }
  };
  // The greatest logits of `count` slices are `count` tokens, so no token below the least of these is among the best.
  const int slices = in.slice_count;
  if (threadIdx.x == 0) {
    shared.near_count = slices >= count ? 0 : NEAR_MAX + 1;
    shared.top_count = 0;
  }
  __syncthreads();
  if (slices >= count) {
    const Survey* surveys = in.scratch.surveys + index * SLICES_MAX + in.slice_first;
    if (threadIdx.x < slices) {
      const float own = surveys[threadIdx.x].raw_best;
      int place = 0;
      for (int i = 0; i < slices; ++i) {
        const float other = surveys[i].raw_best;
        place += other > own || (other == own && i < threadIdx.x);
      }
      if (place == count - 1) shared.near_bound = own;
    }
    __syncthreads();
    const float bound = shared.near_bound;
#pragma unroll 8
    for (int id = in.first + threadIdx.x; id < in.end; id += CHOOSE_THREADS) {
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
}

__device__ void report_logprobs(const Arguments& in, const Sample& sample, int index, const Survey& survey,
                                int token, ChooseShared& shared, baton_sample_result& result) {
  const float* raw = raw_row(in, index);
  const int count = top_count(in, sample);
  if (in.shares.ranks > 1) {
    // The rank's contribution; after the exchange all contributions form the result.
    Reported& own = in.scratch.reported[index * in.shares.ranks + in.shares.rank];
    if (count > 0) find_top(in, index, count, shared);
    if (threadIdx.x == 0) {
      own.raw = token >= in.first && token < in.end ? raw[token] : 0.f;
      own.greater = in.scratch.list_count[index];
    }
    if (threadIdx.x < count) {
      const int id = static_cast<int>(shared.top[threadIdx.x]);
      own.top[threadIdx.x] = {id, raw[id]};
    }
    return;
  }
  const double total = log_total(in, index, shared.runs, &shared.total);
  result.logprob = logprob(raw[token], survey, total);
  result.top_count = count;
  if (sample.given >= 0) result.detail = -1 - in.scratch.list_count[index];
  if (count <= 0) return;
  find_top(in, index, count, shared);
  if (threadIdx.x < count) {
    const uint64_t own = shared.top[threadIdx.x];
    int place = 0;
    for (int i = 0; i < count; ++i) place += shared.top[i] < own;
    const int id = static_cast<int>(own);
    in.args.top[static_cast<int64_t>(index) * BATON_TOP_LOGPROBS_MAX + place] = {id, logprob(raw[id], survey, total)};
  }
}

__global__ void __launch_bounds__(CHOOSE_THREADS) choose_kernel(const Arguments in) {
  __shared__ ChooseShared shared;
  pdl_wait_and_release();
  const int index = blockIdx.x;
  const Sample sample = in.scratch.samples[index];
  if (sample.slot < 0) {
    if (threadIdx.x == 0) in.args.results[index] = padding_result();
    return;
  }
  const Survey survey = whole_survey(in, index, &shared.survey);
  const baton_slot slot = in.pool.slots[sample.slot];
  __syncthreads();  // before the first thread changes the slot
  baton_sample_result result = begin_result(in, sample, index, survey, slot.failed);
  if (result.status == BATON_SAMPLE_OK) {
    result.token = sample.given >= 0  ? sample.given
                   : sample.is_greedy ? survey.best_id
                                      : draw(in, sample, index, survey, shared);
    if (in.shares.ranks > 1) {
      result.detail = in.scratch.cuts[index].mode == Cut::NO_LIST;
      if (is_reported_together(sample, result)) {
        report_logprobs(in, sample, index, survey, result.token, shared, result);
        if (threadIdx.x == 0) in.args.results[index] = result;
        return;
      }
    } else if (sample.how.logprobs >= 0) {
      report_logprobs(in, sample, index, survey, result.token, shared, result);
    }
  }
  if (threadIdx.x == 0) deliver(in, sample, index, result, slot.length);
}

}  // namespace

int32_t load_choose() { return load(choose_kernel); }
int32_t launch_choose(const Arguments& in, cudaStream_t stream) {
  return launch("sampling: choose", choose_kernel, dim3(in.args.samples), dim3(CHOOSE_THREADS), 0, stream, in);
}

}  // namespace baton::sampling
