// Shared by the sampling kernels: the parameters of a sample, intermediate results, and the result.
//
// Compiled without fused multiply-adds: weights, sums and the comparison with top_p are bitwise equal to the CPU's, so
// equal logits give equal draws.
//
// The vocabulary of a row is split into slices of whole runs. A run has 1,024 tokens, the unit in which the CPU sums
// weights. `survey`, `weigh` and `gather` have one CTA per slice. A kernel that no row of the step needs
// (baton_sample_args.needs) is not launched:
//   history  (sample.cu, penalties) counts prompt and output tokens of the sequences with penalties.
//   rules    (sample.cu, rules) writes a bitmask of the tokens that allowed_token_ids and bad_words permit.
//   survey   (sample.cu, always) applies bitmasks, min_tokens, penalties and biases, and finds the greatest logit and
//            non-finite logits. Without draws and log-probabilities, the last CTA of a row to finish writes the token.
//   weigh    (sample_draw.cu, draws and log-probabilities) draws a token by exponential arrival times. With top-k or
//            top-p it counts tokens and sums their weights per bin of likelihood instead.
//   gather   (sample_draw.cu, top-k and top-p) finds the bin that contains the cut, lists the tokens that the cut may
//            remove, and draws between the tokens that certainly stay.
//   choose   (sample_choose.cu, draws and log-probabilities) has one CTA per sample: combines the slices, applies the
//            cut to the list, writes log-probabilities, and appends the token.
// The list overflows when thousands of tokens have nearly equal likelihood at the cut, or when top-k is about LIST_MAX
// or more. `choose` then scans the vocabulary itself, which takes up to a millisecond.
//
// With tensor parallelism each rank has a part of every row's logits. A rank processes the slices of this part and
// stores the results at the slices' global indices. Between the kernels the ranks exchange results
// (../collective/tp_sample.cu).
#pragma once

#include <utility>

#include "device.cuh"

namespace baton::sampling {

constexpr int RUN = 1024;
constexpr int LANES = 16;
constexpr int SLICES_MAX = 128;
constexpr int SLICE_THREADS = 256;
constexpr int CHOOSE_THREADS = 1024;
constexpr int LIST_MAX = 8192;      // listed tokens of a row with top-k or top-p
constexpr int LEVELS = 1024;        // bins of likelihood: eight for each factor of two
constexpr int RUNS_MAX = 1024;
constexpr float GREEDY_BELOW = 1e-5f;
constexpr uint32_t IN_PROMPT = 1u << 31;
constexpr int NO_TOKEN = 0x7fffffff;
constexpr int BINS = 256;
constexpr int RANKS_MAX = 8;

// Summary of a slice of a row. "Raw" logits are those of the model; adjusted logits include bitmasks, min_tokens,
// penalties and biases.
struct Survey {
  float raw_best;       // greatest raw logit
  int raw_bad;          // lowest id whose raw logit is NaN or +infinity; NO_TOKEN if none
  float raw_bad_value;  // raw logit of raw_bad; unset in joined surveys
  float best;           // greatest adjusted logit
  int best_id;
  int bad;              // like raw_bad, of the adjusted logits
  float bad_value;
  float given;          // raw logit of the sample's given token, if the GPU rank has this token; else -infinity
};

// The token of a slice with the earliest arrival time.
struct Winner {
  double arrival;
  int token;
  int reserved;
};

// The cut of top-k or top-p.
struct Cut {
  enum Mode {
    LIST_ALL,  // the list has all tokens of the levels up to `level`
    LIST_LAST, // the list has the tokens of `level`; tokens of the levels before it stay and took part in the draw
    NO_LIST,   // too many tokens for the list
    NO_CUT     // the row has neither top-k nor top-p, or no candidate
  };
  int32_t mode;
  int32_t level;
  int32_t is_reached;  // 0: there are fewer candidates than top-k, or their mass is less than top-p
  int32_t reserved;
  uint64_t need;  // LIST_LAST: mass to keep of the list
};

// Parameters of one sample: the sampling options of its slot, without those that `needs` excludes.
struct Sample {
  int slot;  // -1: padding
  int position;
  int output_len;
  int mask;
  int given;  // the next token of the prompt, which is reported instead of sampled; -1: a token is sampled
  bool is_min_masked;
  bool is_penalised;
  bool is_ruled;  // has allowed tokens or bad words
  bool is_adjusted;
  bool is_greedy;
  bool is_restricted;  // has top-k or top-p
  uint32_t top_k;      // 0: no top-k
  baton_sampling how;
};

// A rank's contribution to a row's log-probabilities.
struct Reported {
  float raw;  // raw logit of the chosen token, if the rank has this token
  int greater;  // number of the GPU rank's tokens with a greater logit than the given token
  struct {
    int id;
    float logit;
  } top[BATON_TOP_LOGPROBS_MAX];  // the rank's greatest logits, as many as requested, in any order
};

struct Scratch {
  Sample* samples;     // [samples]
  uint32_t* counts;    // [samples][vocabulary]; zero between calls
  float* adjusted;     // [samples][stride]
  Survey* surveys;     // [samples][SLICES_MAX]
  Winner* winners;     // [samples][SLICES_MAX]
  float* totals;       // [samples][RUNS_MAX]: sum of weights of each run
  float* raw_totals;   // [samples][RUNS_MAX]: the same of raw logits, for log-probabilities
  uint64_t* list;      // [samples][LIST_MAX]
  int32_t* list_count; // [samples]; with a given token: the number of tokens with a greater logit
  int32_t* bounds;     // [samples]: bits of the earliest arrival so far, rounded up
  uint64_t* distances; // [samples][ranks][LEVELS]: sum over a bin's weights of their distance below the bin's greatest
  uint32_t* numbers;   // [samples][ranks][LEVELS]: number of tokens in each bin
  Cut* cuts;           // [samples]
  uint32_t* arrivals;  // [samples]: finished slices; zero between calls
  uint32_t* allowed;   // [samples][ceil(vocabulary / 32)]: tokens that the rules of a sample permit
  int32_t* listed;     // [samples]: listed tokens of all ranks; only with tensor parallelism
  Reported* reported;  // [samples][ranks]; only with tensor parallelism
};

// The vocabulary range of each rank.
struct Shares {
  int rank;
  int ranks;
  int firsts[RANKS_MAX + 1];  // first token of each rank: a multiple of RUN; the last entry is the vocabulary size
  int slices[RANKS_MAX + 1];  // first slice of each rank
};

struct Arguments {
  baton_pool pool;
  baton_step step;
  baton_sample_args args;
  Scratch scratch;
  Shares shares;
  int slices;  // slices of the whole row
  int slice_runs;
  // Tokens and slices that the kernels process: the whole row, or the part of this rank.
  int first, end;
  int slice_first, slice_count;
};

// Returns the first token of a run of this CTA's slice.
__device__ inline int run_first(const Arguments& in, int run) {
  return in.first + (blockIdx.x * in.slice_runs + run) * RUN;
}

// ---- Samples ----

__device__ inline Sample find_sample(const Arguments& in, int index) {
  Sample sample;
  sample.slot = in.step.sample_slots[index];
  if (sample.slot < 0) return sample;
  sample.position = in.step.row_positions[in.step.sampled_rows[index]];
  sample.mask = in.args.masks ? in.step.sample_masks[index] : -1;
  baton_sampling how = in.pool.sampling[sample.slot];
  const int needs = in.args.needs;
  if (!(needs & BATON_NEEDS_CUT)) how.top_k = 0, how.top_p = 1.f;
  sample.given = -1;
  if (how.prompt_logprobs > 0 && sample.position + 1 < how.prompt_len) {
    const int token = in.pool.tokens[static_cast<int64_t>(sample.slot) * in.pool.token_width + sample.position + 1];
    sample.given = min(max(token, 0), in.args.vocabulary - 1);
    sample.mask = -1;
    how.logprobs = how.prompt_logprobs - 1;
    how.stop_count = how.bias_count = how.bad_count = how.is_listed = 0;
    how.temperature = 0.f, how.repetition_penalty = 1.f, how.presence_penalty = how.frequency_penalty = 0.f;
  }
  if (!(needs & BATON_NEEDS_LOGPROBS)) how.logprobs = -1;
  if (!(needs & BATON_NEEDS_RULES)) how.bias_count = how.bad_count = how.is_listed = 0;
  sample.how = how;
  sample.output_len = max(sample.position + 1 - how.prompt_len, 0);
  sample.is_min_masked = static_cast<uint32_t>(sample.output_len) < how.min_tokens && how.stop_count > 0;
  sample.is_penalised =
      (needs & BATON_NEEDS_PENALTIES) &&
      (how.repetition_penalty != 1.f || how.presence_penalty != 0.f || how.frequency_penalty != 0.f);
  sample.is_ruled = how.bad_count > 0 || how.is_listed;
  sample.is_adjusted =
      sample.mask >= 0 || sample.is_min_masked || sample.is_penalised || sample.is_ruled || how.bias_count > 0;
  sample.is_greedy = !(needs & BATON_NEEDS_DRAW) || how.temperature < GREEDY_BELOW;
  sample.top_k = how.top_k >= static_cast<uint32_t>(in.args.vocabulary) ? 0 : how.top_k;
  sample.is_restricted = !sample.is_greedy && (sample.top_k > 0 || how.top_p < 1.f);
  return sample;
}

// Returns the raw logits, indexed by token id. Only the tokens of this rank are valid.
__device__ inline const float* raw_row(const Arguments& in, int index) {
  return in.args.logits + index * in.args.logit_stride - in.first;
}
__device__ inline float* adjusted_row(const Arguments& in, int index) {
  return in.scratch.adjusted + index * ((static_cast<int64_t>(in.args.vocabulary) + 3) / 4 * 4);
}
__device__ inline const float* values_of(const Arguments& in, const Sample& sample, int index) {
  return sample.is_adjusted ? adjusted_row(in, index) : raw_row(in, index);
}

// Returns the row's bitmask of the tokens that its rules permit.
__device__ inline uint32_t* allowed_row(const Arguments& in, int index) {
  return in.scratch.allowed + static_cast<int64_t>(index) * ((in.args.vocabulary + 31) / 32);
}
__device__ inline const uint32_t* rules_of(const Arguments& in, const Sample& sample) {
  return reinterpret_cast<const uint32_t*>(in.pool.rules + static_cast<int64_t>(sample.slot) * in.pool.rule_width);
}

// ---- Surveys ----

__device__ inline bool is_bad(float x) { return isnan(x) || x == INFINITY; }

__device__ inline void take_best(float& best, int& best_id, float other, int other_id) {
  if (other > best || (other == best && other_id < best_id)) best = other, best_id = other_id;
}

__device__ inline Survey join(Survey a, const Survey& b) {
  a.raw_best = fmaxf(a.raw_best, b.raw_best);
  a.raw_bad = min(a.raw_bad, b.raw_bad);
  a.given = fmaxf(a.given, b.given);
  a.bad = min(a.bad, b.bad);
  take_best(a.best, a.best_id, b.best, b.best_id);
  return a;
}

__device__ inline Survey join_warp(Survey own) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    Survey other;
    other.raw_best = __shfl_xor_sync(FULL, own.raw_best, distance);
    other.raw_bad = __shfl_xor_sync(FULL, own.raw_bad, distance);
    other.best = __shfl_xor_sync(FULL, own.best, distance);
    other.best_id = __shfl_xor_sync(FULL, own.best_id, distance);
    other.bad = __shfl_xor_sync(FULL, own.bad, distance);
    other.given = __shfl_xor_sync(FULL, own.given, distance);
    own = join(own, other);
  }
  return own;
}

__device__ inline Survey nothing_seen() { return {-INFINITY, NO_TOKEN, 0.f, -INFINITY, NO_TOKEN, NO_TOKEN, 0.f, -INFINITY}; }

// Combines the surveys of all slices of a row. Every thread gets the result.
__device__ inline Survey whole_survey(const Arguments& in, int index, Survey* shared) {
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

__device__ inline int status_of(const Survey& survey) {
  if (survey.raw_bad != NO_TOKEN) return BATON_SAMPLE_BAD_LOGIT;
  if (survey.raw_best == -INFINITY) return BATON_SAMPLE_NO_CANDIDATE;
  if (survey.bad != NO_TOKEN) return BATON_SAMPLE_BAD_LOGIT;
  if (survey.best == -INFINITY) return BATON_SAMPLE_NO_CANDIDATE;
  return BATON_SAMPLE_OK;
}

// ---- The result ----

__device__ inline baton_sample_result padding_result() {
  baton_sample_result result = {};
  result.slot = -1;
  result.token = -1;
  return result;
}

// Returns the result without the token, or the result of a failed sample.
__device__ inline baton_sample_result begin_result(const Arguments& in, const Sample& sample, int index,
                                                   const Survey& survey, int failed_before) {
  baton_sample_result result = {};
  result.slot = sample.slot;
  result.position = sample.position;
  result.step_id = static_cast<uint32_t>(in.step.counts[4]);
  result.status = failed_before ? failed_before : status_of(survey);
  if (result.status == BATON_SAMPLE_OK) return result;
  result.token = -1;
  if (result.status == BATON_SAMPLE_BAD_LOGIT && !failed_before) {
    const bool is_raw = survey.raw_bad != NO_TOKEN;
    result.token = is_raw ? survey.raw_bad : survey.bad;
    for (int slice = 0; slice < in.slices; ++slice) {
      const Survey& part = in.scratch.surveys[index * SLICES_MAX + slice];
      if (result.token == (is_raw ? part.raw_bad : part.bad)) {
        result.logprob = is_raw ? part.raw_bad_value : part.bad_value;
        break;
      }
    }
  }
  return result;
}

// Returns whether the ranks must exchange log-probabilities before the result is delivered.
__device__ inline bool is_reported_together(const Sample& sample, const baton_sample_result& result) {
  return sample.how.logprobs >= 0 && result.status == BATON_SAMPLE_OK;
}

// Writes the result, and appends the token to a sequence of length `length`. One thread calls this.
__device__ inline void deliver(const Arguments& in, const Sample& sample, int index, const baton_sample_result& result,
                               int length) {
  in.args.results[index] = result;
  if (in.args.verifies) return;
  baton_slot& slot = in.pool.slots[sample.slot];
  if (result.status != BATON_SAMPLE_OK) slot.failed = result.status;
  if (sample.position + 1 == length && length < in.pool.token_width) {
    // A failed sequence continues with token 0 until the host stops it, since the next step needs a valid id. The same
    // holds after a time-out of another rank.
    const bool is_id = result.status == BATON_SAMPLE_OK && result.token < in.args.vocabulary;
    in.pool.tokens[static_cast<int64_t>(sample.slot) * in.pool.token_width + length] = is_id ? result.token : 0;
    slot.length = length + 1;
  }
}

// Defined in the other sampling files. `shares` has the ranks and their tokens; `prepare` sets their slices.
int32_t prepare(const baton_pool* pool, const baton_step* step, const baton_sample_args* args, Shares& shares,
                Arguments& in);
uint64_t scratch_bytes(int32_t ranks, int32_t samples_max, int32_t vocabulary);
int32_t launch_history(const Arguments& in, cudaStream_t stream);
int32_t launch_rules(const Arguments& in, cudaStream_t stream);
int32_t launch_survey(const Arguments& in, cudaStream_t stream);
int32_t load_draw();
int32_t launch_weigh(const Arguments& in, cudaStream_t stream);
int32_t launch_gather(const Arguments& in, cudaStream_t stream);
int32_t load_choose();
int32_t launch_choose(const Arguments& in, cudaStream_t stream);

}  // namespace baton::sampling
