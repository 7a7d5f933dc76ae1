// Sampling by the rules of kernels/src/sampling.rs. This file has the entry points and three kernels: `history` counts
// tokens for penalties, `rules` builds the bitmask of allowed tokens, and `survey` finds the greatest logit. sample.cuh
// describes all kernels.
//
// Compiled without fused multiply-adds, so that token probabilities and their sums are bitwise equal to the CPU's. The
// GPU and the CPU then sample the same tokens from equal logits.
#include <algorithm>

#include "sample.cuh"

namespace baton {
namespace sampling {
namespace {

int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Sets the arrays of `scratch` to consecutive addresses from `base` on. Returns their total size in bytes.
uint64_t lay_out(char* base, int64_t ranks, int64_t samples, int64_t vocabulary, Scratch& scratch) {
  int64_t at = 0;
  auto take = [&](auto*& array, int64_t count) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + at);
    at += round_up(count * static_cast<int64_t>(sizeof(*array)));
  };
  take(scratch.counts, samples * vocabulary);
  take(scratch.arrivals, samples);
  take(scratch.allowed, samples * ((vocabulary + 31) / 32));
  take(scratch.samples, samples);
  take(scratch.adjusted, samples * ((vocabulary + 3) / 4 * 4));
  take(scratch.surveys, samples * SLICES_MAX);
  take(scratch.winners, samples * SLICES_MAX);
  take(scratch.totals, samples * RUNS_MAX);
  take(scratch.raw_totals, samples * RUNS_MAX);
  take(scratch.list, samples * LIST_MAX);
  take(scratch.list_count, samples);
  take(scratch.bounds, samples);
  take(scratch.distances, samples * ranks * LEVELS);
  take(scratch.numbers, samples * ranks * LEVELS);
  take(scratch.cuts, samples);
  if (ranks > 1) {
    take(scratch.listed, samples);
    take(scratch.reported, samples * ranks);
  }
  return at;
}

// For sequences with penalties, counts how often each token occurs in the output, and marks prompt tokens (IN_PROMPT).
__global__ void history_kernel(const Arguments in) {
  pdl_wait_and_release();
  const int index = blockIdx.y;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  const Sample sample = find_sample(in, index);
  if (sample.slot < 0 || !sample.is_penalised) return;
  const int32_t* tokens = in.pool.tokens + static_cast<int64_t>(sample.slot) * in.pool.token_width;
  uint32_t* counts = in.scratch.counts + static_cast<int64_t>(index) * in.args.vocabulary;
  const int end = sample.position + 1;
  const int prompt = min(sample.how.prompt_len, end);
  // Prompt tokens matter to the repetition penalty only.
  const int begin = sample.how.repetition_penalty != 1.f ? 0 : prompt;
  for (int i = begin + thread; i < end; i += threads) {
    const int token = tokens[i];
    if (token < in.first || token >= in.end) continue;
    if (i < prompt) {
      atomicOr(counts + token, IN_PROMPT);
    } else {
      atomicAdd(counts + token, 1u);
    }
  }
}

// Returns whether the sequence's output ends with the `count` tokens at `word`.
__device__ bool ends_with(const Arguments& in, const Sample& sample, const uint32_t* word, int count) {
  if (count > sample.output_len) return false;
  const int32_t* tokens = in.pool.tokens + static_cast<int64_t>(sample.slot) * in.pool.token_width;
  const int32_t* end = tokens + sample.position + 1;
  for (int i = 1; i <= count; ++i) {
    if (static_cast<uint32_t>(end[-i]) != word[count - i]) return false;
  }
  return true;
}

// Writes the bitmask of the tokens that a sample may choose: the listed tokens, or all tokens without a list. If the
// output ends with all tokens of a bad word but the last, the bitmask excludes that last token. One CTA per sample.
__global__ void __launch_bounds__(SLICE_THREADS) rules_kernel(const Arguments in) {
  constexpr uint32_t ENDS_WORD = 1u << 31;  // flag of the last token of a bad word
  pdl_wait_and_release();
  const Sample sample = find_sample(in, blockIdx.x);
  if (sample.slot < 0 || !sample.is_ruled) return;
  const int mask_words = (in.args.vocabulary + 31) / 32;
  const uint32_t* bad = rules_of(in, sample) + 2 * sample.how.bias_count;
  const uint32_t* allow_list = bad + sample.how.bad_count;
  uint32_t* allowed = allowed_row(in, blockIdx.x);
  for (int i = threadIdx.x; i < mask_words; i += SLICE_THREADS) allowed[i] = sample.how.is_listed ? allow_list[i] : ~0u;
  __syncthreads();
  for (int begin = threadIdx.x; begin < sample.how.bad_count; begin += SLICE_THREADS) {
    if (begin > 0 && !(bad[begin - 1] & ENDS_WORD)) continue;
    int last = begin;
    while (last + 1 < sample.how.bad_count && !(bad[last] & ENDS_WORD)) ++last;
    const uint32_t token = bad[last] & ~ENDS_WORD;
    if (token < static_cast<uint32_t>(in.args.vocabulary) && ends_with(in, sample, bad + begin, last - begin)) {
      atomicAnd(allowed + token / 32, ~(1u << (token % 32)));
    }
  }
}

// Applies the penalties to the logit of a token that occurs in the prompt or the output.
__device__ float penalise(const baton_sampling& how, uint32_t count, float logit) {
  const float repeated = logit > 0.f ? logit / how.repetition_penalty : logit * how.repetition_penalty;
  const uint32_t occurrences = count & ~IN_PROMPT;  // in the output
  float changed = repeated - how.frequency_penalty * static_cast<float>(occurrences);
  if (occurrences > 0) changed -= how.presence_penalty;
  return changed;
}

// Initializes the scratch memory of a sample for the kernels after `survey`.
__device__ void begin_sample(const Arguments& in, const Sample& sample, int index) {
  const int thread = blockIdx.x * SLICE_THREADS + threadIdx.x;
  if (thread == 0) {
    in.scratch.samples[index] = sample;
    in.scratch.list_count[index] = 0;
    in.scratch.bounds[index] = __float_as_int(INFINITY);
    in.scratch.cuts[index].mode = Cut::NO_CUT;
  }
  if (sample.slot < 0 || !sample.is_restricted) return;
  const int64_t own_bins = (static_cast<int64_t>(index) * in.shares.ranks + in.shares.rank) * LEVELS;
  for (int i = thread; i < LEVELS; i += gridDim.x * SLICE_THREADS) {
    in.scratch.distances[own_bins + i] = 0;
    in.scratch.numbers[own_bins + i] = 0;
  }
}

// Writes the token of a greedy sample. The first warp of every CTA calls this, but only the CTA that finishes last
// combines the surveys of all slices.
__device__ void finish_greedy(const Arguments& in, const Sample& sample, int index) {
  int finishes_last = 0;
  if (threadIdx.x == 0) {
    __threadfence();
    finishes_last = atomicAdd(in.scratch.arrivals + index, 1u) == static_cast<uint32_t>(in.slices) - 1;
  }
  if (!__shfl_sync(FULL, finishes_last, 0)) return;
  __threadfence();
  Survey whole = nothing_seen();
  for (int slice = threadIdx.x; slice < in.slices; slice += WARP) {
    whole = join(whole, in.scratch.surveys[index * SLICES_MAX + slice]);
  }
  whole = join_warp(whole);
  if (threadIdx.x != 0) return;
  in.scratch.arrivals[index] = 0;
  const baton_slot slot = in.pool.slots[sample.slot];
  baton_sample_result result = begin_result(in, sample, index, whole, slot.failed);
  if (result.status == BATON_SAMPLE_OK) result.token = whole.best_id;
  deliver(in, sample, index, result, slot.length);
}

// Applies bitmasks, min_tokens, penalties and biases to a slice of a row, and summarizes the logits in a Survey.
// WRITES_TOKEN: this kernel also writes the tokens, because no row draws or reports log-probabilities.
// HAS_RULES: some row may have biases, bad words or listed tokens.
template <bool WRITES_TOKEN, bool HAS_RULES>
__global__ void __launch_bounds__(SLICE_THREADS) survey_kernel(const Arguments in) {
  __shared__ uint32_t stops[RUN / 32];
  __shared__ float biases[HAS_RULES ? RUN : 1];
  __shared__ Survey shared[SLICE_THREADS / WARP];
  pdl_wait_and_release();
  const int index = blockIdx.y;
  const Sample sample = find_sample(in, index);
  if constexpr (!WRITES_TOKEN) begin_sample(in, sample, index);
  if (sample.slot < 0) {
    if (WRITES_TOKEN && blockIdx.x == 0 && threadIdx.x == 0) in.args.results[index] = padding_result();
    return;
  }
  const int vocabulary = in.args.vocabulary;
  const float* raw = raw_row(in, index);
  float* adjusted = adjusted_row(in, index);
  uint32_t* counts = in.scratch.counts + static_cast<int64_t>(index) * vocabulary;
  const uint32_t* mask =
      sample.mask >= 0 ? in.args.masks + static_cast<int64_t>(sample.mask) * ((vocabulary + 31) / 32) : nullptr;
  const uint32_t* allowed = HAS_RULES && sample.is_ruled ? allowed_row(in, index) : nullptr;
  const uint32_t* rules = rules_of(in, sample);
  const int32_t* stop_tokens = in.pool.stop_tokens + static_cast<int64_t>(sample.slot) * in.pool.stop_width;

  Survey own = nothing_seen();
  const int offset = threadIdx.x * 4;  // a run has four tokens for each thread
  constexpr int RUNS_TOGETHER = 4;     // runs that are loaded before one is processed, so that many loads are in flight
  for (int run = 0; run < in.slice_runs; run += RUNS_TOGETHER) {
    float4 loaded[RUNS_TOGETHER];
#pragma unroll
    for (int k = 0; k < RUNS_TOGETHER; ++k) {
      const int id = run_first(in, run + k) + offset;
      if (run + k < in.slice_runs && id < in.end) loaded[k] = *reinterpret_cast<const float4*>(raw + id);
    }
#pragma unroll
    for (int k = 0; k < RUNS_TOGETHER; ++k) {
      const int first = run_first(in, run + k);
      if (run + k >= in.slice_runs || first >= in.end) break;
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
      if (HAS_RULES && sample.how.bias_count > 0) {
        __syncthreads();
        for (int i = threadIdx.x; i < RUN; i += blockDim.x) biases[i] = 0.f;
        __syncthreads();
        for (int i = threadIdx.x; i < sample.how.bias_count; i += blockDim.x) {
          const int token = static_cast<int>(rules[2 * i]) - first;
          if (token >= 0 && token < RUN) biases[token] = __uint_as_float(rules[2 * i + 1]);
        }
        __syncthreads();
      }
      const int id = first + offset;
      const float values[4] = {loaded[k].x, loaded[k].y, loaded[k].z, loaded[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (id + i >= in.end) break;
        float value = values[i];
        if (is_bad(value)) own.raw_bad = min(own.raw_bad, id + i);
        own.raw_best = value > own.raw_best ? value : own.raw_best;
        if (sample.is_adjusted) {
          if (mask && !(mask[(id + i) / 32] >> ((id + i) % 32) & 1)) value = -INFINITY;
          if (allowed && !(allowed[(id + i) / 32] >> ((id + i) % 32) & 1)) value = -INFINITY;
          if (sample.is_min_masked && (stops[(offset + i) / 32] >> ((offset + i) % 32) & 1)) value = -INFINITY;
          if (sample.is_penalised) {
            const uint32_t count = counts[id + i];
            if (count != 0) {
              counts[id + i] = 0;
              value = penalise(sample.how, count, value);
            }
          }
          if (HAS_RULES && sample.how.bias_count > 0) value += biases[offset + i];
          adjusted[id + i] = value;
        }
        if (is_bad(value)) {
          own.bad = min(own.bad, id + i);
        } else if (value > own.best) {  // a thread visits ids in ascending order, so the lowest id wins a tie
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
    if (own.raw_bad != NO_TOKEN) own.raw_bad_value = raw[own.raw_bad];
    if (sample.given >= in.first && sample.given < in.end) own.given = raw[sample.given];
    if (own.bad != NO_TOKEN) own.bad_value = sample.is_adjusted ? adjusted[own.bad] : raw[own.bad];
    in.scratch.surveys[index * SLICES_MAX + in.slice_first + blockIdx.x] = own;
  }
  if constexpr (WRITES_TOKEN) {
    if (threadIdx.x < WARP) finish_greedy(in, sample, index);
  }
}

}  // namespace

uint64_t scratch_bytes(int32_t ranks, int32_t samples_max, int32_t vocabulary) {
  Scratch scratch;
  if (ranks < 1 || ranks > RANKS_MAX || samples_max < 0 || vocabulary < 0) return 0;
  return lay_out(nullptr, ranks, samples_max, vocabulary, scratch);
}

int32_t prepare(const baton_pool* pool, const baton_step* step, const baton_sample_args* args, Shares& shares,
                Arguments& in) {
  const int32_t ranks = shares.ranks;
  BATON_REQUIRE(args->vocabulary > 0 && args->vocabulary <= RUN * RUNS_MAX, "vocabulary is %d; expected 1 to %d",
                args->vocabulary, RUN * RUNS_MAX);
  BATON_REQUIRE(shares.firsts[0] == 0 && shares.firsts[ranks] == args->vocabulary,
                "the ranks' tokens are %d to %d; expected all %d", shares.firsts[0], shares.firsts[ranks],
                args->vocabulary);
  int rank_runs_max = 1;  // runs of the rank with the most tokens
  for (int rank = 0; rank < ranks; ++rank) {
    const int first = shares.firsts[rank], end = shares.firsts[rank + 1];
    BATON_REQUIRE(first % RUN == 0, "firsts[%d] is %d; expected multiples of %d", rank, first, RUN);
    // Each rank reports up to this many of its greatest logits (Reported::top).
    const int tokens_min = ranks > 1 ? BATON_TOP_LOGPROBS_MAX : 0;
    BATON_REQUIRE(end - first >= tokens_min, "rank %d has %d tokens, from %d up to %d; expected at least %d", rank,
                  end - first, first, end, tokens_min);
    rank_runs_max = std::max(rank_runs_max, divide_up(end - first, RUN));
  }
  const int own_tokens = shares.firsts[shares.rank + 1] - shares.firsts[shares.rank];
  BATON_REQUIRE(args->logit_stride % 4 == 0 && args->logit_stride >= own_tokens,
                "logit_stride is %lld; expected multiples of 4 from the vocabulary, %d, on",
                static_cast<long long>(args->logit_stride), own_tokens);
  BATON_REQUIRE(args->samples >= 0 && args->samples <= step->samples_max, "samples is %d; expected 0 to %d",
                args->samples, step->samples_max);
  BATON_REQUIRE(args->needs >= 0 && args->needs <= BATON_NEEDS_ALL, "needs is %d; expected 0 to %d", args->needs,
                BATON_NEEDS_ALL);
  if (args->samples == 0) return BATON_OK;
  in = {*pool, *step, *args};
  // The layout uses the maximum number of samples, not this call's. So `counts` and `arrivals`, which the kernels leave
  // zero for the next call, have the same addresses in every call.
  const uint64_t needed =
      lay_out(static_cast<char*>(args->scratch), ranks, step->samples_max, args->vocabulary, in.scratch);
  if (args->scratch == nullptr || args->scratch_bytes < needed) {
    return fail(BATON_TOO_SMALL, "scratch_bytes is %llu; %d samples of %d tokens need %llu",
                static_cast<unsigned long long>(args->scratch_bytes), step->samples_max, args->vocabulary,
                static_cast<unsigned long long>(needed));
  }
  // Enough slices to give every SM a CTA, but few enough that combining their surveys stays cheap.
  const int slices = std::min({divide_up(2048 / ranks, args->samples), rank_runs_max, SLICES_MAX / ranks});
  in.slice_runs = divide_up(rank_runs_max, slices);
  shares.slices[0] = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int runs = divide_up(shares.firsts[rank + 1] - shares.firsts[rank], RUN);
    shares.slices[rank + 1] = shares.slices[rank] + divide_up(runs, in.slice_runs);
  }
  in.shares = shares;
  in.slices = shares.slices[ranks];
  in.first = shares.firsts[shares.rank], in.end = shares.firsts[shares.rank + 1];
  in.slice_first = shares.slices[shares.rank];
  in.slice_count = shares.slices[shares.rank + 1] - in.slice_first;
  return BATON_OK;
}

int32_t launch_history(const Arguments& in, cudaStream_t stream) {
  return launch("sampling: history", history_kernel, dim3(4, in.args.samples), dim3(SLICE_THREADS), 0, stream, in);
}

int32_t launch_rules(const Arguments& in, cudaStream_t stream) {
  return launch("sampling: rules", rules_kernel, dim3(in.args.samples), dim3(SLICE_THREADS), 0, stream, in);
}

int32_t launch_survey(const Arguments& in, cudaStream_t stream) {
  const auto kernel = in.args.needs & BATON_NEEDS_RULES ? survey_kernel<false, true> : survey_kernel<false, false>;
  return launch("sampling: survey", kernel, dim3(in.slice_count, in.args.samples), dim3(SLICE_THREADS), 0, stream, in);
}

}  // namespace sampling

int32_t load_sample() {
  using namespace sampling;
  BATON_TRY(load(history_kernel));
  BATON_TRY(load(rules_kernel));
  BATON_TRY(load(survey_kernel<false, false>));
  BATON_TRY(load(survey_kernel<false, true>));
  BATON_TRY(load(survey_kernel<true, false>));
  BATON_TRY(load(survey_kernel<true, true>));
  BATON_TRY(load_draw());
  return load_choose();
}

}  // namespace baton

using namespace baton;
using namespace baton::sampling;

BATON_API int32_t baton_sample(const baton_pool* pool, const baton_step* step, const baton_sample_args* args,
                               void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(pool && step && args, "pool, step or args is null");
    Shares single_rank = {0, 1, {0, args->vocabulary}, {}};
    Arguments in;
    BATON_TRY(prepare(pool, step, args, single_rank, in));
    if (args->samples == 0) return BATON_OK;
    const cudaStream_t cuda_stream = as_stream(stream);
    const bool has_draws = args->needs & BATON_NEEDS_DRAW;
    if (args->needs & BATON_NEEDS_PENALTIES) BATON_TRY(launch_history(in, cuda_stream));
    if (args->needs & BATON_NEEDS_RULES) BATON_TRY(launch_rules(in, cuda_stream));
    if (!has_draws && !(args->needs & BATON_NEEDS_LOGPROBS)) {
      const auto kernel = args->needs & BATON_NEEDS_RULES ? survey_kernel<true, true> : survey_kernel<true, false>;
      return launch("sampling: greedy", kernel, dim3(in.slice_count, args->samples), dim3(SLICE_THREADS), 0,
                    cuda_stream, in);
    }
    BATON_TRY(launch_survey(in, cuda_stream));
    BATON_TRY(launch_weigh(in, cuda_stream));
    if (has_draws && (args->needs & BATON_NEEDS_CUT)) BATON_TRY(launch_gather(in, cuda_stream));
    return launch_choose(in, cuda_stream);
  });
}
